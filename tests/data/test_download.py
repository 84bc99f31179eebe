"""A download is whole and verified or not there, whatever the server does; the server here is a real one."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from weft.data.download import digest, fetch

BODY = bytes(range(256)) * 2000  # 512,000 bytes, several chunks
SHA256 = hashlib.sha256(BODY).hexdigest()

Answer = Callable[[BaseHTTPRequestHandler, int | None], None]


def whole(request: BaseHTTPRequestHandler, start: int | None, body: bytes = BODY) -> None:
    """What a server that knows ranges does."""
    if start is not None and start >= len(body):
        request.send_response(416)
        request.send_header("Content-Range", f"bytes */{len(body)}")
        request.send_header("Content-Length", "0")
        request.end_headers()
        return
    request.send_response(200 if start is None else 206)
    if start is not None:
        request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
    request.send_header("Content-Length", str(len(body) - (start or 0)))
    request.end_headers()
    request.wfile.write(body[start or 0 :])


def of(body: bytes) -> Answer:
    """A server that knows ranges, with another file."""
    return lambda request, start: whole(request, start, body)


def rangeless(request: BaseHTTPRequestHandler, start: int | None) -> None:
    whole(request, None)


def cut(count: int, ranges: bool = True) -> Answer:
    """The connection ends after so many bytes, though more were announced."""

    def answer(request: BaseHTTPRequestHandler, start: int | None) -> None:
        first = (start or 0) if ranges else 0
        request.send_response(206 if first else 200)
        if first:
            request.send_header("Content-Range", f"bytes {first}-{len(BODY) - 1}/{len(BODY)}")
        request.send_header("Content-Length", str(len(BODY) - first))
        request.end_headers()
        request.wfile.write(BODY[first : first + count])

    return answer


def unannounced(body: bytes) -> Answer:
    """A body without a length: it ends when the connection does."""

    def answer(request: BaseHTTPRequestHandler, start: int | None) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(body)

    return answer


def says(code: int) -> Answer:
    def answer(request: BaseHTTPRequestHandler, start: int | None) -> None:
        request.send_response(code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def wrong_span(request: BaseHTTPRequestHandler, start: int | None) -> None:
    """An answer of another part than the one asked for."""
    request.send_response(206)
    request.send_header("Content-Range", f"bytes 0-{len(BODY) - 1}/{len(BODY)}")
    request.send_header("Content-Length", str(len(BODY)))
    request.end_headers()
    request.wfile.write(BODY)


@dataclass
class Server:
    """Answers one request after the other as told, the last answer again and again."""

    url: str = ""
    answers: list[Answer] = field(default_factory=lambda: [whole])
    asked: list[int | None] = field(default_factory=list)  # from where on, for each request


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    told = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            span = self.headers["Range"]
            start = None if span is None else int(span.removeprefix("bytes=").removesuffix("-"))
            told.asked.append(start)
            told.answers[min(len(told.asked), len(told.answers)) - 1](self, start)

        def log_message(self, format: str, *args: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{running.server_address[1]}/file"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield told
    running.shutdown()
    running.server_close()
    thread.join()


def bring(server: Server, path: Path, tries: int = 3, progress: Callable[[int, int], None] | None = None) -> None:
    fetch(server.url, path, SHA256, len(BODY), progress, tries=tries, timeout=5.0, pause=0.0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_fetched_whole(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    bring(server, tmp_path / "a" / "b" / "file", progress=lambda done, total: seen.append((done, total)))
    assert (tmp_path / "a" / "b" / "file").read_bytes() == BODY
    assert names(tmp_path / "a" / "b") == ["file"]
    assert server.asked == [None]
    assert seen == sorted(seen)
    assert len(seen) > 2
    assert seen[0] == (0, len(BODY))
    assert seen[-1] == (len(BODY), len(BODY))
    assert digest(tmp_path / "a" / "b" / "file") == SHA256


def test_what_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BODY)
    (tmp_path / "file.part").mkdir()  # nothing can be written: the folder may be read-only
    bring(server, tmp_path / "file")
    assert server.asked == []


def test_a_wrong_file_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    bring(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_cut_connection_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.answers = [cut(100_000), cut(50_000), whole]
    bring(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.asked == [None, 100_000, 150_000]


def test_a_stopped_download_goes_on_in_the_next_call(server: Server, tmp_path: Path) -> None:
    server.answers = [cut(100_000)]
    with pytest.raises(OSError, match=r"100,000 of 512,000 bytes \(1 tries\)"):
        bring(server, tmp_path / "file", tries=1)
    assert names(tmp_path) == ["file.part"]
    server.answers = [whole]
    bring(server, tmp_path / "file")
    assert server.asked == [None, 100_000]
    assert (tmp_path / "file").read_bytes() == BODY
    assert names(tmp_path) == ["file"]


def test_a_whole_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(BODY)
    bring(server, tmp_path / "file")
    assert server.asked == []
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("part", [b"?" * 1000, b"?" * len(BODY), b"?" * (len(BODY) + 1)])
def test_a_part_of_another_file_is_left_behind(part: bytes, server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(part)
    bring(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert server.asked[-1] is None


def test_a_server_without_ranges_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    server.answers = [cut(100_000, ranges=False), rangeless]
    bring(server, tmp_path / "file")
    assert server.asked == [None, 100_000]
    assert (tmp_path / "file").read_bytes() == BODY


@pytest.mark.parametrize("answer", [says(416), wrong_span])
def test_a_server_that_cannot_go_on_is_asked_for_the_whole(answer: Answer, server: Server, tmp_path: Path) -> None:
    server.answers = [cut(100_000), answer, whole]
    bring(server, tmp_path / "file")
    assert server.asked == [None, 100_000, None]
    assert (tmp_path / "file").read_bytes() == BODY


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (of(BODY[:-1] + b"?"), f"its sha256 is [0-9a-f]{{64}}, not {SHA256}"),
        (of(BODY + b"?"), "it has 512,001 bytes, not 512,000"),
        (of(BODY[:-1]), "it has 511,999 bytes, not 512,000"),
        (unannounced(BODY + b"?"), "it has more than 512,000 bytes"),
        (says(404), "the server says 404"),
        (says(403), "the server says 403"),
    ],
)
def test_the_wrong_thing_is_refused_at_once(answer: Answer, message: str, server: Server, tmp_path: Path) -> None:
    server.answers = [answer]
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match=message) as caught:
        bring(server, tmp_path / "file")
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(server.asked) == 1
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_file_that_changed_in_between_is_refused(server: Server, tmp_path: Path) -> None:
    server.answers = [cut(100_000), of(BODY + b"?")]
    with pytest.raises(OSError, match="512,001 bytes, not 512,000"):
        bring(server, tmp_path / "file")
    assert names(tmp_path) == []


def test_a_passing_trouble_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.answers = [says(503), says(429), whole]
    bring(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (says(503), r"the server says 503 .*\(3 tries\)"),
        (unannounced(BODY[:-1]), r"the connection ended after 511,999 of 512,000 bytes \(3 tries\)"),
    ],
)
def test_trouble_that_stays_is_told(answer: Answer, message: str, server: Server, tmp_path: Path) -> None:
    server.answers = [answer]
    with pytest.raises(OSError, match=message):
        bring(server, tmp_path / "file")
    assert len(server.asked) == 3
    assert not (tmp_path / "file").exists()


def test_a_silent_server_is_given_up(server: Server, tmp_path: Path) -> None:
    done = threading.Event()

    def silent(request: BaseHTTPRequestHandler, start: int | None) -> None:
        cut(1000)(request, start)
        done.wait(20)

    server.answers = [silent]
    with pytest.raises(OSError, match="timed out after 1,000 of 512,000"):
        fetch(server.url, tmp_path / "file", SHA256, len(BODY), tries=1, timeout=0.3)
    done.set()
    assert (tmp_path / "file.part").read_bytes() == BODY[:1000]


def test_no_server_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}/file"
        with pytest.raises(OSError, match=r"cannot download http.*refused.*\(2 tries\)"):
            fetch(url, tmp_path / "new" / "file", SHA256, len(BODY), tries=2, pause=0.0)
    assert names(tmp_path / "new") == []


def test_pauses_grow(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.answers = [says(500)]
    with pytest.raises(OSError, match="4 tries"):
        fetch(server.url, tmp_path / "file", SHA256, len(BODY), pause=1.5)
    assert pauses == [1.5, 3.0, 6.0]


def at_once(server: Server, path: Path, first: Answer, count: int) -> list[BaseException]:
    """So many fetch the same file; the first is answered once the others wait. What went wrong."""
    go = threading.Event()

    def slow(request: BaseHTTPRequestHandler, start: int | None) -> None:
        go.wait(20)
        first(request, start)

    server.answers = [slow, whole]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            bring(server, path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    while not server.asked:
        time.sleep(0.01)
    time.sleep(0.1)  # the others arrive at the lock, or would ask too
    go.set()
    for thread in threads:
        thread.join()
    return failures


def test_several_at_once_fetch_once(server: Server, tmp_path: Path) -> None:
    assert at_once(server, tmp_path / "file", whole, 4) == []
    assert server.asked == [None]
    assert (tmp_path / "file").read_bytes() == BODY
    assert names(tmp_path) == ["file"]


def test_when_one_fails_the_next_begins_anew(server: Server, tmp_path: Path) -> None:
    failures = at_once(server, tmp_path / "file", of(BODY[:-1] + b"?"), 2)
    assert len(failures) == 1
    assert "sha256" in str(failures[0])
    assert server.asked == [None, None]
    assert (tmp_path / "file").read_bytes() == BODY
    assert names(tmp_path) == ["file"]
