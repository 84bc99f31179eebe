"""What is stored is the text of the files, cut into documents and tokenised as a whole; errors name the place."""

from __future__ import annotations

import gzip
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.config import BOS, EOS, UNK, TokenizerConfig
from weft.data import documents, text_store
from weft.data.documents import TextOptions, read_text
from weft.data.text import TextWarning
from weft.data.text_store import TextStore, prepare_text
from weft.data.tokenizers import Tokenizer
from weft.data.vocabulary import train_tokenizer

ALPHABET = "ab é日\n\t.!_'1thecamsi"
PROSE = [
    "the cat sat on the mat.\n",
    "the dog, a cat's friend, ran.\n",
    "don't sit on 12 mats!\n",
    "\n",
    "日本 é\n",
] * 9


def trained(kind: str, extra: str = "") -> Tokenizer:
    lines = [*PROSE, ALPHABET, extra] if kind == "char" else PROSE
    return train_tokenizer(lines, TokenizerConfig(kind=kind, vocab_size=330))


TOKENIZERS = {kind: trained(kind) for kind in ("bpe", "unigram", "char")}


def written(folder: Path, *texts: str) -> list[Path]:
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    return paths


def rows(store: TextStore) -> list[list[int]]:
    return [store.documents[number].tolist() for number in range(len(store))]


def split(text: str, how: str) -> list[str]:
    """The documents of a text, by plain means."""
    if how == "file":
        return [text] if text else []
    if how == "line":
        return [line for line in text.split("\n") if line.strip()]
    found, lines = [], []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            found.append("\n".join(lines))
            lines = []
    return found


# Words with something between them, none longer than the context of a cut.
words = st.one_of(st.sampled_from(["the", "cat", "mat", "sit"]), st.text("abé日1", min_size=1, max_size=4))
marks = st.one_of(st.sampled_from([" ", "\n", ". ", "\n\n", "\n \n"]), st.text(" \n\t.!_'", min_size=1, max_size=4))
texts = st.lists(st.tuples(words, marks).map("".join), max_size=20).map("".join)
hows = st.sampled_from(["file", "blank", "line"])
blocks, pieces, batches = st.integers(1, 20), st.integers(16, 40), st.integers(1, 50)
sizes = st.fixed_dictionaries({"_BLOCK": blocks, "_PIECE": pieces, "_BATCH": batches, "_CONTEXT": st.just(12)})


