"""Text is read exactly, faults are named by file and line, and named sets are what they say."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.places import cache_folder
from weft.data import corpora
from weft.data.corpora import (
    SETS,
    NamedSet,
    SetFile,
    describe,
    find,
    get,
    open_pairs,
    text_paths,
)
from weft.data.text import TextWarning, lines_of, open_lines, read_lines, references

# Everything that some tool takes for the end of a line or a column, and what has no normal form of its own.
ODD = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\0\r\ufeff\u0301\U0001f469\u200d\u4f60 '\""
LINE = st.text(st.one_of(st.characters(exclude_categories=["Cs"], exclude_characters="\n\t"), st.sampled_from(ODD)))


def stored(path: Path, content: str | bytes, packed: bool = False) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


def plain(line: str) -> bool:
    """Whether a line, as the first of a file, has nothing that is dropped."""
    return not line.endswith("\r") and not line.startswith("\ufeff")


@given(lines=st.lists(LINE.filter(plain)), packed=st.booleans(), ended=st.booleans())
def test_any_text_comes_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], packed: bool, ended: bool
) -> None:
    content = "\n".join(lines) + ("\n" if ended and lines else "")
    expected = lines if not lines or ended or lines[-1] else lines[:-1]  # no line follows a last line end
    path = stored(tmp_path_factory.mktemp("text") / "x", content, packed)
    assert read_lines(path) == expected
    assert list(open_lines(path)) == expected


@given(pairs=st.lists(st.tuples(LINE.filter(plain), LINE.filter(plain)), min_size=1), packed=st.booleans())
def test_any_pairs_come_back_in_either_form(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], packed: bool
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    tsv = stored(folder / "x.tsv", "".join(f"{a}\t{b}\n" for a, b in pairs), packed)
    sides = [stored(folder / f"x.{i}", "".join(pair[i] + "\n" for pair in pairs), packed) for i in (0, 1)]
    turned = [(b, a) for a, b in pairs]
    for spec in (str(tsv), [str(tsv)], [str(side) for side in sides], f"{sides[0]},{sides[1]}"):
        text = open_pairs(spec)
        assert list(text) == list(text) == pairs
        assert list(open_pairs(spec, swap=True)) == turned


def test_only_two_columns_count(tmp_path: Path) -> None:
    path = stored(tmp_path / "x.tsv", "a\tb\tc\td\n\t\n")
    assert list(open_pairs(str(path))) == [("a", "b"), ("", "")]


def test_gzip_is_told_by_content_and_may_have_several_members(tmp_path: Path) -> None:
    packed = stored(tmp_path / "x.txt", gzip.compress(b"a\nb") + gzip.compress(b"c\nd\n"))
    not_packed = stored(tmp_path / "y.gz", "a\nbc\nd\n")
    assert read_lines(packed) == read_lines(not_packed) == ["a", "bc", "d"]


def test_the_mark_and_carriage_returns_are_dropped_and_this_is_said_once(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfone\r\ntwo\r\r\nthr\ree\r\n\xef\xbb\xbffour\nfive\r"
    path = stored(tmp_path / "x", content)
    expected = ["one", "two\r", "thr\ree", "\ufefffour", "five\r"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # also clears what Python remembers to have said
        assert read_lines(path) == expected
        assert read_lines(path) == expected
    assert [str(one.message) for one in said] == [
        f"{path}: the byte order mark is dropped",
        f"{path}: carriage returns before line ends are dropped",
    ]
    assert {one.category for one in said} == {TextWarning}


def test_a_mark_alone_is_an_empty_file(tmp_path: Path) -> None:
    with pytest.warns(TextWarning):
        assert read_lines(stored(tmp_path / "x", b"\xef\xbb\xbf")) == []


def test_clean_text_gives_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_lines(stored(tmp_path / "x", "a\rb\n")) == ["a\rb"]


def test_a_stream_is_read_line_by_line() -> None:
    taken: list[int] = []

    def stream() -> Iterator[bytes]:
        for number in range(3):
            taken.append(number)
            yield b"%d\n" % number

    lines = lines_of(stream(), "standard input")
    assert next(lines) == "0"
    assert taken == [0]


@pytest.mark.parametrize("packed", [False, True])
def test_the_corpus_is_never_held(tmp_path: Path, packed: bool) -> None:
    line = "a sentence of some length, as they are in a corpus\tund seine Übersetzung\n"
    path = stored(tmp_path / "x.tsv", line * 100_000, packed)
    text = open_pairs(str(path))
    tracemalloc.start()
    try:
        assert sum(1 for _ in text) == 100_000
        text.fingerprint()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000 < 100_000 * len(line)


def test_places_are_counted_as_editors_count(tmp_path: Path) -> None:
    tsv = stored(tmp_path / "x.tsv", "a\tb\nc\td\n")
    one, two = stored(tmp_path / "x.en", "a\n"), stored(tmp_path / "x.de", "b\n")
    assert open_pairs(str(tsv)).place(1) == f"{tsv}:2"
    assert open_pairs([str(one), str(two)]).place(0) == f"{one}:1, {two}:1"
    assert open_lines(one).place(0) == f"{one}:1"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("first", "second"), [(3, 5), (5, 3), (1, 2)])
def test_unequal_counts_are_told_with_the_first_line_alone(
    tmp_path: Path, first: int, second: int, packed: bool
) -> None:
    one = stored(tmp_path / "x.en", "a\n" * first, packed)
    two = stored(tmp_path / "x.de", "b\n" * second, packed)
    short, long = (one, two) if first < second else (two, one)
    fewer, more = sorted((first, second))
    text = open_pairs(f"{one},{two}")
    taken: list[tuple[str, str]] = []
    with pytest.raises(ValueError, match="no partner") as caught:
        taken.extend(text)
    assert str(caught.value) == (f"{short} has {fewer} lines and {long} has {more}: line {fewer + 1} has no partner")


def fault(spec: str | list[str], source: str = "", target: str = "") -> str:
    """What is said of data that cannot be read, one line; reading goes on to the end."""
    with pytest.raises((ValueError, OSError)) as caught:
        list(open_pairs(spec, source, target))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("packed", [False, True])
def test_faults_in_files_name_file_and_line(tmp_path: Path, packed: bool) -> None:
    good = stored(tmp_path / "good.en", "a\nb\nc\n", packed)
    latin = stored(tmp_path / "latin.de", "eins\nzwei\nfünf\n".encode("latin-1"), packed)
    assert fault([str(good), str(latin)]).startswith(f"{latin}:3: expected UTF-8 text, but byte 2 of the line is 0xfc")
    tabless = stored(tmp_path / "x.tsv", "a\tb\nno tab here\n", packed)
    assert fault(str(tabless)) == (f"{tabless}:2: expected source TAB target, but the line has no tab: 'no tab here'")
    empty = stored(tmp_path / "empty", "", packed)
    assert fault(str(empty)) == f"{empty} is empty: expected a pair a line"
    assert fault([str(good), str(empty)]) == f"{empty} is empty: expected a pair a line"
    assert fault([str(empty), str(good)]) == f"{empty} is empty: expected a pair a line"


def test_a_long_faulty_line_is_shown_in_part(tmp_path: Path) -> None:
    text = fault(str(stored(tmp_path / "x.tsv", "x" * 10_000 + "\n")))
    assert text.endswith("xxx'…")
    assert len(text) < 300


def test_a_wrong_kind_of_file_is_told_on_opening(tmp_path: Path) -> None:
    path = stored(tmp_path / "x.en", "no tab\n")
    with pytest.raises(ValueError, match="no tab"):
        open_pairs(str(path))


@pytest.mark.parametrize("harm", [lambda data: data[:-20], lambda data: data[:50] + b"?" * 50 + data[100:]])
def test_a_damaged_gzip_is_an_error_of_the_file(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    data = gzip.compress("".join(f"{n} a\t{n} b\n" for n in range(5000)).encode())
    path = tmp_path / "x.tsv.gz"
    path.write_bytes(harm(data))
    for read in (lambda: list(open_pairs(str(path))), lambda: read_lines(path)):
        with pytest.raises(OSError, match="the gzip file is damaged") as caught:
            read()
        assert str(caught.value).startswith(str(path))


def test_missing_files_name_the_nearest(tmp_path: Path) -> None:
    one = stored(tmp_path / "train.en", "a\n")
    stored(tmp_path / "train.de", "b\n")
    wrong = tmp_path / "tarin.de"
    for text in (fault(f"{one},{wrong}"), fault([str(one), str(wrong)]), fault(str(wrong))):
        assert text == f"no file {wrong}; did you mean 'train.de'?"
    with pytest.raises(FileNotFoundError, match=r"did you mean 'train\.de'"):
        open_lines(wrong)
    assert "there is no folder" in fault(str(tmp_path / "nowhere" / "x.tsv"))
    assert fault(str(tmp_path)) == f"{tmp_path} is a folder: expected a file"


def test_a_pipe_is_refused_as_a_corpus(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert fault(str(tmp_path / "pipe")).endswith("can be read only once: expected a file")


@pytest.mark.parametrize("spec", ["", "a,b,c", "a,", ",b", [], ["a", "b", "c"], ["a", ""]])
def test_a_spec_that_names_nothing_is_told(spec: str | list[str]) -> None:
    assert fault(spec) == (
        f"expected a TSV file, two files or a set and its part, such as multi30k:train, not {spec!r}"
    )


def test_a_file_comes_before_other_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a,b", "multi30k:train", "tatoeba"):
        stored(Path(name), f"{name}\tx\n")
        assert list(open_pairs(name)) == [(name, "x")]


def test_swapping_turns_the_languages_too(tmp_path: Path) -> None:
    one, two = stored(tmp_path / "x.en", "a\n"), stored(tmp_path / "x.de", "b\n")
    straight = open_pairs([str(one), str(two)], "en", "de")
    turned = open_pairs([str(one), str(two)], "en", "de", swap=True)
    assert (straight.source, straight.target, straight.files) == ("en", "de", (one, two))
    assert (turned.source, turned.target, turned.files) == ("de", "en", (two, one))
    assert straight.name == "x.en, x.de"


def test_the_fingerprint_is_of_content(tmp_path: Path) -> None:
    def print_of(*contents: str, swap: bool = False, packed: bool = False) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        paths = [stored(folder / f"x{i}", content, packed) for i, content in enumerate(contents)]
        return open_pairs([str(path) for path in paths], swap=swap).fingerprint()

    same = [print_of("a\tb\n"), print_of("a\tb\n"), print_of("a\tb\n", packed=True)]
    assert len(set(same)) == 1
    assert print_of("a\n", "b\n") == print_of("b\n", "a\n", swap=True)
    different = [
        same[0],
        print_of("a\tc\n"),
        print_of("a\tb\n", swap=True),
        print_of("a\n", "b\n"),
        print_of("b\n", "a\n"),
        print_of("a\nb\n", "c\nd\n"),
        print_of("a\n", "b\nc\nd\n"),
        print_of("a\tb\n", "a\tb\n"),
    ]
    assert len(set(different)) == len(different)
    assert all(len(one) == 64 for one in different)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"))))
def test_references_are_all_translations_of_a_source(pairs: list[tuple[str, str]]) -> None:
    sources, targets = references(pairs)
    assert sources == sorted(set(sources), key=[source for source, _ in pairs].index)
    assert set(sources) == {source for source, _ in pairs}
    for source, found in zip(sources, targets, strict=True):
        expected = [target for other, target in pairs if other == source]
        assert found == sorted(set(expected), key=expected.index)


# Named sets


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A data folder and a cache, both empty."""
    data, cache = tmp_path / "data", tmp_path / "cache"
    monkeypatch.setenv("WEFT_DATA", str(data))
    monkeypatch.setenv("WEFT_CACHE", str(cache))
    return data, cache / "data"


