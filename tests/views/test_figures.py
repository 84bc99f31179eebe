"""The figures show what they are given; read back from matplotlib's own objects."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.collections import PatchCollection, QuadMesh
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from weft.views import figures
from weft.views.matrix import Matrix


def words(figure: Figure) -> list[str]:
    """Every text of the figure, line breaks as spaces."""
    from matplotlib.text import Text

    return [" ".join(text.get_text().split()) for text in figure.findobj(Text) if text.get_text()]


def weights(n: int, m: int) -> torch.Tensor:
    return torch.rand(n, m).softmax(-1)


def test_a_heat_map_shows_the_weights_the_labels_and_the_caption() -> None:
    shown = weights(3, 4)
    matrix = Matrix(shown, list("abc"), ["the", "little", "brown", "fox"], caption="what it is", sides=("out", "in"))
    figure = figures.heat_map(matrix)
    (mesh,) = figure.axes[0].findobj(QuadMesh)
    assert torch.equal(torch.as_tensor(mesh.get_array()), shown)
    assert mesh.get_clim() == (0, 1)
    assert mesh.cmap(0.0)[:3] == (1, 1, 1)  # no weight, no ink
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list("abc")
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["the", "little", "brown", "fox"]
    assert figure.axes[0].get_xticklabels()[0].get_rotation() == 90
    assert {"what it is", "← out", "in →"} <= set(words(figure))
    low, high = figure.axes[0].get_ylim()
    assert low > high  # the first query is on top
    assert not figure.axes[0].findobj(PatchCollection)


def lightness(colour: tuple[float, ...]) -> float:
    """CIE L* of an sRGB colour, from 0 to 100."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour[:3]]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_more_weight_is_darker_in_even_steps() -> None:
    mesh = figures.heat_map(Matrix(weights(2, 2))).axes[0].findobj(QuadMesh)[0]
    light = [lightness(mesh.cmap(weight / 8)) for weight in range(9)]
    steps = [a - b for a, b in pairwise(light)]
    assert light[0] == pytest.approx(100, abs=0.01)
    assert light[-1] < 25
    assert max(steps) < 1.1 * min(steps)


def test_what_is_closed_is_hatched() -> None:
    allowed = torch.ones(4, 4).tril().bool()
    figure = figures.heat_map(Matrix(weights(4, 4), allowed=allowed))
    (hatching,) = figure.axes[0].findobj(PatchCollection)
    assert hatching.get_hatch()
    cells = {tuple(round(float(c)) for c in path.vertices.mean(0) + 0.1) for path in hatching.get_paths()}
    assert len(hatching.get_paths()) == 6
    assert cells == {(key, query) for query in range(4) for key in range(4) if key > query}


def test_numbers_stand_in_the_cells_that_are_open() -> None:
    matrix = Matrix([[0.875, 0.125], [1.0, 0.0]], allowed=[[True, True], [True, False]])
    assert {".88", ".12", "1.00"} <= set(words(figures.heat_map(matrix, numbers=True)))
    assert ".00" not in words(figures.heat_map(matrix, numbers=True))
    assert ".88" not in words(figures.heat_map(matrix))


def test_panels_are_one_per_matrix() -> None:
    matrices = [Matrix(weights(3, 3), caption=f"head {number}") for number in range(5)]
    figure = figures.panels(matrices, "all heads", columns=3)
    assert len(figure.axes) == 6
    assert [axes.get_title() for axes in figure.axes if axes.axison] == [f"head {number}" for number in range(5)]
    assert "all heads" in words(figure)
    with pytest.raises(ValueError, match="at least one matrix"):
        figures.panels([])


def test_values_are_signed_where_they_are() -> None:
    grids = {"gate": torch.rand(3, 5), "candidate": torch.rand(3, 5) * 2 - 1}
    figure = figures.values(grids, "letter", "unit", "gates", list("abcde"))
    images = [axes.get_images()[0] for axes in figure.axes if axes.get_images()]
    assert [image.get_clim() for image in images] == [(0, 1), (-1, 1)]
    assert torch.allclose(torch.as_tensor(images[1].get_array()), grids["candidate"])
    assert {"gate", "candidate", "letter", "unit", "gates", "e"} <= set(words(figure))
    with pytest.raises(ValueError, match=r"expected a grid \[rows, columns\], not of shape \[3\]"):
        figures.values({"": torch.rand(3)}, "x", "y")


def test_lines_have_one_style_in_every_plot() -> None:
    x = [64, 128, 256]
    plots = {"time": {"a": (x, [1, 2, 3]), "b": (x, [2, 2, 2])}, "memory": {"b": (x, [3, 2, 1])}}
    figure = figures.lines(plots, "length", "measured", log="xy")
    left, right = figure.axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[1, 2, 3], [2, 2, 2]]
    assert left.lines[1].get_color() == right.lines[0].get_color() != left.lines[0].get_color()
    assert left.lines[1].get_linestyle() == right.lines[0].get_linestyle() != left.lines[0].get_linestyle()
    assert left.get_xscale() == left.get_yscale() == "log"
    assert figures.lines(plots, "length").axes[0].get_xscale() == "linear"
    assert {"time", "memory", "length", "measured", "a", "b"} <= set(words(figure))


def test_colours_of_lines_differ_in_lightness_or_dash() -> None:
    assert len(set(figures.LINES)) == len(figures.LINES) == len(set(map(str, figures.DASHES))) == 8
    for colour in figures.LINES:
        assert sum(to_rgb(colour)) < 2.4  # dark enough on white


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    matrix = Matrix(weights(3, 3), caption="a caption that is long enough to need a second line below the picture")
    for name in ("one.png", "two.png"):
        figures.save(figures.heat_map(matrix), tmp_path / name)
    one, two = ((tmp_path / name).read_bytes() for name in ("one.png", "two.png"))
    assert one == two
    assert one.startswith(b"\x89PNG")
    figures.save(figures.heat_map(matrix), tmp_path / "three.svg")
    assert "a caption that is long" in (tmp_path / "three.svg").read_text(encoding="utf-8")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'weft\[plots\]'"):
        figures.heat_map(Matrix(weights(2, 2)))