@example(files=["a\n \nb", " \n\na \n\t"], how="blank", kind="char", end=None, sizes={"_BLOCK": 1})
@settings(max_examples=120)
@given(
    files=st.lists(texts, min_size=1, max_size=3),
    how=hows,
    kind=st.sampled_from(["bpe", "unigram", "char"]),
    end=st.sampled_from([EOS, 7, None]),
    sizes=sizes,
)
def test_documents_are_tokenised_as_a_whole_in_pieces_of_any_size(
    files: list[str],
    how: str,
    kind: str,
    end: int | None,
    sizes: dict[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("text")
    written(folder, *files)
    expected = [document for text in files for document in split(text, how)]
    tokenizer = TOKENIZERS[kind]
    options = TextOptions(how, end)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(documents if name == "_BLOCK" else text_store, name, value)
        portions = list(read_text(folder, options))
        if not expected:
            with pytest.raises(ValueError, match=r"0\.txt.*: there is no text in it"):
                prepare_text(folder, tokenizer, options, folder / "cache")
            return
        store = prepare_text(folder, tokenizer, options, folder / "cache")
    closing = [] if end is None else [end]
    assert rows(store) == [tokenizer.encode(document) + closing for document in expected]
    assert store.tokens.tolist() == [token for row in rows(store) for token in row]
    assert store.starts.tolist() == np.cumsum([0, *map(len, rows(store))])[:-1].tolist()
    assert store.bytes == sum(len(text.encode()) + len(closing) for text in expected)
    assert store.words == sum(len(text.split()) + text.count("\n") + len(closing) for text in expected)
    assert store.facts.characters == sum(map(len, files))
    assert "".join("".join(portions).split()) == "".join("".join(expected).split())
    assert all("\n" not in portion.lstrip("\n") for portion in portions)
    if how == "file":
        assert "".join(portions) == "".join(files)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_prose_is_cut_where_no_token_is_split(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text with and without lines, in pieces as small as its words; a stretch without a place to cut stays text."""
    tokenizer = TOKENIZERS[kind]
    for number, text in enumerate(["".join(PROSE), " ".join("".join(PROSE).split()), "".join(PROSE).replace(" ", "")]):
        [path] = written(tmp_path, text)
        monkeypatch.setattr(text_store, "_PIECE", 40)
        monkeypatch.setattr(documents, "_BLOCK", 100)
        found = prepare_text(path, tokenizer, TextOptions(end=None), tmp_path / f"cache{number}")
        assert found.tokens.tolist() == tokenizer.encode(text)
    [path] = written(tmp_path, "a" * 5000)
    found = prepare_text(path, tokenizer, TextOptions(end=None), tmp_path / "cache")
    assert tokenizer.decode(found.tokens.tolist()).replace(" ", "") == "a" * 5000


@given(text=texts, share=st.floats(0.05, 0.95), how=hows, block=st.integers(1, 30))
def test_the_last_share_is_held_out(
    text: str, share: float, how: str, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("text")
    middle = len(text) // 3
    written(folder, text[:middle], text[middle:])
    tokenizer, options = TOKENIZERS["char"], TextOptions(how, None, share)
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BLOCK", block)
        for held_out in (False, True):
            try:
                parts.append(prepare_text(folder, tokenizer, options, folder / "cache", held_out=held_out))
            except ValueError as error:
                if not re.search("too few to hold|no text in it", str(error)):
                    raise
                return
    train, held_out = (["".join(tokenizer.decode(row) for row in [row]) for row in rows(part)] for part in parts)
    cut = int(len(text) * (1.0 - share))
    if how == "file":
        assert parts[0].bytes + parts[1].bytes == len(text.encode())
        assert "".join(train) == text[:cut]
        assert "".join(held_out) == text[cut:]
    else:
        assert train + held_out == [part for half in (text[:middle], text[middle:]) for part in split(half, how)]
        assert parts[0].facts.characters >= cut  # the first document that begins at the cut or behind it


def test_nanogpts_split_of_tiny_shakespeare(weft_data: Path, tmp_path: Path) -> None:
    """The counts of its data/shakespeare_char/prepare.py: 65 characters, 1,003,854 and 111,540 tokens."""
    path, options = weft_data / "tinyshakespeare" / "input.txt", TextOptions(end=None, held_out_share=0.1)
    tokenizer = train_tokenizer(read_text(path, TextOptions()), TokenizerConfig(kind="char"))
    assert tokenizer.vocab_size == 4 + 65
    train = prepare_text(path, tokenizer, options, tmp_path)
    validation = prepare_text(path, tokenizer, options, tmp_path, held_out=True)
    assert (len(train.tokens), len(validation.tokens)) == (1_003_854, 111_540)
    text = path.read_text()
    assert train.tokens[:100].tolist() == tokenizer.encode(text[:100])
    assert validation.tokens.tolist() == tokenizer.encode(text[1_003_854:])


@pytest.mark.parametrize(("name", "words"), [("valid", 217_646), ("test", 245_569)])
def test_words_of_wikitext_are_counted_as_usual(name: str, words: int, weft_data: Path, tmp_path: Path) -> None:
    path = weft_data / "wikitext-2" / f"{name}.txt.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    counts = {"file": words, "line": sum(len(line.split()) for line in lines)}  # of lines the ends are not predicted
    for split, count in counts.items():
        store = prepare_text(path, TOKENIZERS["char"], TextOptions(split, None), tmp_path, allow_unknown=True)
        assert store.words == count


def test_gzipped_files_folders_and_orders(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a"))
    (tmp_path / "deep" / "c.txt").write_text("ab")
    (tmp_path / "empty.txt").write_text("")
    for other in ("notes.md", ".hidden.txt"):
        (tmp_path / other).write_text("!")
    tokenizer, options = TOKENIZERS["char"], TextOptions()
    cache = tmp_path / "cache"

    def found(*paths: str) -> list[str]:
        given = [tmp_path / path for path in paths]
        return [tokenizer.decode(row) for row in rows(prepare_text(given, tokenizer, options, cache))]

    assert found("") == ["a", "b", "ab"]
    assert found("deep", "b.txt", "a.txt.gz", "b.txt") == ["ab", "b", "a", "b"]
    store = prepare_text(str(tmp_path / "b.txt"), tokenizer, options, cache)
    (tmp_path / "z.gz").write_bytes(gzip.compress(b"b"))  # the same text elsewhere is the same store
    again = prepare_text(tmp_path / "z.gz", tokenizer, options, cache)
    assert again.fingerprint() == store.fingerprint()
    assert isinstance(store.tokens.base, np.memmap)
    assert not store.tokens.flags.writeable


def test_a_mark_and_carriage_returns_are_dropped_and_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained("char", "\r")
    starts = ["", "a", "aa", "aaa"]  # so that a block ends between the two
    for path, start in zip(written(tmp_path, *(f"\ufeff{a}\r\nb\r\r\n\ra\r" for a in starts)), starts, strict=True):
        for block in (1, 2, 100):
            monkeypatch.setattr(documents, "_BLOCK", block)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                store = prepare_text(path, tokenizer, TextOptions(end=None), tmp_path / f"cache{block}")
            assert tokenizer.decode(store.tokens.tolist()) == f"{start}\nb\r\n\ra\r"
            said = [str(warning.message) for warning in caught if issubclass(warning.category, TextWarning)]
            wanted = ["the byte order mark is dropped", "carriage returns before line ends are dropped"]
            assert said == [f"{path}: {text}" for text in (wanted if block == 1 else [])]


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_wrong_encoding_is_named_with_line_and_byte(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_BLOCK", block)
    path, tokenizer = tmp_path / "a.txt", TOKENIZERS["char"]
    what = "expected UTF-8 text, but byte"
    faults = {
        b"a\n\xc3\xa9b\xff": f"2: {what} 6 of the file is 0xff",
        b"ab\n\na\xe6\x97": f"3: {what} 6 of the file is 0xe6",
        "ab".encode("utf-16"): f"1: {what} 1 of the file is 0xff",
    }
    for data, message in faults.items():
        for content in (data, gzip.compress(data)):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:{message}"):
                prepare_text(path, tokenizer, TextOptions(), tmp_path / "cache")
    path.write_bytes(gzip.compress(b"ab" * 1000)[:-10])
    with pytest.raises(OSError, match="gzip file is damaged"):
        prepare_text(path, tokenizer, TextOptions(), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("text-*.part"))


def test_what_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    tokenizer = TOKENIZERS["char"]

    def fails(path: object, message: str, kind: type[Exception] = ValueError, **options: object) -> None:
        with pytest.raises(kind, match=message):
            prepare_text(path, tokenizer, TextOptions(**options), tmp_path / "cache")  # type: ignore[arg-type]

    fails(tmp_path / "inputs.txt", r"no file .*inputs\.txt; did you mean 'input\.txt'\?", OSError)
    fails(tmp_path / "folder", r"folder has no \.txt or \.txt\.gz file below it", OSError)
    fails([], r"expected a file or a folder of text, not \[\]")
    fails(tmp_path / "empty.txt", r"empty\.txt is empty: expected text")
    fails(tmp_path / "input.txt", "must be below", end=10_000)
    fails(tmp_path / "input.txt", r"1 characters are too few to hold 50\.0% of them out", held_out_share=0.5)
    for wrong in ({"split": "lines"}, {"held_out_share": 1.0}, {"held_out_share": -0.1}):
        with pytest.raises(ValueError, match="must be"):
            TextOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing is held out if held_out_share is 0"):
        prepare_text(tmp_path / "input.txt", tokenizer, TextOptions(), tmp_path / "cache", held_out=True)


@pytest.mark.parametrize(("how", "size"), [("file", (14, 30)), ("line", (11, 27)), ("blank", (11, 27))])
def test_an_unknown_character_is_named_with_its_place(
    how: str, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_store, "_PIECE", 4)
    monkeypatch.setattr(documents, "_BLOCK", 7)
    paths = written(tmp_path, "ab\nab\n", "a\n\nab\nababab ababaßb\n")
    options, tokenizer = TextOptions(how), TOKENIZERS["char"]
    message = rf"^{re.escape(str(paths[1]))}:4: the character 'ß' \(U\+00DF\) is none of the \d+ known tokens$"
    with pytest.raises(ValueError, match=message):
        prepare_text(paths, tokenizer, options, tmp_path / "cache")
    store = prepare_text(paths, tokenizer, options, tmp_path / "cache", allow_unknown=True)
    assert store.facts.unknown == store.tokens.tolist().count(UNK) == 1
    counted = rf"^\d documents?, \d\d tokens of {size[0]} words and {size[1]} bytes, unknown: \d\.\d\d%$"
    assert re.search(counted, store.report())


class Numbers:
    """Letters by number, of a vocabulary of any size."""

    kind, unk = "bpe", None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.batches = vocab_size, 0

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.batches += 1
        return [[self.vocab_size - 1] * len(text) for text in texts]

    def fingerprint(self) -> str:
        return str(self.vocab_size)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32), (1 << 32, np.uint32)])
def test_the_largest_token_fits(vocab_size: int, dtype: type, tmp_path: Path) -> None:
    [path] = written(tmp_path, "ab")
    store = prepare_text(path, Numbers(vocab_size), TextOptions(), tmp_path)
    assert store.tokens.tolist() == [vocab_size - 1, vocab_size - 1, EOS]
    assert store.tokens.dtype == dtype


def test_a_store_is_made_once_and_again_if_it_is_damaged(tmp_path: Path) -> None:
    [path] = written(tmp_path, "ab")
    tokenizer = Numbers(100)
    first = prepare_text(path, tokenizer, TextOptions(), tmp_path)
    assert prepare_text(path, tokenizer, TextOptions(), tmp_path).tokens.tolist() == first.tokens.tolist()
    used = tokenizer.batches
    [folder] = [found for found in tmp_path.glob("text-*") if found.is_dir()]
    for name in ("text.tokens", "text.offsets", "meta.json"):
        os.truncate(folder / name, (folder / name).stat().st_size - 2)
        with pytest.raises(ValueError):  # noqa: PT011
            TextStore.open(folder)
        assert prepare_text(path, tokenizer, TextOptions(), tmp_path).tokens.tolist() == [99, 99, EOS]
    assert tokenizer.batches == 4 * used
    others = [TextOptions("line"), TextOptions(end=3), TextOptions(held_out_share=0.5)]
    prints = {prepare_text(path, tokenizer, options, tmp_path).fingerprint() for options in others}
    prints.add(prepare_text(path, tokenizer, others[-1], tmp_path, held_out=True).fingerprint())
    assert len(prints | {first.fingerprint(), prepare_text(path, Numbers(9), others[0], tmp_path).fingerprint()}) == 6


def test_memory_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of many blocks: what is held at once is a few pieces."""
    monkeypatch.setattr(documents, "_BLOCK", 1000)
    monkeypatch.setattr(text_store, "_PIECE", 500)
    monkeypatch.setattr(text_store, "_BATCH", 2000)
    longest = 0

    class Watched(Numbers):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            nonlocal longest
            longest = max(longest, sum(map(len, texts)))
            return super().encode_batch(texts)

    [path] = written(tmp_path, "ab" * 100_000)
    store = prepare_text(path, Watched(9), TextOptions(), tmp_path)
    assert len(store.tokens) == 200_001
    assert longest < 5000


def test_a_token_may_stand_before_each_document(tmp_path: Path) -> None:
    paths = written(tmp_path, "the cat\n\nthe dog\n\n", "sat\n")
    options = TextOptions("blank", begin=BOS)
    tokenizer = TOKENIZERS["bpe"]
    store = prepare_text(paths, tokenizer, options, tmp_path / "cache")
    assert rows(store) == [[BOS, *tokenizer.encode(text), EOS] for text in ("the cat", "the dog", "sat")]
    with pytest.raises(ValueError, match="the token before a document must be below"):
        prepare_text(paths, tokenizer, TextOptions(begin=100_000), tmp_path / "cache")
