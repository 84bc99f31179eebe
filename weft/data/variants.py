"""Pairs read with a difference, so that a translator learns what its text has too little of.

    varied(pairs, 0.1)    # one pair in ten

Of a pair that is varied, a word that both sides have, a name or a number, becomes something that nobody can know but
that must be copied: another number, a made-up name, an address. If they share none, an address or a picture is put
behind both sides; or both lose their capital and their last mark, as people type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random

from weft.data.directions import Direction, Directions
from weft.data.disk import digest
from weft.data.text import TextPairs

_VERSION = 2  # of what is made up
_WORD = re.compile(r"\d+(?:[.,:]\d+)+|[^\W_]+(?:[-'’][^\W_]+)*")
_LAST_MARK = re.compile(r"\s*[.!…]+$")
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwxz", "aeiou"
_ENDS = ("com", "org", "net", "de", "es", "fr", "io", "info", "co.uk")
_PICTURES = "😀😂😉😊😍😎😢😡😱🤔👍👏🙏💪🎉🔥❤⭐☀☕🍕🍞🐶🐱🚗✈🏠📷🎵⚽"


@dataclass(frozen=True)
class Varied:
    """Pairs of which a share is varied; which and how follows from a pair's number and its text."""

    pairs: TextPairs
    share: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.pairs.name}, {self.share:.0%} of it varied"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for number, (source, target) in enumerate(self.pairs):
            seed = blake2b(f"{number}\0{source}\0{target}".encode(), digest_size=8).digest()
            if int.from_bytes(seed) < self.share * 2**64:
                yield variant(source, target, Random(seed))
            else:
                yield source, target

    def fingerprint(self) -> str:
        """The same for the same pairs in the same order, and for no others."""
        return digest(["varied", _VERSION, self.share, self.pairs.fingerprint()])

    def place(self, index: int) -> str:
        """Where the pair with this number, from 0, stands."""
        return self.pairs.place(index)


@dataclass(frozen=True)
class VariedDirection(Varied):
    """The same of one direction among several."""

    pairs: Direction

    @property
    def source(self) -> str:
        """The language of the sources."""
        return self.pairs.source

    @property
    def target(self) -> str:
        """The language of the targets."""
        return self.pairs.target

    @property
    def several(self) -> bool:
        """See ``ParallelText``."""
        return self.pairs.several


def varied(pairs: TextPairs, share: float) -> TextPairs:
    """The pairs with this share of them varied, in each direction if there are several."""
    if not share:
        return pairs
    if isinstance(pairs, Directions):
        return replace(pairs, texts=tuple(VariedDirection(text, share) for text in pairs.texts))
    return Varied(pairs, share)


def variant(source: str, target: str, random: Random) -> tuple[str, str]:
    """A pair that says the same of something else, or in another way."""
    if words := _shared(source, target):
        word = random.choice(words)
        made = _number(random) if word.isdecimal() else random.choice((_name, _name, _address))(random)
        return _put(source, word, made), _put(target, word, made)
    if random.random() < 0.5:
        made = random.choice((_address, _picture))(random)
        return f"{source} {made}", f"{target} {made}"
    return _careless(source), _careless(target)


def _shared(source: str, target: str) -> list[str]:
    """Names and numbers that stand once in both."""
    here, there = (_WORD.findall(text) for text in (source, target))
    both = [word for word in dict.fromkeys(here) if here.count(word) == there.count(word) == 1]
    return [word for word in both if word.isdecimal() or (len(word) > 2 and word.istitle())]


def _put(text: str, word: str, made: str) -> str:
    return _WORD.sub(lambda found: made if found[0] == word else found[0], text)


def _careless(text: str) -> str:
    bare = _LAST_MARK.sub("", text)
    return bare[:1].lower() + bare[1:]


def _number(random: Random) -> str:
    digits = random.randint(1, 6)
    return str(random.randrange(10 ** (digits - 1), 10**digits))


def _syllables(random: Random) -> str:
    return "".join(random.choice(_CONSONANTS) + random.choice(_VOWELS) for _ in range(random.randint(1, 3)))


def _name(random: Random) -> str:
    return (_syllables(random) + random.choice(("", random.choice(_CONSONANTS)))).capitalize()


def _address(random: Random) -> str:
    host = f"{_syllables(random)}.{random.choice(_ENDS)}"
    if random.random() < 0.3:
        return f"{_syllables(random)}@{host}"
    path = "".join(f"/{random.choice((_syllables, _number))(random)}" for _ in range(random.randint(0, 2)))
    return random.choice(("https://", "http://", "https://www.", "www.")) + host + path


def _picture(random: Random) -> str:
    return random.choice(_PICTURES)
