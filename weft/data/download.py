"""Files from the web: whole and verified, or not there at all.

A download is written aside, as ``name.part``. After a cut connection or a stopped process the next try goes on where
that file ends; a server that cannot do so is read from the start. Only what has the expected size and sha256 gets the
name.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

Progress = Callable[[int, int], None]  # bytes that are there, bytes in all

_CHUNK = 1 << 16
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # answers that may be another one a moment later


class _PassingError(Exception):
    """What went wrong where another try may help."""


def fetch(
    url: str,
    path: Path,
    sha256: str,
    size: int,
    progress: Progress | None = None,
    tries: int = 4,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> None:
    """Download a file, or find it there already. A second process that wants the same file waits for the first.

    Args:
        url: where it is published.
        path: what it will be called; folders are made.
        sha256: of the whole, as hexadecimal digits.
        size: of the whole in bytes.
        progress: called as bytes come; after a new start the first number falls.
        tries: how often to try where another try may help.
        timeout: seconds without a byte after which a try has failed.
        pause: seconds before the second try, twice as many before each further one.

    Raises:
        OSError: if the file cannot be had, or is not the one expected. ``path`` is then as it was before.
    """
    if _is_there(path, sha256):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with _alone(part) as file:
        if _is_there(path, sha256):  # another process brought it while this one waited
            return
        for number in range(1, tries + 1):
            try:
                _fill(file, url, sha256, size, progress or (lambda done, total: None), timeout)
                break
            except _PassingError as error:
                if number == tries:
                    raise OSError(f"cannot download {url}: {error} ({tries} tries)") from None
                time.sleep(pause * 2 ** (number - 1))
        file.flush()
        os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)


def _is_there(path: Path, sha256: str) -> bool:
    return path.is_file() and digest(path) == sha256


def digest(path: Path) -> str:
    """The sha256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _alone(part: Path) -> Iterator[BufferedRandom]:
    """The file of a download, open for this process alone; afterwards it is gone unless there is something in it."""
    while True:
        file = part.open("a+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        if _same(file, part):
            break
        file.close()  # whoever had the lock has given this file its name, or removed it
    try:
        yield file
    finally:
        if _same(file, part) and file.seek(0, os.SEEK_END) == 0:
            part.unlink()
        file.close()


def _same(file: BufferedRandom, path: Path) -> bool:
    """Whether this name stands for this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """A new name in a folder outlasts a power cut once the folder itself is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fill(file: BufferedRandom, url: str, sha256: str, size: int, progress: Progress, timeout: float) -> None:
    """One try: from where the file ends to the whole, verified.

    Raises:
        _PassingError: with everything in the file that is of use to it.
        OSError: if no further try will help.
    """
    start = file.seek(0, os.SEEK_END)
    if start < size:
        with _ask(file, url, start, timeout) as response:
            if response.status != 206:  # the server sends the whole, whatever was asked for
                start = _empty(file)
            _check_length(file, response, url, start, size)
            _receive(file, response, url, size, progress)
    file.seek(0)
    found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        _empty(file)
        if start:  # what was there before may have been of another file
            raise _PassingError("it differs from the part that was there before")
        raise OSError(f"{url} is not the file that was expected: its sha256 is {found}, not {sha256}")


def _empty(file: BufferedRandom) -> int:
    file.truncate(0)
    return 0


def _ask(file: BufferedRandom, url: str, start: int, timeout: float) -> http.client.HTTPResponse:
    """The answer to a request for everything from ``start`` on."""
    headers = {"User-Agent": "weft", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # there is nothing from there on: the part is of another file
            _empty(file)
        if error.code in _PASSING | {416}:
            raise _PassingError(f"the server says {error.code} {error.reason}") from None
        raise OSError(f"cannot download {url}: the server says {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise OSError(f"cannot download {url}: {reason}") from None
        raise _PassingError(_said(reason)) from None
    return response


def _check_length(file: BufferedRandom, response: http.client.HTTPResponse, url: str, start: int, size: int) -> None:
    """Nothing is read of an answer that says that it is of another file."""
    length = response.headers["Content-Length"]
    total = int(length) if length and length.isdigit() else size
    if response.status == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers["Content-Range"] or "")
        if span is None or int(span[1]) != start:
            _empty(file)
            raise _PassingError("the server sends another part than was asked for")
        total = int(span[2]) if span[2] != "*" else size
    if total != size:
        _empty(file)
        raise OSError(f"{url} is not the file that was expected: it has {total:,} bytes, not {size:,}")


def _receive(file: BufferedRandom, response: http.client.HTTPResponse, url: str, size: int, progress: Progress) -> None:
    """Append what comes, until the file has its size."""
    done = file.seek(0, os.SEEK_END)
    progress(done, size)
    while True:
        try:
            chunk = response.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            file.flush()
            raise _PassingError(f"{_said(error)} after {done:,} of {size:,} bytes") from None
        if not chunk:
            break
        done += len(chunk)
        if done > size:
            _empty(file)
            raise OSError(f"{url} is not the file that was expected: it has more than {size:,} bytes")
        file.write(chunk)
        progress(done, size)
    if done < size:
        raise _PassingError(f"the connection ended after {done:,} of {size:,} bytes")


def _said(error: object) -> str:
    """What an error says, or its name if it says nothing."""
    return str(error) or type(error).__name__
