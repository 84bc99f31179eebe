"""What of a text goes to the model: the whole of it, or its sentences; in small letters what was in capitals.

pieces("STOP THAT NOW. He did.", fits=lambda part: True, recase=True)
# Stop that now. (loud, and a space after it)   He did.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
