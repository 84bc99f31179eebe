"""Tokenised pairs on disk: made once, then opened as memory maps.

    train, held_out = split_held_out(pairs, 1000, cache)
    store = prepare(train, tokenizers, config.data, cache)
    store.report()        # 29,000 pairs, 3 dropped (2 longer than 128 tokens, 1 empty); 412,345 source and …
    store.sources[0]      # the tokens of the first source, EOS last

A store is a folder of four flat files and a meta.json. Its name is a hash of everything that it depends on: the text,
the tokenizers, the filters, the format. It is written aside and renamed when it is whole, so a half-written one never
counts. Nothing here holds a corpus in memory.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from weft.config import EOS, UNK, DataConfig
from weft.data.directions import Directions
from weft.data.disk import Sequences, digest, flush, once, open_sequences, save_json, sync
from weft.data.text import TextPairs

if TYPE_CHECKING:  # batches need no tokenizers
    from weft.data.tokenizers import Tokenizer, TokenizerPair

_FORMAT = 1  # a store of another format is made again
_CHUNK = 10_000  # pairs that are tokenised at once
_LARGEST_SHARE = 10  # at most one pair in so many is held out


@dataclass(frozen=True)
class Facts:
    """What is known of a store besides its tokens.

    Attributes:
        max_len, max_ratio: the filters, as in DataConfig.
        dropped: how many pairs each filter left out: ``empty``, ``long``, ``ratio``.
        unknown: how many tokens of each side (``source``, ``target``) are UNK.
    """

    max_len: int
    max_ratio: float
    dropped: dict[str, int]
    unknown: dict[str, int]


@dataclass(frozen=True, eq=False)
class PairStore:
    """Tokenised pairs: each source and each target with EOS at its end."""

    sources: Sequences
    targets: Sequences
    facts: Facts

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The store in a folder that ``prepare`` made, as memory maps.

        Raises:
            OSError: if a file is missing.
            ValueError: if it is no store of this format, or its files do not have the sizes that it names.
        """
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != _FORMAT:
            raise ValueError(f"{folder}: expected a store of format {_FORMAT}, not {meta['format']}")
        source, target = (open_sequences(folder, name, meta["sides"][name]) for name in ("source", "target"))
        return cls(source, target, Facts(**meta["facts"]))

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.sources)

    @property
    def dropped(self) -> dict[str, int]:
        """How many pairs each filter left out: ``empty``, ``long``, ``ratio``."""
        return self.facts.dropped

    def report(self) -> str:
        """What there is and what was left out, in one line."""
        tokens = {"source": len(self.sources.tokens), "target": len(self.targets.tokens)}
        line = f"{_pairs(len(self))}, {_left_out(self.facts)}; "
        line += f"{tokens['source']:,} source and {tokens['target']:,} target tokens"
        unknown = [f"{count / tokens[side]:.2%} of the {side}" for side, count in self.facts.unknown.items() if count]
        return f"{line}, unknown: {' and '.join(unknown)}" if unknown else line


def prepare(
    pairs: TextPairs,
    tokenizers: TokenizerPair,
    config: DataConfig,
    cache: Path,
    progress: Callable[[int], None] | None = None,
    *,
    allow_unknown: bool = False,
) -> PairStore:
    """The store of these pairs: opened if the cache has it, made otherwise.

    A pair is left out, and counted, if a side is blank, has more than ``config.max_len`` tokens (EOS counted), or is
    more than ``config.max_ratio`` times as long as the other (EOS not counted). Of several processes that ask for the
    same store one makes it, and the others wait for it.

    Args:
        pairs: the texts, read once and in order.
        tokenizers: one for each side.
        config: the filters; nothing else of it is read.
        cache: the folder of all stores, made if it is not there. Its file system must know locks.
        progress: called with the number of pairs read so far, now and then.
        allow_unknown: whether a char tokenizer may meet a character that it does not know. Right for validation;
            in training data such a character is a mistake.

    Raises:
        ValueError: if no pair is left, or at a character that is not known, with its place.
        OSError: if the texts cannot be read or the store cannot be written.
    """
    made_of = [_FORMAT, pairs.fingerprint(), tokenizers.fingerprint(), config.max_len, config.max_ratio, allow_unknown]

    def make(folder: Path) -> None:
        _write(folder, pairs, tokenizers, config, progress or (lambda count: None), allow_unknown)

    return once(cache / f"pairs-{digest(made_of)}", make, PairStore.open)


