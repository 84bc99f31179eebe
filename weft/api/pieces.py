"""What of a text goes to the model: the whole of it, or its sentences; in small letters what was in capitals.

pieces("STOP THAT NOW. He did.", fits=lambda part: True, recase=True)
# Stop that now. (loud, and a space after it)   He did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.data.sentences import cut, sentences

_WORD = re.compile(r"[^\W\d_]+")
_WIDE_MARKS = ("。", "！", "？")
_ALONE = re.compile(r"\bi\b(?=$|\s|['’.,;:!?])")
_SEVERAL, _LONG = 3, 5  # so many words in capitals, or one so long beside another, are no abbreviations
_PAIR = re.compile(r"[^\W\d_]{4,} [^\W\d_]{2,}|[^\W\d_]{2,} [^\W\d_]{4,}")  # nor are two with nothing between them
_CAPITALS = re.compile(r"[^\W\d_a-z]{2,}")


@dataclass(frozen=True)
class Piece:
    """A part of a text.

    Attributes:
        text: what the model is given.
        after: what stands between it and the next.
        loud: how it stood, if in capitals; else empty.
    """

    text: str
    after: str = ""
    loud: str = ""

    @property
    def original(self) -> str:
        """How it stood."""
        return self.loud or self.text

    def said(self, translation: str) -> str:
        """The translation, as loud as the piece."""
        return translation.upper() if self.loud else translation

    def between(self, translation: str) -> str:
        """What stands between its translation and the next: a space, where only the source needs none."""
        needs_none = self.text.endswith(_WIDE_MARKS) and not translation.endswith(_WIDE_MARKS)
        return self.after or " " * needs_none


@dataclass(frozen=True)
class Way:
    """What becomes of a text before the search.

    Attributes:
        mark: what sources open with.
        split, recase: as asked for.
        to: the language asked for, if what is in it already is to stay as it is.
        from_: the language of the text, if it was said.
    """

    mark: list[int]
    split: bool = False
    recase: bool = False
    to: str | None = None
    from_: str | None = None


@dataclass(frozen=True)
class Part:
    """What is translated at once.

    Attributes:
        piece: its text.
        ids: its tokens, without EOS.
        line: the number of its line, from 0.
        place: of the part in its line, from 0.
        is_said: whether it stays as it is.
    """

    piece: Piece
    ids: Sequence[int]
    line: int = 0
    place: int = 0
    is_said: bool = False

    @property
    def stream(self) -> int:
        """The number of its random stream: that of its line, or for a later part of a line one of its own."""
        return self.line + (self.place << 40)


@dataclass(frozen=True)
class Line:
    """A text to translate: its parts, and why it cannot be translated, if so."""

    text: str
    parts: tuple[Part, ...]
    fault: str = ""


def pieces(text: str, fits: Callable[[str], bool] | None = None, recase: bool = False) -> list[Piece]:
    """The parts of a text.

    Args:
        text: any.
        fits: whether a sentence is short enough to be one piece; if None, the text stays whole.
        recase: whether what stands in capitals is made small.
    """
    parts = [text] if fits is None else [part for sentence in sentences(text) for part in cut(sentence, fits)]
    if len(parts) == 1:
        return [_piece(text, "", recase)]
    found: list[Piece] = []
    for part in parts:
        core = part.strip()
        before, _, after = part.partition(core) if core else ("", "", part)
        if before and found:
            found[-1] = replace(found[-1], after=found[-1].after + before)
        found.append(_piece(core, after, recase))
    return found


def _piece(text: str, after: str, recase: bool) -> Piece:
    words = _WORD.findall(text)
    telling = [word for word in words if len(word) > 1 or not word.isupper()]
    several = len(words) >= _SEVERAL or max(map(len, telling), default=0) >= _LONG or _PAIR.search(text) is not None
    is_loud = recase and several and len(telling) > 1 and all(word.isupper() for word in telling)
    return Piece(quiet(text), after, text) if is_loud else Piece(text, after)


def has_capitals(text: str) -> bool:
    """Whether letters next to each other are capitals."""
    return any(found[0].isupper() for found in _CAPITALS.finditer(text))


def quiet(text: str) -> str:
    """In small letters but for the first, and for an I that stands alone."""
    small = _ALONE.sub("I", text.lower())
    first = next((place for place, letter in enumerate(small) if letter.isalpha()), 0)
    return small[:first] + small[first : first + 1].upper() + small[first + 1 :]
