"""Lengths against the tensor that they stand for."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.layers.lengths import Lengths


def check(mine: Lengths, expected: list[int]) -> None:
    assert mine.tensor.tolist() == expected
    assert (mine.rows, mine.longest, mine.alike) == (len(expected), max(expected, default=0), len(set(expected)) <= 1)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_any_order_of_operations(lengths: list[int], data: st.DataObject) -> None:
    """Asked twice, and of a row of one length made in either way."""
    mine = Lengths.of(torch.tensor(lengths))
    if len(set(lengths)) == 1 and data.draw(st.booleans()):
        mine = Lengths.same(len(lengths), lengths[0], torch.device("cpu"))
    for _ in range(4):
        check(mine, lengths)
        count = data.draw(st.integers(0, 3))
        rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=5))
        chosen = torch.tensor(rows)
        longer = mine.plus(count)
        assert mine.plus(count) is longer
        check(mine.plus(count + 1), [length + count + 1 for length in lengths])
        assert mine.select(chosen) is mine.select(chosen)
        check(mine.select(chosen.clone()), [lengths[row] for row in rows])
        if data.draw(st.booleans()):
            mine, lengths = longer, [length + count for length in lengths]
        else:
            mine, lengths = mine.select(chosen), [lengths[row] for row in rows]


@given(*[st.lists(st.integers(0, 2), max_size=3)] * 2)
def test_equal_is_equal(one: list[int], other: list[int]) -> None:
    mine, theirs = (Lengths.of(torch.tensor(each, dtype=torch.int64)) for each in (one, other))
    assert mine.equal(theirs) == (one == other)


def test_what_is_remembered_is_of_this_value() -> None:
    """Rows are told apart by what they are, not by where they lie."""
    mine = Lengths.of(torch.tensor([1, 2, 3]))
    for row in range(3):
        assert mine.select(torch.tensor([row])).tensor.tolist() == [row + 1]
    mask = mine.causal
    assert mine.causal is mask
    assert mask.dense(1, 4)[:, 0, 0].sum(-1).tolist() == [2, 3, 4]
