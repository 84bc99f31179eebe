"""What of a text goes to the model: the whole of it, or its sentences; in small letters what was in capitals.

pieces("STOP THAT NOW. He did.", fits=lambda part: True, recase=True)
# Stop that now. (is_loud, and a space after it)   He did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.data.sentences import cut, sentences

_WORD = re.compile(r"[^\W\d_]+")
_ALONE = re.compile(r"\bi\b(?=$|\s|['’.,;:!?])")
_LOUD_WORDS, _LOUD_LETTERS = 2, 5  # fewer capitals are an abbreviation or a name


@dataclass(frozen=True)
class Piece:
    """A part of a text.

    Attributes:
        text: what the model is given.
        after: the space between it and the next.
        is_loud: whether it stood in capitals, as its translation then should.
    """

    text: str
    after: str = ""
    is_loud: bool = False

    def said(self, translation: str) -> str:
        """The translation, as loud as the piece."""
        return translation.upper() if self.is_loud else translation


@dataclass(frozen=True)
class Way:
    """What becomes of a text before the search.

    Attributes:
        mark: what sources open with.
        split, recase: as asked for.
        told: the language of a text that stays as it is; None if that is not asked.
    """

    mark: list[int]
    split: bool = False
    recase: bool = False
    told: str | None = None


@dataclass(frozen=True)
class Part:
    """What is translated at once: its tokens without EOS, the number of its line from 0, whether it stays as it is."""

    piece: Piece
    ids: Sequence[int]
    number: int = 0
    is_said: bool = False


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
            found[-1] = Piece(found[-1].text, found[-1].after + before, found[-1].is_loud)
        found.append(_piece(core, after, recase))
    return found


def _piece(text: str, after: str, recase: bool) -> Piece:
    words = _WORD.findall(text)
    loud = len(words) >= _LOUD_WORDS and sum(map(len, words)) >= _LOUD_LETTERS and text == text.upper() != text.lower()
    return Piece(_quiet(text), after, True) if recase and loud else Piece(text, after)


def _quiet(text: str) -> str:
    """In small letters but for the first, and for an I that stands alone."""
    small = _ALONE.sub("I", text.lower())
    first = next((place for place, letter in enumerate(small) if letter.isalpha()), 0)
    return small[:first] + small[first : first + 1].upper() + small[first + 1 :]
