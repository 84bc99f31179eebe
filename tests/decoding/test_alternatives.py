"""Alternatives against the table."""

from __future__ import annotations

import math

import pytest

from tests.decoding.table import TableModel, batch
from weft.config import BOS, EOS, UNK
from weft.decoding.alternatives import alternatives
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import SearchOptions
from weft.decoding.score import score

SOURCE, TARGET = [4, 5], [6, 3, 5]


@pytest.mark.parametrize("position", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 3, 50])
def test_the_likeliest_tokens_with_their_probabilities(position: int, k: int) -> None:
    model = TableModel(seed=8)
    log_probs = model.log_probs((*SOURCE, EOS), (BOS, *TARGET[:position]))
    order = sorted(range(2, 7), key=lambda t: -log_probs[t])[:k]
    found = alternatives(model, batch([SOURCE]), TARGET, position, k)
    assert [a.token for a in found] == order
    assert [a.probability for a in found] == pytest.approx([math.exp(log_probs[t]) for t in order])
    assert all(a.completion is None for a in found)


def test_rules_hold() -> None:
    options = SearchOptions(suppress=(UNK,), no_repeat=1, min_len=4)
    found = alternatives(TableModel(), batch([SOURCE]), [6], 1, 50, options)
    assert sorted(a.token for a in found) == [4, 5]


@pytest.mark.parametrize("width", [1, 3])
def test_completions_begin_with_the_alternative(width: int) -> None:
    model, source = TableModel(seed=8), batch([SOURCE])
    options = SearchOptions(beam=width, length_penalty=0.5)
    found = alternatives(model, source, TARGET, 2, 9, options, complete=True)
    assert sorted(a.token for a in found) == [EOS, UNK, 4, 5, 6]
    for a in found:
        if a.token == EOS:
            expected = score(model, source, [TARGET[:2]], options)[0]
        else:
            search = greedy if width == 1 else beam
            expected = search(model, source, options, [[*TARGET[:2], a.token]])[0][0]
        assert a.completion == expected


def test_only_eos_can_be_completed_too() -> None:
    (found,) = alternatives(TableModel(end=30.0), batch([SOURCE]), TARGET, 2, 1, complete=True)
    assert found.token == EOS
    assert found.completion is not None
    assert found.completion.tokens == (6, 3)


def test_arguments_are_checked() -> None:
    for position in (-1, 4):
        with pytest.raises(ValueError, match=f"from 0 to 3, the number of tokens, not {position}"):
            alternatives(TableModel(), batch([SOURCE]), TARGET, position)
    with pytest.raises(ValueError, match="k must be ≥ 1, not 0"):
        alternatives(TableModel(), batch([SOURCE]), TARGET, 0, 0)
    with pytest.raises(ValueError, match="each of 2 sources, not 1"):
        alternatives(TableModel(), batch([SOURCE, SOURCE]), TARGET, 0)
