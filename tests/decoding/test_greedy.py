"""Greedy search against a loop in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.decoding.table import TableModel, batch
from weft.config import BOS, EOS
from weft.decoding.greedy import greedy
from weft.decoding.options import SearchOptions
from weft.decoding.sampling import SamplingOptions, sample
from weft.decoding.score import score


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


def test_whoever_watches_sees_each_token_once() -> None:
    model, sources = TableModel(seed=3, spread=0.3), batch([[4], [5, 6], [], [6]])
    options, drawn = SearchOptions(max_ratio=0.0, max_extra=6), SamplingOptions(samples=3, seed=1)
    seen: dict[int, list[tuple[int, ...]]] = {row: [] for row in range(12)}

    def watch(rows: Tensor, tokens: Tensor) -> None:
        for row, path in zip(rows.tolist(), tokens.tolist(), strict=True):
            seen[row].append(tuple(path))

    watched = sample(model, sources, drawn, options, watch=watch)
    assert watched == sample(model, sources, drawn, options)
    for row, paths in seen.items():
        tokens = watched[row // 3][row % 3].tokens
        assert paths == [tokens[: t + 1] for t in range(len(tokens))]
    seen = {row: [] for row in range(4)}
    for row, (h,) in enumerate(greedy(model, sources, options, watch=watch)):
        assert seen[row][-1:] == [h.tokens][: len(h.tokens)]


def test_whoever_watches_may_end_a_path() -> None:
    model, sources = TableModel(seed=3, spread=0.3), batch([[4], [5, 6], [], [6]])
    options = SearchOptions(max_ratio=0.0, max_extra=8, length_penalty=0.5)
    drawn = SamplingOptions(samples=6, seed=1)
    free = sample(model, sources, drawn, options)
    stopped = sample(model, sources, drawn, options, watch=lambda rows, tokens: tokens[:, -1] == 6)
    some = 0
    for source, paths, cut in zip(sources, free, stopped, strict=True):
        for h, short in zip(paths, cut, strict=True):
            if 6 not in h.tokens:
                assert short == h
                continue
            some += 1
            end = h.tokens.index(6) + 1
            assert short.tokens == h.tokens[:end]
            assert short.token_log_probs == h.token_log_probs[:end]
            assert short.finished
            (begun,) = score(model, source[None], [short.tokens], options, finished=False)
            assert (short.log_prob, short.score) == pytest.approx((begun.log_prob, begun.score))
    assert 5 < some < 24