def made_set(contents: dict[str, bytes], base: str = "") -> NamedSet:
    """A set of two languages in files of their own, published below a base."""
    files = {
        path: SetFile(path, len(data), hashlib.sha256(data).hexdigest(), base and base + path)
        for path, data in contents.items()
    }
    parts = {"train": "train", "validation": "val"}
    return replace(
        SETS["multi30k"], name="small", folder="small", pattern="{part}.{language}", parts=parts, files=files
    )


CONTENTS = {"train.en": b"a\nb\n", "train.de": b"x\ny\n", "val.en": b"c\n", "val.de": b"z\n"}


def place_in(folder: Path, contents: dict[str, bytes], packed: bool = False) -> None:
    folder.mkdir(parents=True)
    for name, data in contents.items():
        (folder / (name + (".gz" if packed else ""))).write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
def test_a_set_is_looked_for_in_the_data_folder_then_in_the_cache(
    packed: bool, homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = homes
    monkeypatch.setitem(SETS, "small", made_set(CONTENTS))
    place_in(cache / "small", CONTENTS, packed)
    assert get("small") == cache / "small"
    text = open_pairs("small:train", "de", "en")
    assert list(text) == [("x", "a"), ("y", "b")]
    assert (text.source, text.target, text.several) == ("de", "en", False)
    assert list(open_pairs("small:train", "de", "en", swap=True)) == [("a", "x"), ("b", "y")]
    assert list(open_pairs("small:validation", "en", "de")) == list(open_pairs("small:val", "en", "de")) == [("c", "z")]
    end = ".gz" if packed else ""
    assert find("small", "val", "en", "de") == tuple(cache / "small" / f"val.{one}{end}" for one in ("en", "de"))
    place_in(data / "small", CONTENTS)
    assert get("small") == data / "small"
    assert find("small", "val", "en", "de")[0] == data / "small" / "val.en"
    assert describe("small")["here"] == str(data / "small")


def test_a_set_that_is_not_here_comes_with_advice(homes: tuple[Path, Path]) -> None:
    advice = (
        "multi30k is not here: `weft data get multi30k` downloads it; or set WEFT_DATA to the folder of multi30k/tok/"
    )
    assert fault("multi30k:train", "en", "de").startswith(advice)
    advice = "tatoeba is not here and cannot be downloaded: set WEFT_DATA to the folder of tatoeba/en-de/train.tsv"
    assert fault("tatoeba:test", "en", "es").startswith(advice)
    with pytest.raises(FileNotFoundError, match="cannot be downloaded"):
        get("tatoeba")
    assert describe("tatoeba")["here"] == "no"


@pytest.mark.parametrize(
    ("spec", "source", "target", "message"),
    [
        ("multi30k", "en", "de", "multi30k has no part '': expected train, validation, test2016, test2017 or mscoco"),
        ("multi30k:trian", "en", "de", "did you mean 'train'?"),
        ("mutli30k:train", "en", "de", "no set 'mutli30k': expected multi30k, multi30k-raw, tatoeba, tatoeba-sample, "),
        ("mutli30k:train", "en", "de", "did you mean 'multi30k'?"),
        ("multi30k:train", "", "", "expected en-de, en-fr or de-fr, either way, not '' and ''"),
        ("multi30k:train", "en", "", "expected en-de, en-fr or de-fr, either way, not 'en' and ''"),
        ("multi30k:train", "en", "en", "expected en-de, en-fr or de-fr, either way, not 'en' and 'en'"),
        ("multi30k:train", "en", "es", "expected en-de, en-fr or de-fr, either way, not 'en' and 'es'"),
        ("tatoeba:train", "de", "fr", "expected en-de, en-es or en-fr, either way, not 'de' and 'fr'"),
        ("tatoeba-sample:train", "en", "fr", "expected en-es, either way, not 'en' and 'fr'"),
    ],
)
def test_wrong_names_of_sets_parts_and_languages_are_told(spec: str, source: str, target: str, message: str) -> None:
    assert message in fault(spec, source, target)


def text_fault(spec: str | list[str]) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        text_paths(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_text_is_files_folders_or_a_part_of_a_set(
    homes: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = stored(tmp_path / "one.txt", "a\n"), stored(tmp_path / "two.txt", "b\n")
    monkeypatch.chdir(tmp_path)
    assert text_paths("one.txt") == (Path("one.txt"),)
    assert text_paths(str(tmp_path)) == (tmp_path,)
    assert text_paths(f"{one},{two}") == text_paths([str(one), str(two)]) == (one, two)
    contents = {"input.txt": b"To be\n"}
    plays = replace(made_set(contents), name="plays", folder="plays", languages=("en",))
    monkeypatch.setitem(SETS, "plays", replace(plays, pattern="{part}.txt", parts={"all": "input"}))
    assert text_fault("plays:all").startswith("plays is not here")
    place_in(homes[0] / "plays", contents, packed=True)
    expected = homes[0] / "plays" / "input.txt.gz"
    assert text_paths("plays:all") == text_paths(["plays:input"]) == (expected,)
    assert text_paths(f"plays:all,{one}") == (expected, one)
    stored(Path("plays:all"), "a file comes first\n")
    assert text_paths("plays:all") == (Path("plays:all"),)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "expected a text file, a folder or a set and its part"),
        ("a,,b", "expected a text file, a folder or a set and its part"),
        ([], "expected a text file, a folder or a set and its part"),
        ("wikitext-2", "wikitext-2 has no part '': expected train, validation or test"),
        ("wikitext-2:tset", "did you mean 'test'?"),
        ("wikitext2:test", "did you mean 'wikitext-2'?"),
        (
            "multi30k:train",
            "multi30k is of pairs: expected text in one language, such as tinyshakespeare or wikitext-2",
        ),
        ("nowhere/x.txt", "there is no folder nowhere"),
    ],
)
def test_wrong_names_of_texts_are_told(spec: str | list[str], message: str) -> None:
    assert message in text_fault(spec)


