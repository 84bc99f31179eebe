"""What of a text goes to the model: the whole of it, or its sentences; in small letters what was in capitals; a plain
name or number in place of what it could only spell.

pieces("STOP THAT NOW. He did.", fits=lambda part: True, recase=True)
# Stop that now. (loud, and a space after it)   He did.
pieces("It costs 12.50 euros.", carry=True)
# It costs 735 euros. (735 stands for 12.50, and gives way to it in the translation)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from weft.data.sentences import cut, sentences

_WORD = re.compile(r"[^\W\d_]+")
_WIDE_MARKS = ("。", "！", "？")
_ALONE = re.compile(r"\bi\b(?=$|\s|['’.,;:!?])")
_SEVERAL, _LONG = 3, 5  # so many words in capitals, or one so long beside another, are no abbreviations
_PAIR = re.compile(r"[^\W\d_]{4,} [^\W\d_]{2,}|[^\W\d_]{2,} [^\W\d_]{4,}")  # nor are two with nothing between them
_CAPITALS = re.compile(r"[^\W\d_a-z]{2,}")
# What is hard to spell, and what stands for it, which whoever has read a little copies: names for addresses of pages
# and of mail, a number of three digits for one with marks in it (a year makes another sentence, 30 becomes a word).
_SPELT = (
    (re.compile(r"(?:https?://|www\.)\S*[\w/]|[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), ("Tom", "Boston", "Bill", "Mike", "Ken")),
    (re.compile(r"\d+(?:[.,:/-]\d+)+"), ("735", "385", "648", "274", "596", "817")),
)


@dataclass(frozen=True)
class Piece:
    """A part of a text.

    Attributes:
        text: what the model is given.
        after: what stands between it and the next.
        loud: how it stood, if in capitals; else empty.
        aside: words and numbers in the text, and what they stand for.
    """

    text: str
    after: str = ""
    loud: str = ""
    aside: tuple[tuple[str, str], ...] = ()

    @property
    def original(self) -> str:
        """How it stood."""
        return self.loud or self._put(dict(self.aside))

    @property
    def told(self) -> str:
        """Its text without what stands for something else: what its language is told by."""
        return self._put({plain: "" for plain, _ in self.aside})

    def holds(self, translation: str) -> bool:
        """Whether all that stood aside has its one place in a translation."""
        return all(len(_standing([plain]).findall(translation)) == 1 for plain, _ in self.aside)

    def said(self, translation: str) -> str:
        """The translation, as loud as the piece, with all that stood aside back in its place."""
        return self._put(dict(self.aside), translation, loud=bool(self.loud))

    def _put(self, places: dict[str, str], text: str | None = None, loud: bool = False) -> str:
        """The text with other words in these places, and the rest in capitals, if so."""
        text = self.text if text is None else text
        if not places:
            return text.upper() if loud else text
        parts = _standing(places).split(text)  # every other one is a place
        return "".join(
            places[part] if number % 2 else part.upper() if loud else part for number, part in enumerate(parts)
        )

    def between(self, translation: str) -> str:
        """What stands between its translation and the next: a space, where only the source needs none."""
        needs_none = self.text.endswith(_WIDE_MARKS) and not translation.endswith(_WIDE_MARKS)
        return self.after or " " * needs_none


def pieces(
    text: str, fits: Callable[[str], bool] | None = None, recase: bool = False, carry: bool = False
) -> list[Piece]:
    """The parts of a text.

    Args:
        text: any.
        fits: whether a sentence is short enough to be one piece; if None, the text stays whole.
        recase: whether what stands in capitals is made small.
        carry: whether numbers with marks in them and addresses stand aside.
    """
    parts = [text] if fits is None else [part for sentence in sentences(text) for part in cut(sentence, fits)]
    if len(parts) == 1:
        return [_piece(text, "", recase, carry)]
    found: list[Piece] = []
    for part in parts:
        core = part.strip()
        before, _, after = part.partition(core) if core else ("", "", part)
        if before and found:
            found[-1] = replace(found[-1], after=found[-1].after + before)
        found.append(_piece(core, after, recase, carry))
    return found


def _piece(text: str, after: str, recase: bool, carry: bool) -> Piece:
    plain, aside = _stood_aside(text) if carry else (text, ())
    words = _WORD.findall(_standing(dict(aside)).sub("", plain) if aside else plain)
    telling = [word for word in words if len(word) > 1 or not word.isupper()]
    several = len(words) >= _SEVERAL or max(map(len, telling), default=0) >= _LONG or _PAIR.search(plain) is not None
    is_loud = recase and several and len(telling) > 1 and all(word.isupper() for word in telling)
    if not is_loud:
        return Piece(plain, after, "", aside)
    small = quiet(plain)
    for name, _ in aside:
        small = _standing([name.lower()]).sub(name, small)
    return Piece(small, after, text, aside)


def _standing(words: Iterable[str]) -> re.Pattern[str]:
    """What finds these words where they stand alone."""
    return re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)")


def _stood_aside(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The text with something plain in place of what is hard to spell, as far as there is what it has not itself."""
    aside: dict[str, str] = {}
    for spelt, plain in _SPELT:
        free = [each for each in plain if each not in text]

        def stand_in(found: re.Match[str], free: list[str] = free) -> str:
            if not free:
                return found[0]
            aside[free[0]] = found[0]
            return free.pop(0)

        text = spelt.sub(stand_in, text)
    return text, tuple(aside.items())


def has_capitals(text: str) -> bool:
    """Whether letters next to each other are capitals."""
    return any(found[0].isupper() for found in _CAPITALS.finditer(text))


def quiet(text: str) -> str:
    """In small letters but for the first, and for an I that stands alone."""
    small = _ALONE.sub("I", text.lower())
    first = next((place for place, letter in enumerate(small) if letter.isalpha()), 0)
    return small[:first] + small[first : first + 1].upper() + small[first + 1 :]
