"""A text cut into sentences, of which it can be put together again.

sentences("Mr. Smith left. Did he?")    # ["Mr. Smith left. ", "Did he?"]
"""

from __future__ import annotations

import re
from collections.abc import Callable

_END = re.compile(
    r"""
    [.!?…]+["'”’»)\]]* (?=\s+["'“‘«(\[¿¡–—-]*\s?[^\s\W]) \s+   # a mark, what closes with it, and space before a word
    | [。！？]+["'”’»」』）]* \s*
    | \s*\n\s*
    """,
    re.VERBOSE,
)
_BEFORE = re.compile(r"(\S*?)\.[\"'”’»)\]]*\s+$")
_SHORT = re.compile(
    r"(mr|mrs|ms|dr|prof|st|sr|sra|srta|sres|uds?|vds?|mme|mlle|hr|fr|nr|bzw|ca|evtl|ggf|usw|vgl|vs|approx|dept|fig|vol|"
    r"tel|capt|col|gen|lt|sgt|rev|hon|jan|feb|aug|sept|oct|nov|dec)",
    re.IGNORECASE,
)
_COMMA, _SPACE = re.compile(r"[,;:–—]\s+"), re.compile(r"\s+")


def sentences(text: str) -> list[str]:
    """The sentences, each with the space that follows it; together they are the text.

    A mark ends a sentence if a word follows that is not in small letters, but not after an abbreviation, an initial or
    a number of one or two digits, which German counts with. So does the end of a line.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        here = end.end()
        if "\n" in end.group() or (not _goes_on(text[here:]) and not _is_short(text[start:here])):
            found.append(text[start:here])
            start = here
    return [*found, text[start:]] if start < len(text) or not found else found


def cut(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Parts that fit, as long as may be, cut behind a comma, else behind a word, else anywhere."""
    found = []
    while (most := _longest(text, fits)) < len(text):
        where = _last_place(text[:most])
        found.append(text[:where])
        text = text[where:]
    return [*found, text]


def _longest(text: str, fits: Callable[[str], bool]) -> int:
    """How long a beginning fits; at least 1. No text much longer than that is tried."""
    low, high = 1, 2
    while high < len(text) and fits(text[:high]):
        low, high = high, 2 * high
    if high >= len(text) and fits(text):
        return len(text)
    high = min(high, len(text))
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(text[:middle]) else (low, middle)
    return min(low, len(text))


def _last_place(text: str) -> int:
    """Behind the last comma in the second half, or the last space, or at the end."""
    commas = [match.end() for match in _COMMA.finditer(text) if match.end() > len(text) // 2]
    spaces = [match.end() for match in _SPACE.finditer(text)]
    return (commas or spaces or [len(text)])[-1]


def _goes_on(rest: str) -> bool:
    """Whether what follows begins in small letters."""
    return next((letter.islower() for letter in rest if letter.isalnum()), True)


def _is_short(before: str) -> bool:
    """Whether the dot may be one of an abbreviation."""
    found = _BEFORE.search(before)
    word = found.group(1).lstrip("\"'“‘«([¿¡") if found else ""
    initial = len(word) == 1 and word.isalpha() and word != "I"
    return initial or _SHORT.fullmatch(word) is not None or "." in word or (word.isdecimal() and len(word) < 3)