def test_a_set_in_one_language_has_no_pairs() -> None:
    assert "wikitext-2 is text in one language: expected a set of pairs, multi30k" in fault("wikitext-2:test")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which it is published."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "site"
    place_in(folder, CONTENTS)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_set_is_brought_into_the_cache(
    homes: tuple[Path, Path], site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETS, "small", made_set(CONTENTS, site[1]))
    seen: list[tuple[int, int]] = []
    folder = get("small", lambda done, total: seen.append((done, total)))
    assert folder == homes[1] / "small"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS
    assert list(open_pairs("small:train", "en", "de")) == [("a", "x"), ("b", "y")]
    total = sum(map(len, CONTENTS.values()))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_a_set_that_changed_is_not_taken(
    homes: tuple[Path, Path], site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETS, "small", made_set(CONTENTS, site[1]))
    (site[0] / "val.de").write_bytes(b"?\n")
    with pytest.raises(OSError, match=r"val\.de is not the file that was expected: its sha256"):
        get("small")
    assert not (homes[1] / "small" / "val.de").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_not_the_published_one_is_told(
    packed: bool, homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETS, "small", made_set(CONTENTS))
    place_in(homes[0] / "small", CONTENTS | {"val.en": b"?\n"}, packed)
    with pytest.raises(OSError, match=r"val\.en(\.gz)? is not the file of small: expected sha256"):
        get("small")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.delenv("WEFT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/somebody/.cache/weft")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/weft")
    monkeypatch.setenv("WEFT_CACHE", "/mine")
    assert cache_folder() == Path("/mine")


