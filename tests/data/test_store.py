"""What is stored is what was read, tokenised and filtered; a store is made once and never half; nothing leaks."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from weft.config import EOS, PAD, UNK, DataConfig, TokenizerConfig
from weft.data import store as store_module
from weft.data.corpora import open_pairs
from weft.data.disk import Sequences
from weft.data.store import PairStore, prepare, split_held_out
from weft.data.tokenizers import TokenizerPair
from weft.data.vocabulary import train_tokenizer

FREE = DataConfig(max_len=0)


@dataclass
class Text:
    """Pairs held in a list."""

    pairs: list[tuple[str, str]]
    name: str = "a corpus"
    reads: int = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        self.reads += 1
        return iter(self.pairs)

    def fingerprint(self) -> str:
        return sha256(repr(self.pairs).encode()).hexdigest()

    def place(self, index: int) -> str:
        return f"corpus:{index + 1}"


@dataclass
class Coder:
    """Words or characters by number, from a fixed list; what is not in it is UNK."""

    kind: str = "word"
    known: str = "a b c d e f g h"
    vocab_size: int = 100
    shift: int = 0
    batches: list[int] = field(default_factory=list)

    def parts(self, text: str) -> list[str]:
        return text.split() if self.kind == "word" else list(text)

    def encode(self, text: str) -> list[int]:
        known = self.parts(self.known)
        return [known.index(part) + 4 + self.shift if part in known else UNK for part in self.parts(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.batches.append(len(texts))
        return [self.encode(text) for text in texts]


@dataclass
class Coders:
    source: Coder = field(default_factory=Coder)
    target: Coder = field(default_factory=Coder)

    def fingerprint(self) -> str:
        return f"{self.source.kind} {self.source.known} {self.target.known} {self.source.shift}"


def rows(sequences: Sequences) -> list[list[int]]:
    return [sequences[i].tolist() for i in range(len(sequences))]


texts = st.lists(st.sampled_from("abcdefgxy "), max_size=9).map(" ".join)


@given(
    pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=30),
    max_len=st.integers(0, 8),
    max_ratio=st.sampled_from([0.0, 1.0, 1.5, 3.0]),
    chunk=st.integers(1, 7),
)
def test_stores_what_the_filters_leave(
    pairs: list[tuple[str, str]], max_len: int, max_ratio: float, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept, dropped = [], {"empty": 0, "long": 0, "ratio": 0}
    for source, target in pairs:
        a, b = source.split(), target.split()
        if not a or not b:
            dropped["empty"] += 1
        elif max_len and (len(a) + 1 > max_len or len(b) + 1 > max_len):
            dropped["long"] += 1
        elif max_ratio and (len(a) / len(b) > max_ratio or len(b) / len(a) > max_ratio):
            dropped["ratio"] += 1
        else:
            kept.append(([*Coder().encode(source), EOS], [*Coder().encode(target), EOS]))
    folder = tmp_path_factory.mktemp("cache")
    config = DataConfig(max_len=max_len, max_ratio=max_ratio)
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "_CHUNK", chunk)
        if not kept:
            with pytest.raises(ValueError, match=rf"a corpus: no pair is left, {len(pairs)} dropped \("):
                prepare(Text(pairs), Coders(), config, folder)
            return
        made = prepare(Text(pairs), Coders(), config, folder, told.append)
    for store in (made, prepare(Text(pairs), Coders(), config, folder)):
        assert len(store) == len(kept)
        assert list(zip(rows(store.sources), rows(store.targets), strict=True)) == kept
        assert store.dropped == dropped
        assert store.sources.lengths.tolist() == [len(source) for source, _ in kept]
        assert store.facts.unknown == {
            side: sum(p[n].count(UNK) for p in kept) for n, side in enumerate(("source", "target"))
        }
    assert told == [min(n + chunk, len(pairs)) for n in range(0, len(pairs), chunk)]


@given(rows=st.lists(st.lists(st.integers(1, 70_000), max_size=6), min_size=1, max_size=9), data=st.data())
def test_padding_is_torchs(rows: list[list[int]], data: st.DataObject) -> None:
    sequences = Sequences.of(rows)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    expected = pad_sequence([torch.tensor(rows[i], dtype=torch.int64) for i in chosen], True, PAD)
    assert torch.equal(torch.from_numpy(sequences.padded(np.array(chosen))), expected)
    assert sequences.longest == max(map(len, rows))
    assert sequences[-1].tolist() == rows[-1]
    with pytest.raises(IndexError):
        sequences[len(rows)]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.int32)])
def test_the_largest_token_fits(vocab_size: int, dtype: type, tmp_path: Path) -> None:
    coder = Coder(vocab_size=vocab_size, shift=vocab_size - 5)
    store = prepare(Text([("a", "a a")]), Coders(coder, Coder()), FREE, tmp_path)
    assert store.sources[0].tolist() == [vocab_size - 1, EOS]
    assert store.sources.tokens.dtype == dtype
    assert store.targets.tokens.dtype == np.uint16


def test_a_second_start_reads_and_tokenises_nothing(tmp_path: Path) -> None:
    text, coders = Text([("a b", "c d")]), Coders()
    first = prepare(text, coders, FREE, tmp_path)
    assert (text.reads, coders.source.batches) == (1, [1])
    again = prepare(text, coders, FREE, tmp_path)
    assert (text.reads, coders.source.batches) == (1, [1])
    assert rows(again.sources) == rows(first.sources)
    assert not again.sources.tokens.flags.writeable
    assert isinstance(again.sources.tokens.base, np.memmap)


def test_what_a_store_depends_on_makes_another(tmp_path: Path) -> None:
    plain = ([("a b", "c")], Coders(), FREE)
    others = [
        ([("a b", "d")], Coders(), FREE),
        ([("a b", "c")], Coders(Coder(shift=1)), FREE),
        ([("a b", "c")], Coders(), DataConfig(max_len=9)),
        ([("a b", "c")], Coders(), DataConfig(max_len=0, max_ratio=9.0)),
    ]
    for count, (pairs, coders, config) in enumerate([plain, *others], 1):
        prepare(Text(pairs), coders, config, tmp_path)
        assert len(list(tmp_path.glob("pairs-*/meta.json"))) == count
    # Neither where the data comes from nor how much is held out changes a pair.
    prepare(Text(plain[0], "another name"), Coders(), DataConfig(max_len=0, held_out=7, train="x.tsv"), tmp_path)
    assert len(list(tmp_path.glob("pairs-*/meta.json"))) == 1 + len(others)


def test_an_interrupted_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_CHUNK", 2)
    text = Text([("a", "b")] * 5)

    def stop(count: int) -> None:
        if count == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(text, Coders(), FREE, tmp_path, stop)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert len(prepare(text, Coders(), FREE, tmp_path)) == 5


def test_a_killed_start_never_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_CHUNK", 2)
    text = Text([("a", "b c")] * 5)
    child = os.fork()
    if child == 0:
        prepare(text, Coders(), FREE, tmp_path, lambda count: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".part"]
    assert rows(prepare(text, Coders(), FREE, tmp_path).targets) == [[5, 6, EOS]] * 5
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


@pytest.mark.parametrize("harm", ["source.tokens", "target.offsets", "meta.json", "missing", "format"])
def test_a_damaged_store_is_made_again(harm: str, tmp_path: Path) -> None:
    text = Text([("a", "b c")] * 5)
    prepare(text, Coders(), FREE, tmp_path)
    folder = next(path for path in tmp_path.glob("pairs-*") if path.is_dir())
    if harm == "missing":
        (folder / "target.tokens").unlink()
    elif harm == "format":
        (folder / "meta.json").write_text((folder / "meta.json").read_text().replace('"format": 1', '"format": 0'))
    else:
        os.truncate(folder / harm, (folder / harm).stat().st_size - 8)  # a whole number of any type
    with pytest.raises((ValueError, OSError)):
        PairStore.open(folder)
    assert rows(prepare(text, Coders(), FREE, tmp_path).targets) == [[5, 6, EOS]] * 5
    assert text.reads == 2


def test_of_several_at_once_one_makes_it(tmp_path: Path) -> None:
    text, coders, found = Text([("a", "b c")] * 5), Coders(), []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        found.append(rows(prepare(text, coders, FREE, tmp_path).targets))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[[5, 6, EOS]] * 5] * 4
    assert text.reads == 1


def test_reads_no_further_than_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_CHUNK", 10)
    read, furthest = [0, 0], 0

    class Stream(Text):
        def __iter__(self) -> Iterator[tuple[str, str]]:
            for pair in self.pairs:
                read[0] += 1
                yield pair

    def progress(count: int) -> None:
        nonlocal furthest
        furthest = max(furthest, read[0] - read[1])
        read[1] = count

    prepare(Stream([("a", "b")] * 100), Coders(), FREE, tmp_path, progress)
    assert furthest == 10


def test_the_report_says_what_there_is(tmp_path: Path) -> None:
    pairs = [("a b", "c d e")] * 1200 + [("a", " "), ("a " * 9, "b"), ("a " * 10, "b"), ("a a a a", "b")]
    store = prepare(Text(pairs), Coders(), DataConfig(max_len=9, max_ratio=2.0), tmp_path)
    assert store.report() == (
        "1,200 pairs, 4 dropped (2 longer than 9 tokens, 1 with one side more than 2 times as long, 1 empty); "
        "3,600 source and 4,800 target tokens"
    )
    assert prepare(Text([("a", "b x x")]), Coders(), FREE, tmp_path).report() == (
        "1 pair, none dropped; 2 source and 4 target tokens, unknown: 50.00% of the target"
    )


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^a corpus: there are no pairs in it$"):
        prepare(Text([]), Coders(), FREE, tmp_path)
    pairs = [("a a a", "b"), ("a", ""), ("", "a")]
    with pytest.raises(ValueError, match=r"^a corpus: no pair is left, 3 dropped \(1 longer than 3 tokens, 2 empty\)$"):
        prepare(Text(pairs), Coders(), DataConfig(max_len=3), tmp_path)
    assert list(tmp_path.glob("*.part")) == []


def test_an_unknown_character_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_CHUNK", 4)
    source, target = tmp_path / "text.en", tmp_path / "text.de"
    # What is left out, here an empty line and one of five characters in each chunk, may hold what it likes.
    source.write_text("\nababa\nab\nab\n\nababa\nab\nb\nab\n", encoding="utf-8")
    target.write_text("ß\nß\nab\nab\nß\nß\nab\nßßa\nß\n", encoding="utf-8")
    text = open_pairs([str(source), str(target)])
    both = train_tokenizer(["ab"], TokenizerConfig(kind="char"))
    coders = TokenizerPair(both, both)
    config = DataConfig(max_len=5)
    place = rf"{re.escape(str(source))}:8, {re.escape(str(target))}:8"
    message = rf"{place}: in the target, the character 'ß' \(U\+00DF\)"
    with pytest.raises(ValueError, match=message):
        prepare(text, coders, config, tmp_path / "cache")
    store = prepare(text, coders, config, tmp_path / "cache", allow_unknown=True)
    assert store.facts.unknown == {"source": 0, "target": 3}
    assert rows(store.targets)[-2:] == [[UNK, UNK, *both.encode("a"), EOS], [UNK, EOS]]


def test_a_blank_line_is_empty_even_where_a_space_is_a_token(tmp_path: Path) -> None:
    coders = Coders(Coder("char", "ab \u3000"), Coder("char", "ab \u3000"))
    pairs = [("a b", "b"), ("  ", "b"), ("b", " \u3000"), (" a", "b ")]
    store = prepare(Text(pairs), coders, FREE, tmp_path)
    assert store.dropped == {"empty": 2, "long": 0, "ratio": 0}
    assert rows(store.sources) == [[4, 6, 5, EOS], [6, 4, EOS]]


sources = st.sampled_from([f"s{n}" for n in range(40)])


@given(lines=st.lists(sources, max_size=120), count=st.integers(1, 15))
def test_no_source_is_on_both_sides(lines: list[str], count: int) -> None:
    text = Text([(line, f"t{n}") for n, line in enumerate(lines)])
    train, held_out = split_held_out(text, count)
    limit = min(count, len(lines) // 10)
    if limit < min((lines.count(line) for line in lines), default=1):
        with pytest.raises(ValueError, match="too few different sources to hold"):
            list(train)
        return
    left, taken = list(train), list(held_out)
    assert 1 <= len(taken) <= limit
    assert {source for source, _ in left} & {source for source, _ in taken} == set()
    assert sorted(left + taken) == sorted(text.pairs)
    for part in (left, taken):
        assert part == [pair for pair in text.pairs if pair in part]  # in their order
    # What was passed over did not fit beside what was taken.
    assert all(lines.count(source) > limit - len(taken) for source, _ in left)
    for view, part in ((train, left), (held_out, taken)):
        assert [view.place(n) for n in range(len(part))] == [text.place(text.pairs.index(pair)) for pair in part]
    assert (list(train), list(held_out)) == (left, taken)
    assert (list(held_out), list(train)) == (taken, left)
    # The sources decide, not where they stand.
    assert {source for source, _ in split_held_out(Text(text.pairs[::-1]), count)[1]} == {source for source, _ in taken}


def test_so_many_are_held_out_and_any_may_be() -> None:
    text = Text([(f"sentence {n}", "t") for n in range(2000)])
    taken = [int(source.split()[1]) for source, _ in split_held_out(text, 100)[1]]
    assert len(taken) == 100
    assert 700 < sum(taken) / 100 < 1300
    assert len(list(split_held_out(text, 5000)[1])) == 200


def test_parts_have_fingerprints_of_their_own() -> None:
    text = Text([(f"{n}", "t") for n in range(50)])
    seen = {part.fingerprint() for count in (2, 3) for part in split_held_out(text, count)}
    seen |= {part.fingerprint() for part in split_held_out(Text(text.pairs[1:]), 2)} | {text.fingerprint()}
    assert len(seen) == 7
    assert [part.fingerprint() for part in split_held_out(text, 2)] == [
        part.fingerprint() for part in split_held_out(text, 2)
    ]
    assert text.reads == 0  # a fingerprint does not need the split


def test_a_remembered_split_reads_nothing(tmp_path: Path) -> None:
    text = Text([(f"a {n}", "b\tc\n\x85\ud7ff") for n in range(50)])
    first = [list(part) for part in split_held_out(text, 4, tmp_path)]
    reads = text.reads
    train, held_out = split_held_out(text, 4, tmp_path)
    assert list(held_out) == first[1]
    held_out.place(1)
    train.place(1)
    assert text.reads == reads
    assert list(train) == first[0]
    next(tmp_path.glob("*.json")).write_text("[[")
    assert [list(part) for part in split_held_out(text, 4, tmp_path)] == first
