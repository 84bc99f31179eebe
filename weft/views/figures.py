"""Attention, gates, positions and curves as matplotlib figures.

Every function returns a ``matplotlib.figure.Figure`` and writes nothing; ``save`` writes. No global state of
matplotlib is touched, so figures can be made in threads and servers. matplotlib comes with ``weft[plots]``.

A weight is one hue, from the paper (0) to full ink (1). Hatched: a query may not look there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.views import summaries
from weft.views.matrix import INK, Matrix, Values, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

Line = tuple[Sequence[float], Sequence[float]]  # x and y of a curve

SIGNED = ("#a8430f", "#ffffff", "#0a2f66")  # for values around 0
HATCH = "#b9bec6"
PATH = "#d55e00"
FORMATS = (".png", ".svg", ".pdf")
# Told apart without colour vision (Okabe and Ito 2008), and by their dashes too.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#8a8a8a")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 3)))
# Fonts that have what DejaVu, matplotlib's own, has not; those that are installed are asked in this order.
_MORE_FONTS = (
    "Noto Sans CJK JP",
    "Noto Sans",
    "Source Han Sans",
    "IPAexGothic",
    "Hiragino Sans",
    "Yu Gothic",
    "Arial Unicode MS",
)
_NUMBERS_UP_TO = 12  # a matrix with more keys has too little room for numbers


def heat_map(matrix: Matrix, numbers: bool = False) -> Figure:
    """One attention matrix: keys across the top, queries down, the caption below.

    Args:
        matrix: what to draw.
        numbers: write each weight into its cell, to two digits.

    Raises:
        ImportError: if matplotlib is missing.
    """
    n, m = matrix.weights.shape
    wide, high = (0.34 * min(max(count, 4), 60) for count in (m, n))
    margin = 0.1 * max(map(len, matrix.queries), default=1)
    top = 0.1 * max(map(len, matrix.keys), default=1) if _long(matrix.keys) else 0.2
    figure = _figure(wide + margin + 1.4, high + top + 0.9)
    axes = figure.add_subplot()
    image = _matrix(axes, matrix)
    if numbers and m <= _NUMBERS_UP_TO:
        _numbers(axes, matrix)
    axes.set_xlabel(f"{matrix.sides[1]} →", loc="left", labelpad=8, fontsize=9, color="#555d69")
    axes.set_ylabel(f"← {matrix.sides[0]}", loc="top", labelpad=8, fontsize=9, color="#555d69")
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    _caption(figure, matrix.caption)
    return figure


def alignment(matrix: Matrix) -> Figure:
    """A matrix of attention from target to source, with its order made visible.

    A dot marks where each target looks most, and a line joins the dots: on a diagonal the words come in the same order
    in both languages; where it is dashed, the target goes back in the source. The caption counts both.
    """
    figure = heat_map(matrix)
    axes = figure.axes[0]
    places = summaries.alignment(matrix.weights).tolist()
    rows = [(place, row) for row, place in enumerate(places) if place >= 0]
    for (x, y), (to_x, to_y) in pairwise(rows):
        axes.plot([x, to_x], [y, to_y], color=PATH, linewidth=1.4, linestyle="-" if to_x >= x else (0, (3, 2)))
    axes.plot(*zip(*rows, strict=True), "o", color=PATH, markersize=4.5, markeredgecolor="white", markeredgewidth=0.7)
    runs, crossings = summaries.order(places)
    told = f"{runs} run{'s' * (runs != 1)} in the source's order, {crossings} crossing{'s' * (crossings != 1)}."
    _caption(figure, f"{matrix.caption}{'.' * (not matrix.caption.endswith('.'))} {told}")
    return figure


def panels(matrices: Sequence[Matrix], caption: str = "", columns: int = 4) -> Figure:
    """Several matrices side by side, such as the heads of a layer; each has its own caption above it."""
    if not matrices:
        raise ValueError("expected at least one matrix, not none")
    columns = min(columns, len(matrices))
    rows = -(-len(matrices) // columns)
    n, m = (max(matrix.weights.shape[side] for matrix in matrices) for side in (0, 1))
    size = 2.3 / max(n, m)
    figure = _figure(columns * (m * size + 0.35), rows * (n * size + 0.55) + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(matrices):
            axes.axis("off")
            continue
        _matrix(axes, matrices[number], size=7)
        axes.set_title(matrices[number].caption, fontsize=9)
    _caption(figure, caption)
    return figure


def values(
    grids: Mapping[str, Values],
    across: str,
    down: str,
    caption: str = "",
    labels: Sequence[str] | None = None,
    high: float = 1.5,
) -> Figure:
    """Grids of numbers [rows, columns] as images below each other: encodings of positions, gates over time.

    Args:
        grids: name -> numbers from 0 to 1, or from −1 to 1: where some are negative, two hues around a white 0.
        across: what the columns are.
        down: what the rows are.
        caption: what is shown.
        labels: of the columns; numbers if None.
        high: how high each is, in inches.
    """
    figure = _figure(7.0, high * len(grids) + 0.9)
    all_axes = figure.subplots(len(grids), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, grid) in zip(all_axes, grids.items(), strict=True):
        _values(figure, axes, plain(grid, torch.float32), labels)
        axes.set_ylabel(down)
        axes.set_title(name, fontsize=9, loc="left")
    all_axes[-1].set_xlabel(across)
    _caption(figure, caption)
    return figure


def lines(plots: Mapping[str, Mapping[str, Line]], across: str, caption: str = "", log: str = "") -> Figure:
    """Curves, in one plot or in several beside each other.

    Args:
        plots: what y is -> name of the curve -> (x, y); a name has the same colour in every plot.
        across: what x is.
        caption: what is shown.
        log: the axes that are logarithmic: "", "x", "y" or "xy".
    """
    count = len(plots)
    figure = _figure(6.4 if count == 1 else 3.4 * count, 4.3 if count == 1 else 3.5)
    all_axes = figure.subplots(1, count, squeeze=False)[0]
    names = list(dict.fromkeys(name for series in plots.values() for name in series))
    for axes, (up, series) in zip(all_axes, plots.items(), strict=True):
        for name, (x, y) in series.items():
            style = _style(names.index(name)) | {"marker": "o" if len(x) <= 12 else ""}
            axes.plot(x, y, label=name, markersize=3.5, **style)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        if "x" in log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        if "y" in log:
            axes.set_yscale("log")
        axes.grid(True, color="#e3e6ea", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *all_axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2 if count == 1 else len(names),
        frameon=False,
        fontsize=8.5,
    )
    _caption(figure, caption)
    return figure


def check_ending(path: str | Path) -> None:
    """Raise ValueError unless the path ends as one of FORMATS."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: a picture must end with {', '.join(FORMATS)}")


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure; the same figure gives the same bytes.

    Raises:
        ValueError: if there is no such format.
    """
    check_ending(path)
    metadata = {"Software": None} if str(path).lower().endswith(".png") else None
    figure.savefig(path, dpi=120, facecolor="white", metadata=metadata)


def _figure(wide: float, high: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'weft[plots]'") from error
    figure = Figure(figsize=(wide, high))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)  # inches around everything
    return figure


def _caption(figure: Figure, caption: str) -> None:
    if caption:
        letters = max(30, int(figure.get_figwidth() * 14.5))
        figure.supxlabel(fill(caption, letters), fontsize=8.5, color="#333a44", x=0.5, ha="center", **_font(caption))


def _matrix(axes: Axes, matrix: Matrix, size: float = 9) -> QuadMesh:
    """Draw the cells, the hatching and the labels; returns what a colour bar needs."""
    n, m = matrix.weights.shape
    image = axes.pcolormesh(
        torch.arange(m + 1).sub(0.5).numpy(),
        torch.arange(n + 1).sub(0.5).numpy(),
        matrix.weights.numpy(),
        cmap=_colours(INK),
        vmin=0,
        vmax=1,
        edgecolors="#eef0f4" if max(n, m) <= 40 else "none",
        linewidth=0.5,
    )
    _hatch(axes, matrix.closed)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.xaxis.set_label_position("top")
    axes.tick_params(top=False, bottom=False, left=False, labeltop=True, labelbottom=False, pad=2)
    axes.set_yticks(range(n), matrix.queries, fontsize=size, **_font(*matrix.queries))
    turned = 90 if _long(matrix.keys) else 0
    axes.set_xticks(range(m), matrix.keys, fontsize=size, rotation=turned, **_font(*matrix.keys))
    _frame(axes)
    return image


def _numbers(axes: Axes, matrix: Matrix) -> None:
    for i, j in (~matrix.closed).nonzero().tolist():
        weight = float(matrix.weights[i, j])
        colour = "white" if weight > 0.5 else "#333a44"
        axes.text(j, i, f"{weight:.2f}".removeprefix("0"), ha="center", va="center", fontsize=7, color=colour)


def _hatch(axes: Axes, closed: Tensor) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    cells = [Rectangle((j - 0.5, i - 0.5), 1, 1) for i, j in closed.nonzero().tolist()]
    if cells:
        axes.add_collection(PatchCollection(cells, facecolor="#f6f7f9", edgecolor=HATCH, hatch="//////", linewidth=0))


def _values(figure: Figure, axes: Axes, grid: Tensor, labels: Sequence[str] | None) -> None:
    if grid.dim() != 2:
        raise ValueError(f"expected a grid [rows, columns], not of shape {list(grid.shape)}")
    signed = bool((grid < 0).any())
    low = -1.0 if signed else 0.0
    image = axes.imshow(
        grid.numpy(), cmap=_colours(SIGNED if signed else INK), vmin=low, vmax=1, aspect="auto", interpolation="nearest"
    )
    if labels is not None:
        turned = 90 if _long(labels) and len(labels) > 8 else 0
        axes.set_xticks(range(grid.shape[1]), labels, fontsize=9, rotation=turned, **_font(*labels))
    _frame(axes)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, ticks=[low, (low + 1) / 2, 1])
    bar.outline.set_visible(False)


def _colours(stops: tuple[str, ...]) -> LinearSegmentedColormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("weft", stops)


def _style(number: int) -> dict[str, Any]:
    """Lines differ in colour, and in their dashes too."""
    return {"color": LINES[number % len(LINES)], "linestyle": DASHES[number % len(DASHES)]}


def _frame(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_color("#c9ced6")


def _long(labels: Sequence[str]) -> bool:
    """Whether labels must be turned to stand beside each other."""
    return any(len(label) > 3 for label in labels)


def _font(*texts: str) -> dict[str, Any]:
    """The fonts for texts that DejaVu has no letters for, as far as they are installed."""
    if all(ord(c) < 0x2E80 for text in texts for c in text):
        return {}
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return {"family": ["DejaVu Sans", *(name for name in _MORE_FONTS if name in installed)]}
