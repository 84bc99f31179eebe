"""The map in a terminal: every weight has its shade, every label its room."""

from __future__ import annotations

import doctest
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.views import terminal
from weft.views.matrix import Matrix
from weft.views.terminal import draw, shade, shows_colours, width


def test_the_example_of_the_docstring() -> None:
    result = doctest.testmod(terminal, extraglobs={"Matrix": Matrix})
    assert (result.failed, result.attempted) == (0, 1)


@pytest.mark.parametrize(
    ("weight", "block"),
    [(0, " "), (0.049, " "), (0.05, "░"), (0.24, "░"), (0.25, "▒"), (0.5, "▓"), (0.74, "▓"), (0.75, "█"), (1, "█")],
)
def test_more_weight_more_ink(weight: float, block: str) -> None:
    assert shade(weight) == block


@pytest.mark.parametrize(
    ("text", "columns"), [("", 0), ("abc", 3), ("茶色", 4), ("ｱ", 1), ("Ａ", 2), ("e\u0301", 1), ("한국", 4), ("é", 1)]
)
def test_how_wide_a_text_is(text: str, columns: int) -> None:
    assert width(text) == columns


def test_what_is_closed_is_not_what_is_ignored() -> None:
    text = draw(Matrix([[1.0, 0.0], [0.0, 1.0]], allowed=[[True, False], [True, True]]))
    assert text.splitlines()[1:3] == ["0 ██╱╱", "1   ██"]
    assert "may not look ╱" in text
    assert "may not look" not in draw(Matrix([[1.0, 0.0]]))


def test_wide_labels_stand_above_their_columns() -> None:
    text = draw(Matrix([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], ["小さい", "fox"], ["茶", "brown", "狐"], caption="why"))
    assert text.splitlines() == [
        "         b",
        "         r",
        "         o",
        "         w",
        "       茶n 狐",
        "小さい ██",
        "   fox     ██",
        "",
        "weights from 0.05 ░  0.25 ▒  0.5 ▓  0.75 █  (query down, key across)",
        "why",
    ]


def test_a_long_label_is_cut() -> None:
    lines = draw(Matrix([[1.0]], ["q"], ["a" * 13 + "bcd"])).splitlines()
    assert [line.strip() for line in lines[:15]] == ["a"] * 13 + ["…", "q ██"]


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4), st.text(max_size=5))
def test_any_label_keeps_the_columns(weights: list[list[float]], label: str) -> None:
    matrix = Matrix(weights, [label] * len(weights), [label, "", "狐"])
    lines = draw(matrix).split("\n")
    rows = lines[-2 - len(weights) : -2]
    for line, row in zip(rows, weights, strict=True):
        cells = "".join(shade(w) * 2 for w in row)
        assert line == f"{matrix.queries[0]} {cells}".rstrip()
    for line in lines[: -2 - len(weights)]:
        assert width(line) <= width(matrix.queries[0]) + 1 + 6


@pytest.mark.parametrize(
    ("is_terminal", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (False, {"TERM": "xterm"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    is_terminal: bool, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert shows_colours(stream) is expected