def _write(
    folder: Path,
    pairs: TextPairs,
    tokenizers: TokenizerPair,
    config: DataConfig,
    progress: Callable[[int], None],
    allow_unknown: bool,
) -> None:
    folder.mkdir()
    facts = Facts(config.max_len, config.max_ratio, {"empty": 0, "long": 0, "ratio": 0}, {"source": 0, "target": 0})
    sides = _Side(folder, "source", tokenizers.source), _Side(folder, "target", tokenizers.target)
    read = 0
    try:
        for marks, chunk in _marked_chunks(pairs, tokenizers.source):
            # Blank lines have no tokens, or only spaces: they need no tokenizer to be seen.
            full = [index for index, pair in enumerate(chunk) if pair[0].strip() and pair[1].strip()]
            facts.dropped["empty"] += len(chunk) - len(full)
            rows = [side.tokenizer.encode_batch([chunk[i][n] for i in full]) for n, side in enumerate(sides)]
            kept: list[int] = []
            for place, (source, target) in enumerate(zip(*rows, strict=True)):
                fault = _fault(len(source), len(target), config)
                if fault is None:
                    kept.append(place)
                else:
                    facts.dropped[fault] += 1
            for n, (side, opening) in enumerate(zip(sides, (marks, []), strict=True)):
                unknown = side.add([opening + rows[n][place] for place in kept])
                facts.unknown[side.name] += len(unknown)
                if len(unknown) and side.tokenizer.kind == "char" and not allow_unknown:
                    first = full[kept[unknown[0]]]
                    side.refuse(chunk[first][n], pairs.place(read + first))
            read += len(chunk)
            progress(read)
        if not sides[0].count:
            why = f"no pair is left, {_left_out(facts)}" if read else "there are no pairs in it"
            raise ValueError(f"{pairs.name}: {why}")
    finally:
        for side in sides:
            side.close()
    meta = {"format": _FORMAT, "sides": {side.name: side.sizes() for side in sides}, "facts": asdict(facts)}
    save_json(folder / "meta.json", meta)
    sync(folder)


def _fault(source: int, target: int, config: DataConfig) -> str | None:
    """Why a pair of so many tokens (EOS not counted) is left out, or None."""
    shorter, longer = sorted((source, target))
    if not shorter:
        return "empty"
    if config.max_len and longer + 1 > config.max_len:
        return "long"
    return "ratio" if config.max_ratio and longer > config.max_ratio * shorter else None