@pytest.mark.parametrize("name", SETS)
def test_every_set_says_what_it_is(name: str) -> None:
    told = describe(name)
    assert all(told.values())
    chosen = SETS[name]
    assert chosen.name == name
    for path, file in chosen.files.items():
        assert file.path == path
        assert len(bytes.fromhex(file.sha256)) == 32
        assert file.size > 0
        assert not file.url or (file.url.startswith("https://") and file.url.endswith("/" + path))
    assert len({file.sha256 for file in chosen.files.values()}) == len(chosen.files)


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_as_published(name: str, weft_data: Path) -> None:
    assert get(name).is_dir()
    for part in SETS[name].parts:
        if len(SETS[name].languages) == 1:
            assert all(path.is_file() for path in text_paths(f"{name}:{part}"))
            continue
        counts = set()
        for pair in ("en-de", "en-es", "en-fr"):
            source, target = pair.split("-")
            if not SETS[name]._pick(part, source, target):
                continue
            pairs = list(open_pairs(f"{name}:{part}", source, target))
            turned = list(open_pairs(f"{name}:{part}", target, source))
            assert turned == [(b, a) for a, b in pairs]
            assert all(a and b for a, b in pairs)
            counts.add(len(pairs))
        expected = {"train": 29_000, "validation": 1014, "test2016": 1000, "test2017": 1000, "mscoco": 461}
        if name.startswith("multi30k"):
            assert counts == {expected[part]}
        else:
            assert counts


