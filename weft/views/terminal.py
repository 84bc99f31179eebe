"""Attention as characters: a matrix of shaded blocks, for terminals, logs and tests."""

from __future__ import annotations

import os
import re
from typing import TextIO
from unicodedata import category, east_asian_width

from weft.views.matrix import INK, Matrix

SHADES = ((0.75, "█"), (0.5, "▓"), (0.25, "▒"), (0.05, "░"))  # from this weight on; below the last, no ink
CLOSED = "╱"
_HUE = "\x1b[38;2;{};{};{}m".format(*bytes.fromhex(INK[1].removeprefix("#")))  # half way to full ink
_LONGEST = 14  # characters of a key's label that are written, top to bottom


def draw(matrix: Matrix, colour: bool = False) -> str:
    """The matrix as text: queries down, keys across, each weight a block two characters wide.

    In colour the blocks have a hue that can be seen on dark and on light ground.

    The keys are written from top to bottom, so that long words need no more room than short ones. The last
    lines are a legend and the caption.

    Example:
        >>> print(draw(Matrix([[0.9, 0.1], [0.3, 0.7]], queries=["le", "chat"], keys=["the", "cat"])))
             t c
             h a
             e t
          le ██░░
        chat ▒▒▓▓
        <BLANKLINE>
        weights from 0.05 ░  0.25 ▒  0.5 ▓  0.75 █  (query down, key across)
    """
    margin = max((width(query) for query in matrix.queries), default=0)
    lines = [" " * (margin + 1) + line for line in _header([_clusters(key) for key in matrix.keys])]
    for query, weights, closed in zip(matrix.queries, matrix.weights.tolist(), matrix.closed.tolist(), strict=True):
        cells = "".join(CLOSED * 2 if shut else shade(w) * 2 for w, shut in zip(weights, closed, strict=True))
        lines.append(f"{' ' * (margin - width(query))}{query} {cells}".rstrip())
    legend = "weights from " + "  ".join(f"{least:g} {block}" for least, block in reversed(SHADES))
    if bool(matrix.closed.any()):
        legend += f"  may not look {CLOSED}"
    down, across = matrix.sides
    drawn = "\n".join([*lines, "", f"{legend}  ({down} down, {across} across)"])
    if colour:
        drawn = re.sub(f"[{''.join(block for _, block in SHADES)}]+", f"{_HUE}\\g<0>\x1b[0m", drawn)
    return "\n".join([drawn, *filter(None, [matrix.caption])])


def shows_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, and nobody has asked for none (NO_COLOR)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shade(weight: float) -> str:
    """The block for a weight."""
    return next((block for least, block in SHADES if weight >= least), " ")


def width(text: str) -> int:
    """How many columns a terminal gives to the text: two for a wide character, none for a combining one."""
    return sum(0 if category(c) in ("Mn", "Me", "Cf") else 2 if east_asian_width(c) in ("W", "F") else 1 for c in text)


def _clusters(text: str) -> list[str]:
    """The characters of a text, each with the combining marks that belong to it."""
    clusters: list[str] = []
    for c in text:
        if clusters and width(c) == 0:
            clusters[-1] += c
        else:
            clusters.append(c)
    return clusters if len(clusters) <= _LONGEST else [*clusters[: _LONGEST - 1], "…"]


def _header(labels: list[list[str]]) -> list[str]:
    """The labels from top to bottom, each two columns wide, ending on the same line."""
    height = max(map(len, labels), default=0)
    columns = [[""] * (height - len(label)) + label for label in labels]
    return ["".join(c + " " * (2 - width(c)) for c in line).rstrip() for line in zip(*columns, strict=True)]
