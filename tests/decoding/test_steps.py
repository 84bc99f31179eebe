"""The parts that every search is made of."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.decoding.table import TableModel, batch
from weft.config import BOS, EOS, PAD
from weft.decoding.steps import begin, check_targets, choose, padded, predict, searching, top
from weft.kernels.steady import is_steady


@given(data=st.data(), k=st.integers(1, 12), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_top_is_a_stable_sort_cut_off(data: st.DataObject, k: int, dtype: torch.dtype) -> None:
    """Few different values, so that most are equal, and −∞ among them."""
    width = data.draw(st.integers(1, 10))
    row = st.lists(st.sampled_from([-math.inf, -2.0, -1.0, 0.5]), min_size=width, max_size=width)
    scores = data.draw(st.lists(row, min_size=1, max_size=4))
    values, places = top(torch.tensor(scores, dtype=dtype), k)
    for row, got, where in zip(scores, values.tolist(), places.tolist(), strict=True):
        order = sorted(range(width), key=lambda i: -row[i])[:k]
        assert got == [row[i] for i in order]
        real = [i for i in order if row[i] > -math.inf]
        assert where[: len(real)] == real  # in which order the closed ones come is nobody's business


def test_top_of_many_equals_is_the_first_of_them() -> None:
    scores = torch.zeros(2, 5000)
    scores[1, 1000::7] = 1.0
    _, places = top(scores, 3)
    assert places.tolist() == [[0, 1, 2], [1000, 1007, 1014]]


@pytest.mark.parametrize("count", [3, 128, 129, 5000])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_is_the_same_of_few_and_of_many(count: int, k: int) -> None:
    scores = torch.randint(0, 9, (4, count)).float()
    values, places = top(scores, k)
    for row, value, place in zip(scores.tolist(), values.tolist(), places.tolist(), strict=True):
        assert place == sorted(range(count), key=lambda i: (-row[i], i))[:k]
        assert value == [row[i] for i in place]


def test_searching_leaves_every_part_in_the_mode_it_was_in() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout()))
    model[1][0].eval()
    before = [part.training for part in model.modules()]
    for exact in (True, False):
        with searching(model, exact):  # type: ignore[arg-type]
            assert is_steady() == exact
        assert not is_steady()
    with searching(model, exact=True):  # type: ignore[arg-type]
        assert not any(part.training for part in model.modules())
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert [part.training for part in model.modules()] == before
    assert torch.is_grad_enabled()
    with contextlib.suppress(KeyError), searching(model, exact=True):  # type: ignore[arg-type]
        raise KeyError
    assert [part.training for part in model.modules()] == before


def test_choosing_all_rows_copies_nothing() -> None:
    state = TableModel().start(batch([[4], [5], [6]]))
    assert choose(state, torch.tensor([0, 1, 2])) is state
    for rows in ([0, 1], [1, 0, 2], [0, 1, 2, 2]):
        assert choose(state, torch.tensor(rows)) == state.select(torch.tensor(rows))


def test_a_source_must_be_a_batch_of_tokens() -> None:
    for source in (torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(1, 1, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"must be \[B, N\] of int64"):
            begin(TableModel(), source)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    hidden = torch.zeros(3, 7)
    predict(TableModel(), hidden)
    for bad in (math.nan, math.inf):
        hidden[1, 5] = bad
        with pytest.raises(ValueError, match="not finite numbers"):
            predict(TableModel(), hidden)


def test_lists_are_padded() -> None:
    assert padded([[4], [], [5, 6]], torch.device("cpu"), -1).tolist() == [[4, -1], [-1, -1], [5, 6]]
    assert padded([], torch.device("cpu"), PAD).shape == (0, 0)
    assert padded([[], []], torch.device("cpu"), PAD).shape == (2, 0)


@pytest.mark.parametrize("token", [PAD, BOS, EOS, -1])
def test_targets_hold_words_only(token: int) -> None:
    with pytest.raises(ValueError, match=f"a target must hold tokens other than PAD, BOS and EOS, not {token}"):
        check_targets(TableModel(), batch([[4]]), [[4, token]])


def test_targets_fit_the_sources_and_the_model() -> None:
    with pytest.raises(ValueError, match="a prefix for each of 1 sources, not 2"):
        check_targets(TableModel(), batch([[4]]), [[4], [4]], "prefix")
    check_targets(TableModel(max_len=3), batch([[4]]), [[4, 4]])
    with pytest.raises(ValueError, match="room for 2 tokens, but a prefix has 3"):
        check_targets(TableModel(max_len=3), batch([[4]]), [[4, 4, 4]], "prefix")


@pytest.mark.parametrize("vocab_size", [7, 33, 10_007])
def test_a_distribution_is_the_same_in_any_company(vocab_size: int) -> None:
    """The softmax and the choice of the best are a row's own affair, bit for bit."""
    hidden = torch.randn(19, vocab_size) * 3.0
    whole = predict(TableModel(), hidden)
    values, places = top(whole, 5)
    for i in range(19):
        alone = predict(TableModel(), hidden[i : i + 1])
        assert torch.equal(alone[0], whole[i])
        assert torch.equal(top(alone, 5)[0][0], values[i])
        assert torch.equal(top(alone, 5)[1][0], places[i])
