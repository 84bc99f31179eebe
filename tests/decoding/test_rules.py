"""What may follow, against transformers' processors and plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, NoRepeatNGramLogitsProcessor, SuppressTokensLogitsProcessor

from tests.decoding.table import TableModel, batch
from weft.config import BOS, EOS, PAD, UNK, GPTConfig, Specials
from weft.decoding.options import SearchOptions
from weft.decoding.rules import Rules, repeats
from weft.models.gpt import GPT

VOCAB = 9
MODEL = TableModel()


def closed(rules: Rules, past: list[list[int]], sources: list[int] | None = None) -> list[set[int]]:
    """The tokens that each row may not take next; the others keep their values."""
    given = torch.randn(len(past), VOCAB).log_softmax(-1)
    left = given.clone()
    rows = torch.arange(len(past)) if sources is None else torch.tensor(sources)
    rules.close(left, torch.tensor(past, dtype=torch.int64).view(len(past), -1), rows)
    shut = left == -math.inf
    assert torch.equal(left[~shut], given[~shut])
    return [set(row.nonzero()[:, 0].tolist()) for row in shut]


@given(data=st.data(), n=st.integers(1, 4), length=st.integers(0, 12), rows=st.integers(1, 3))
def test_no_repeat_is_that_of_transformers(data: st.DataObject, n: int, length: int, rows: int) -> None:
    words = st.lists(st.integers(4, 6), min_size=length, max_size=length)
    past = torch.tensor([data.draw(words) for _ in range(rows)], dtype=torch.int64).view(rows, length)
    theirs = NoRepeatNGramLogitsProcessor(n)(torch.cat([past.new_full((rows, 1), BOS), past], 1), torch.zeros(rows, 7))
    mine = torch.zeros(rows, 7)
    mine[repeats(past, n)] = -math.inf
    theirs[:, BOS] = 0.0  # which they count as a word; the rules close it anyway
    assert torch.equal(mine, theirs)


@given(data=st.data(), minimum=st.integers(0, 4), length=st.integers(0, 6))
def test_suppressed_tokens_and_least_lengths_are_those_of_transformers(
    data: st.DataObject, minimum: int, length: int
) -> None:
    never = data.draw(st.sets(st.integers(3, VOCAB - 1)))
    scores = torch.zeros(2, VOCAB)
    ids = torch.full((2, length + 1), 4)
    theirs = SuppressTokensLogitsProcessor([PAD, BOS, *never])(ids, scores)
    theirs = MinNewTokensLengthLogitsProcessor(1, minimum, EOS)(ids, theirs)
    rules = Rules(MODEL, batch([[4], [4]]), SearchOptions(min_len=minimum, suppress=tuple(never)))
    rules.close(scores, ids[:, 1:], torch.arange(2))
    assert torch.equal(scores, theirs)


def test_a_forced_token_is_the_only_one() -> None:
    options = SearchOptions(suppress=(UNK,), no_repeat=1, min_len=9)
    rules = Rules(MODEL, batch([[4]] * 3), options, [[UNK, 5, 5], [], [6]])
    everything = set(range(VOCAB))
    assert closed(rules, [[], [], []]) == [everything - {UNK}, {PAD, BOS, EOS, UNK}, everything - {6}]
    assert closed(rules, [[UNK], [7], [6]]) == [everything - {5}, {PAD, BOS, EOS, UNK, 7}, {PAD, BOS, EOS, UNK, 6}]
    assert closed(rules, [[UNK, 5]]) == [everything - {5}]
    assert closed(rules, [[UNK, 5, 5]]) == [{PAD, BOS, EOS, UNK, 5}]
    assert closed(rules, [[UNK], [7], [UNK]], [2, 1, 0])[2] == everything - {5}  # rows may come in any order


def test_limits() -> None:
    source = batch([[], [4], [4, 4, 4]])
    assert Rules(MODEL, source, SearchOptions(max_ratio=1.5, max_extra=2)).limits.tolist() == [2, 3, 6]
    assert Rules(MODEL, source, SearchOptions(max_ratio=0.0, max_extra=0)).limits.tolist() == [0, 0, 0]
    assert Rules(MODEL, source, SearchOptions(max_ratio=0.0, max_extra=0, min_len=2)).limits.tolist() == [2, 2, 2]
    forced = Rules(MODEL, source, SearchOptions(max_ratio=1.0, max_extra=0), [[4, 4], [], [4]])
    assert forced.limits.tolist() == [2, 1, 3]
    assert Rules(TableModel(max_len=5), source, SearchOptions(max_ratio=1.5, max_extra=2)).limits.tolist() == [2, 3, 4]


def test_tokens_outside_the_vocabulary_are_named() -> None:
    for rules in (
        Rules(MODEL, batch([[4]]), SearchOptions(suppress=(VOCAB,))),
        Rules(MODEL, batch([[4]]), SearchOptions(), [[VOCAB]]),
    ):
        with pytest.raises(ValueError, match=f"token {VOCAB} is not in the vocabulary of {VOCAB}"):
            closed(rules, [[]])


def test_the_end_is_not_to_be_suppressed() -> None:
    with pytest.raises(ValueError, match=rf"suppress must be token numbers other than EOS \({EOS}\)"):
        Rules(MODEL, batch([[4]]), SearchOptions(suppress=(EOS,)))


def test_specials_and_room_are_the_model_s() -> None:
    """A vocabulary in which weft's numbers are words, and a room for each row."""
    model = GPT(GPTConfig(dim=8, num_heads=1, num_layers=1, max_len=7), VOCAB)
    model.specials = Specials(pad=-1, bos=8, eos=8, never=(7,))
    source = torch.tensor([[0, 1, 2, 8, -1], [PAD, -1, -1, -1, -1]])
    options = SearchOptions(max_ratio=1.0, max_extra=2, min_len=1, suppress=(3,))
    rules = Rules(model, source, options, [[0, 2], []])
    assert rules.limits.tolist() == [3, 3]
    assert closed(rules, [[], []]) == [set(range(VOCAB)) - {0}, {3, 7, 8}]
    assert closed(rules, [[0], [0]]) == [set(range(VOCAB)) - {2}, {3, 7}]
    assert closed(rules, [[0, 2], [0, 0]]) == [{3, 7}, {3, 7}]
