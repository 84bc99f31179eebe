"""A text cut into sentences, of which it can be put together again.

sentences("Mr. Smith left. Did he?")    # ["Mr. Smith left. ", "Did he?"]
"""

from __future__ import annotations

import re
from collections.abc import Callable

_END = re.compile(  # possessive, and never from within: a line of a million dots or spaces is read once
    r"""
    (?<![.!?…]) [.!?…]++["'”’»)\]]*+ (?=\s+["'“‘«(\[¿¡–—-]*\s?[^\s\W]) \s+   # a mark, what closes with it, then a word
    | (?<![。！？]) [。！？]++["'”’»」』）]*+ \s*
    | (?<!\s) [^\S\n]*+ \n\s*
    """,
    re.VERBOSE,
)
_LAST_WORD = 40  # characters before a mark among which an abbreviation is looked for
_BEFORE = re.compile(r"(\S*)\.[\"'”’»)\]]*\s+\Z")
_SHORT = re.compile(
    r"(mr|mrs|ms|dr|prof|st|sr|sra|srta|sres|uds?|vds?|mme|mlle|hr|fr|nr|bzw|ca|evtl|ggf|usw|vgl|vs|approx|dept|fig|vol|"
    r"tel|capt|col|gen|lt|sgt|rev|hon|jan|feb|aug|sept|oct|nov|dec)",
    re.IGNORECASE,
)
_NUMBERED = ("no", "art", "p", "pp", "ch")  # short before a number
_LETTER = re.compile(r"[^\W_]")
_COMMA, _SPACE = re.compile(r"[,;:–—]\s+"), re.compile(r"\s+")


def sentences(text: str) -> list[str]:
    """The sentences, each with the space that follows it; together they are the text.

    A mark ends a sentence if a word follows that is not in small letters, but not after an abbreviation, an initial or
    a number of one or two digits, which German counts with. So does the end of a line.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        here = end.end()
        if "\n" in end.group() or not (
            _goes_on(text, here) or _is_short(text, max(start, end.start() - _LAST_WORD), here)
        ):
            found.append(text[start:here])
            start = here
    return [*found, text[start:]] if start < len(text) or not found else found


def cut(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Parts that fit, as long as may be, cut behind a comma, else behind a word, else anywhere."""
    found, start = [], 0
    while start + (most := _longest(text, start, fits)) < len(text):
        where = start + _last_place(text[start : start + most])
        found.append(text[start:where])
        start = where
    return [*found, text[start:]]


def _longest(text: str, start: int, fits: Callable[[str], bool]) -> int:
    """How many characters from there on fit; at least 1. Nothing much longer than that is tried."""
    left, low, high = len(text) - start, 1, 2
    while high < left and fits(text[start : start + high]):
        low, high = high, 2 * high
    if high >= left and fits(text[start:]):
        return left
    high = min(high, left)
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(text[start : start + middle]) else (low, middle)
    return min(low, left)


def _last_place(text: str) -> int:
    """Behind the last comma in the second half, or the last space, or at the end."""
    commas = [match.end() for match in _COMMA.finditer(text) if match.end() > len(text) // 2]
    spaces = [match.end() for match in _SPACE.finditer(text)]
    return (commas or spaces or [len(text)])[-1]


def _goes_on(text: str, here: int) -> bool:
    """Whether what follows begins in small letters."""
    found = _LETTER.search(text, here)
    return found is None or found.group().islower()


def _is_short(text: str, start: int, end: int) -> bool:
    """Whether the dot may be one of an abbreviation."""
    found = _BEFORE.search(text[start:end])
    word = found.group(1).lstrip("\"'“‘«([¿¡") if found else ""
    if word.lower() in _NUMBERED and text[end : end + 1].isdecimal():
        return True
    initial = len(word) == 1 and word.isalpha() and word != "I"
    return initial or _SHORT.fullmatch(word) is not None or "." in word or (word.isdecimal() and len(word) < 3)