# The sample that comes with the package


SAMPLE = {"train": (20_000, 17_252), "validation": (613, 536), "test": (586, 509)}


def test_the_sample_comes_along_whole() -> None:
    assert get("tatoeba-sample") == Path(corpora.__file__).parent.parent / "shipped"
    sentences: dict[str, set[str]] = {}
    for part, (count, sources) in SAMPLE.items():
        pairs = list(open_pairs(f"tatoeba-sample:{part}"))
        assert len(pairs) == len(set(pairs)) == count
        assert len(references(pairs)[0]) == sources
        assert all(a.strip() and b.strip() for a, b in pairs)
        sentences[part] = {sentence for pair in pairs for sentence in pair}
    # Nothing of one part stands in another, whichever way one translates.
    assert sentences["train"].isdisjoint(sentences["validation"] | sentences["test"])
    assert {source for source, _ in open_pairs("tatoeba-sample:validation")}.isdisjoint(
        source for source, _ in open_pairs("tatoeba-sample:test")
    )
    text = open_pairs("tatoeba-sample:test", source="es")
    assert (text.source, text.target, text.several) == ("es", "en", True)
    assert next(iter(text)) == next(iter(open_pairs("tatoeba-sample:test", "en", "es")))[::-1]


def test_the_sample_is_small_and_names_its_origin() -> None:
    folder = Path(corpora.__file__).parent.parent / "shipped" / "tatoeba-en-es"
    packed = list(folder.glob("*.tsv.gz"))
    assert sorted(path.name for path in packed) == ["test.tsv.gz", "train.tsv.gz", "validation.tsv.gz"]
    assert sum(path.stat().st_size for path in packed) < 1_000_000
    for path in packed:
        assert path.read_bytes()[:8] == b"\x1f\x8b\x08\0\0\0\0\0"  # neither a name nor a time
    told = (folder / "README.md").read_text(encoding="utf-8")
    for needed in ("CC BY 2.0 FR", "www.manythings.org/anki and tatoeba.org", "creativecommons.org/licenses/by/2.0/fr"):
        assert needed in told
    for count, sources in SAMPLE.values():
        assert f"| {count:,} | {sources:,} |" in told


def test_the_sample_follows_from_the_whole(weft_data: Path) -> None:
    whole = list(open_pairs("tatoeba:train", "en", "es"))
    sources, targets = references(whole)
    sizes = dict(zip(sources, map(len, targets), strict=True))
    assert sum(sizes.values()) == len(whole)  # no pair stands twice
    chosen: set[str] = set()
    count = 0
    for sentence in sorted(sizes, key=lambda text: hashlib.sha256(f"tatoeba-sample\t{text}".encode()).hexdigest()):
        if count >= 20_000:
            break
        chosen.add(sentence)
        count += sizes[sentence]
    assert list(open_pairs("tatoeba-sample:train")) == [pair for pair in whole if pair[0] in chosen]
    for part in ("validation", "test"):
        assert list(open_pairs(f"tatoeba-sample:{part}")) == list(open_pairs(f"tatoeba:{part}", "en", "es"))


def test_reading_needs_no_torch() -> None:
    code = "import sys, weft.data.corpora as c; c.open_pairs('tatoeba-sample:test'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
