"""Several languages in one model: pairs in every direction between them, and the mark that says which is wanted.

    pairs = open_directions("tatoeba:train", ["en", "es", "fr"], bridge="en")
    pairs = open_directions("mine/{source}-{target}.tsv", ["en", "es"])    # the files that are there, read both ways

Each source opens with a token that names the language it should become (Johnson et al. 2017); see ``Tokenizer.tags``.
Two languages without pairs of their own can be bridged: what both say for one sentence of a third language is a pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice, permutations, product
from pathlib import Path
from typing import Protocol

from weft.data.corpora import open_pairs, set_part
from weft.data.disk import digest
from weft.data.text import ParallelText, TextPairs, references

SOURCE, TARGET = "{source}", "{target}"


class Direction(TextPairs, Protocol):
    """Pairs from one language to another."""

    @property
    def source(self) -> str:
        """The language of the sources."""

    @property
    def target(self) -> str:
        """The language of the targets."""

    @property
    def several(self) -> bool:
        """See ``ParallelText``."""


@dataclass(frozen=True)
class Bridged:
    """Pairs of what two texts from one language have for the same sentence. Reading holds both texts.

    Attributes:
        first, second: from the bridge to the source, and to the target.
        every: each translation with each; else each at least once, and no more pairs than the larger number.
        share: of these pairs, so great a part is read; which, their text decides.
    """

    first: ParallelText
    second: ParallelText
    every: bool = False
    several: bool = True
    share: float = 1.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.source}-{self.target} over {self.first.source}"

    @property
    def source(self) -> str:
        """The language of the sources."""
        return self.first.target

    @property
    def target(self) -> str:
        """The language of the targets."""
        return self.second.target

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The pairs, each once, in the order of the first text's sentences."""
        sentences, texts = references(self.first)
        others = dict(zip(*references(self.second), strict=True))
        pairs = (
            product(texts[place], others[sentence]) if self.every else _side_by_side(texts[place], others[sentence])
            for place, sentence in enumerate(sentences)
            if sentence in others
        )
        return (pair for pair in dict.fromkeys(chain.from_iterable(pairs)) if _drawn("\0".join(pair)) < self.share)

    def fingerprint(self) -> str:
        """The same for the same pairs in the same order, and for no others."""
        return digest(["bridged", self.first.fingerprint(), self.second.fingerprint(), self.every, self.share])

    def place(self, index: int) -> str:
        """The pair itself: it stands in two files."""
        return f"{self.name}, the pair {next(islice(self, index, None))!r}"


@dataclass(frozen=True)
class Directions:
    """Texts in several directions, one after the other."""

    texts: tuple[Direction, ...]

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(text.name for text in self.texts)

    @property
    def languages(self) -> list[str]:
        """What is translated to, each once."""
        return list(dict.fromkeys(text.target for text in self.texts))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """All pairs, without their marks."""
        return chain.from_iterable(self.texts)

    def fingerprint(self) -> str:
        """The same for the same pairs in the same order and directions, and for no others."""
        return digest([(text.source, text.target, text.fingerprint()) for text in self.texts])

    def place(self, index: int) -> str:
        """Where the pair with this number, from 0, stands."""
        for text in self.texts:
            count = sum(1 for _ in text)
            if index < count:
                return text.place(index)
            index -= count
        raise IndexError(f"there is no pair {index}")


def is_many(spec: str | Sequence[str]) -> bool:
    """Whether a text may have several directions: a part of a named set, or a path with {source} and {target} in it."""
    return isinstance(spec, str) and (set_part(spec) is not None or (SOURCE in spec and TARGET in spec))


def open_directions(
    spec: str | Sequence[str], languages: Sequence[str], bridge: str = "", every: bool = False, share: float = 1.0
) -> Directions:
    """Parallel text in every direction between the languages for which there is some.

    Args:
        spec: a part of a named set, or a path with {source} and {target} in it, of a TSV file.
        languages: at least two.
        bridge: one of them, over which pairs of two others are made that have no text of their own.
        every, share: see ``Bridged``.

    Raises:
        ValueError: if the spec or the languages are not as expected, or there is no text in any direction.
        OSError: if a file is missing.
    """
    if not isinstance(spec, str) or not is_many(spec):
        what = f"a part of a named set, or a path with {SOURCE} and {TARGET} in it"
        raise ValueError(f"several languages need {what}, not {spec!r}")
    if len(set(languages)) < 2 or len(set(languages)) < len(languages):
        raise ValueError(f"languages must be two or more, each named once, not {', '.join(languages) or 'none'}")
    if bridge and bridge not in languages:
        raise ValueError(f"bridge must be one of {', '.join(languages)}, not {bridge!r}")
    ways = list(permutations(languages, 2))
    straight = {way: text for way in ways if (text := _between(spec, *way)) is not None}
    found: dict[tuple[str, str], Direction] = {**straight}
    for source, target in ways:
        if bridge and (source, target) not in straight and {(bridge, source), (bridge, target)} <= straight.keys():
            found[source, target] = Bridged(straight[bridge, source], straight[bridge, target], every, share=share)
    if not found:
        raise ValueError(f"{spec} has no pairs between any of {', '.join(languages)}")
    return Directions(tuple(found.values()))


def _between(spec: str, source: str, target: str) -> ParallelText | None:
    """The text of a direction, if there is one."""
    if found := set_part(spec):
        return open_pairs(spec, source, target) if found[0].has(found[1], source, target) else None
    for first, second in ((source, target), (target, source)):
        path = spec.replace(SOURCE, first).replace(TARGET, second)
        if Path(path).is_file():
            return open_pairs(path, first, second, swap=first != source)
    return None


def _drawn(text: str) -> float:
    """A number from 0 up to 1, by chance but always the same for a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest()) / 2**48


def _side_by_side(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number in range(max(len(first), len(second))):
        yield first[number % len(first)], second[number % len(second)]