class _Side:
    """One side of a store while it is written: a file of tokens and one of offsets."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
        self.count = self.total = 0
        self.tokens, self.offsets = ((folder / f"{name}.{part}").open("wb") for part in ("tokens", "offsets"))
        self.offsets.write(np.zeros(1, np.int64).tobytes())

    def add(self, rows: Sequence[list[int]]) -> NDArray[np.int64]:
        """Write the rows, each closed with EOS; the number of the row, for each unknown token."""
        closed = Sequences.of([[*row, EOS] for row in rows], self.dtype)
        self.tokens.write(closed.tokens.tobytes())
        self.offsets.write((closed.offsets[1:] + self.total).tobytes())
        self.count += len(closed)
        self.total += len(closed.tokens)
        places = np.flatnonzero(closed.tokens == UNK)
        return np.searchsorted(closed.offsets, places, side="right") - 1

    def refuse(self, text: str, place: str) -> None:
        """Raise ValueError for a text with something unknown in it."""
        try:
            self.tokenizer.encode(text, strict=True)
        except ValueError as error:
            raise ValueError(f"{place}: in the {self.name}, {error}") from None

    def close(self) -> None:
        for file in (self.tokens, self.offsets):
            with file:
                flush(file)

    def sizes(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total, "dtype": self.dtype.name}


def split_held_out(pairs: TextPairs, count: int, cache: Path | None = None) -> tuple[TextPairs, TextPairs]:
    """The pairs without about ``count`` of them, and these: for a corpus that has no validation set.

    A hash of the source decides, so the same corpus is always split in the same way, and pairs with the same source
    stay together: no source of one part is in the other. At most ``count`` pairs and at most a tenth of all are held
    out. Both parts can be read again and again; the corpus is read when the first of them is.

    Args:
        pairs: the corpus, read twice.
        count: how many pairs to hold out.
        cache: where the held-out pairs are remembered, so that the next start need not read the corpus.

    Returns:
        What is left for training, and what is held out. Reading them raises ValueError if there are too few pairs.
    """
    split = _Split(pairs, count, cache)
    return _Part(split, is_held_out=False), _Part(split, is_held_out=True)


@dataclass(frozen=True)
class _Split:
    pairs: TextPairs
    count: int
    cache: Path | None

    @cached_property
    def fingerprint(self) -> str:
        return digest(["held out", _FORMAT, self.pairs.fingerprint(), self.count])

    @cached_property
    def held_out(self) -> list[tuple[int, str, str]]:
        """Number, source and target of each pair that is held out."""
        if self.cache is None:
            return self._choose()
        place = self.cache / f"held-out-{self.fingerprint}.json"
        return once(place, lambda aside: save_json(aside, self._choose()), _load_held_out)

    def _choose(self) -> list[tuple[int, str, str]]:
        chosen = _chosen(array("Q", (_hash(source) for source, _ in self.pairs)), self.count)
        found = [(i, source, target) for i, (source, target) in enumerate(self.pairs) if _hash(source) in chosen]
        if not found:
            advice = "lower data.held_out, or name a validation set by data.validation"
            raise ValueError(f"{self.pairs.name}: too few different sources to hold {_pairs(self.count)} out; {advice}")
        return found

    @cached_property
    def sources(self) -> frozenset[str]:
        return frozenset(source for _, source, _ in self.held_out)


@dataclass(frozen=True)
class _Part:
    """One side of a split."""

    split: _Split
    is_held_out: bool

    @property
    def name(self) -> str:
        return f"{self.split.pairs.name} ({'held out' if self.is_held_out else 'without what is held out'})"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        if self.is_held_out:
            return iter([(source, target) for _, source, target in self.split.held_out])
        sources = self.split.sources
        return (pair for pair in self.split.pairs if pair[0] not in sources)

    def fingerprint(self) -> str:
        return digest([self.split.fingerprint, self.is_held_out])

    def place(self, index: int) -> str:
        numbers = [number for number, _, _ in self.split.held_out]
        if self.is_held_out:
            return self.split.pairs.place(numbers[index])
        for number in numbers:  # ascending: each one at or before the place moves it on by one
            index += number <= index
        return self.split.pairs.place(index)


def _chosen(hashes: array[int], count: int) -> set[int]:
    """The lowest hashes that together stand for at most ``count`` pairs and a tenth of all."""
    left = min(count, len(hashes) // _LARGEST_SHARE)
    chosen: set[int] = set()
    for value, times in zip(*np.unique(np.asarray(hashes), return_counts=True), strict=True):
        if not left:
            break
        if times <= left:  # a source that stands there too often is passed over
            chosen.add(int(value))
            left -= int(times)
    return chosen


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _load_held_out(path: Path) -> list[tuple[int, str, str]]:
    return [(number, source, target) for number, source, target in json.loads(path.read_bytes())]


def _marked_chunks(pairs: TextPairs, tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[tuple[str, str]]]]:
    """Some pairs of one direction at a time, and what their sources open with."""
    one_way: list[tuple[list[int], Iterable[tuple[str, str]]]] = [([], pairs)]
    if isinstance(pairs, Directions):
        one_way = [([tokenizer.tags[text.target]], text) for text in pairs.texts]
    for marks, text in one_way:
        stream = iter(text)
        while chunk := list(islice(stream, _CHUNK)):
            yield marks, chunk


def _pairs(count: int) -> str:
    return f"{count:,} pair{'' if count == 1 else 's'}"


def _left_out(facts: Facts) -> str:
    """``3 dropped (2 longer than 128 tokens, 1 empty)``."""
    words = {
        "long": f"longer than {facts.max_len:,} tokens",
        "ratio": f"with one side more than {facts.max_ratio:g} times as long",
        "empty": "empty",
    }
    reasons = [f"{facts.dropped[fault]:,} {text}" for fault, text in words.items() if facts.dropped[fault]]
    return f"{sum(facts.dropped.values()):,} dropped ({', '.join(reasons)})" if reasons else "none dropped"
