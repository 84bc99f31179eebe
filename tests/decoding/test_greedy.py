"""Greedy search against a loop in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.table import TableModel, batch
from weft.config import BOS, EOS
from weft.decoding.greedy import greedy
from weft.decoding.options import SearchOptions


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([0, 1, 2]),
    limit=st.integers(0, 7),
    sources=st.lists(st.lists(st.integers(3, 9), max_size=4), min_size=1, max_size=4),
)
def test_greedy_takes_the_first_of_the_likeliest(seed: int, levels: int, limit: int, sources: list[list[int]]) -> None:
    model = TableModel(seed=seed, levels=levels)
    options = SearchOptions(max_ratio=0.0, max_extra=limit, length_penalty=0.7)
    for source, (found,) in zip(sources, greedy(model, batch(sources), options), strict=True):
        tokens: list[int] = []
        parts: list[float] = []
        while True:
            log_probs = model.log_probs((*source, EOS), (BOS, *tokens))
            token = max(range(EOS, model.vocab_size), key=lambda t: (log_probs[t], -t))
            if len(tokens) == limit and token != EOS:
                break
            parts.append(log_probs[token])
            if token == EOS:
                break
            tokens.append(token)
        assert found.tokens == tuple(tokens)
        assert found.finished == (len(parts) > len(tokens))
        assert found.token_log_probs == pytest.approx(parts)
        assert found.log_prob == pytest.approx(sum(parts))
        assert found.score == pytest.approx(sum(parts) / max(len(parts), 1) ** 0.7)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), sources=st.lists(st.lists(st.integers(3, 9), max_size=4), min_size=2, max_size=4))
def test_a_row_is_the_same_alone_and_in_company(seed: int, sources: list[list[int]]) -> None:
    model = TableModel(seed=seed, dtype=torch.float32)
    prefixes = [[min(token, 6) for token in source[:2]] for source in sources]
    together = greedy(model, batch(sources), None, prefixes)
    for source, prefix, found in zip(sources, prefixes, together, strict=True):
        assert greedy(model, batch([source]), None, [prefix]) == [found]
        assert found[0].tokens[: len(prefix)] == tuple(prefix)


def test_finished_rows_leave_the_batch() -> None:
    model = TableModel(end=-99.0)
    greedy(model, batch([[4], [4] * 3, [4] * 2]), SearchOptions(max_ratio=1.0, max_extra=0))
    assert model.rows == [3, 3, 2, 1]


def test_no_source_gives_no_result() -> None:
    assert greedy(TableModel(), batch([])) == []


def test_the_model_is_given_back_as_it_was() -> None:
    model = TableModel().train()
    greedy(model, batch([[4]]))  # the table refuses to step in training mode
    assert model.training
