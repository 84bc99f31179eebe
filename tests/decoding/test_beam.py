"""Beam search against brute force, against itself without its early stop, alone against in company."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.decoding.table import TableModel, batch, every_target
from weft.config import EOS, UNK
from weft.decoding import beam as module
from weft.decoding.beam import beam, best_possible
from weft.decoding.greedy import greedy
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.sampling import SamplingOptions, sample

SHORT = SearchOptions(beam=3, max_ratio=0.0, max_extra=6)
tables = st.builds(
    TableModel,
    vocab_size=st.integers(5, 9),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.3, 1.0, 3.0]),
    end=st.sampled_from([-2.0, 0.0, 1.0]),
    growth=st.sampled_from([1.0, 2.0]),
)
some_sources = st.lists(st.lists(st.integers(3, 9), max_size=5), min_size=1, max_size=4)
some_options = st.builds(
    lambda beam, n_best, **rest: SearchOptions(beam=beam, n_best=min(n_best, beam), **rest),
    beam=st.integers(1, 5),
    n_best=st.integers(1, 5),
    length_penalty=st.sampled_from([-1.0, -0.3, 0.0, 0.4, 1.0, 2.0]),
    patience=st.sampled_from([0.4, 1.0, 2.0, math.inf]),
    max_ratio=st.sampled_from([0.0, 1.0]),
    max_extra=st.integers(0, 6),
    no_repeat=st.integers(0, 3),
    min_len=st.integers(0, 3),
    suppress=st.sampled_from([(), (UNK,)]),
)


def has_repeat(tokens: tuple[int, ...], n: int) -> bool:
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    return n > 0 and len(set(grams)) < len(grams)


def best(model: TableModel, source: list[int], limit: int, options: SearchOptions, prefix: tuple[int, ...] = ()) -> Any:
    """What an exhaustive search gives."""
    rows = []
    for row in every_target(model, source, limit, options.suppress):
        tokens = row["tokens"]
        if tokens[: len(prefix)] != prefix or len(tokens) < options.min_len or has_repeat(tokens, options.no_repeat):
            continue
        penalty = sum(math.log(min(c, 1.0)) for c in row["coverage"]) if options.coverage_penalty else 0.0
        row["score"] = row["log_prob"] / (len(tokens) + 1) ** options.length_penalty
        row["score"] += options.coverage_penalty * penalty
        rows.append(row)
    return sorted(rows, key=lambda row: -row["score"])[: options.n_best]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"length_penalty": 0.0},
        {"length_penalty": 0.6},
        {"length_penalty": -0.5},
        {"coverage_penalty": 0.3, "length_penalty": 0.5},
        {"coverage_penalty": 2.0},
        {"no_repeat": 1},
        {"no_repeat": 2},
        {"min_len": 3},
        {"suppress": (UNK,)},
        {"no_repeat": 2, "coverage_penalty": 0.5, "min_len": 2, "length_penalty": 0.9},
    ],
)
def test_a_wide_beam_is_an_exhaustive_search(seed: int, changes: dict[str, Any]) -> None:
    model = TableModel(vocab_size=6, seed=seed, heads=2 if "coverage_penalty" in changes else 0)
    options = SearchOptions(beam=200, n_best=10, max_ratio=0.0, max_extra=4, **changes)
    sources = [[4, 5, 3], [5]]
    for source, hypotheses in zip(sources, beam(model, batch(sources), options), strict=True):
        expected = best(model, source, 4, options)
        assert [h.tokens for h in hypotheses] == [row["tokens"] for row in expected]
        assert all(h.finished for h in hypotheses)
        for h, row in zip(hypotheses, expected, strict=True):
            assert h.score == pytest.approx(row["score"], abs=1e-6)
            assert h.log_prob == pytest.approx(row["log_prob"], abs=1e-9)
            assert h.token_log_probs == pytest.approx(row["parts"], abs=1e-9)


@pytest.mark.parametrize("no_repeat", [0, 2])
def test_forced_beginnings_are_an_exhaustive_search_over_what_begins_so(no_repeat: int) -> None:
    model = TableModel(vocab_size=6, seed=3)
    options = SearchOptions(beam=200, n_best=10, max_ratio=0.0, max_extra=4, no_repeat=no_repeat)
    sources, prefixes = [[4], [5, 5], [4]], [(4, 5), (), (5, 4, 4)]
    found = beam(model, batch(sources), options, prefixes)
    for source, prefix, hypotheses in zip(sources, prefixes, found, strict=True):
        expected = best(model, source, 4, options, prefix)
        assert [h.tokens for h in hypotheses if h.finished] == [row["tokens"] for row in expected]
        assert all(h.tokens[: len(prefix)] == prefix for h in hypotheses)


def test_forced_beginnings_stay_with_their_sources_when_others_are_done() -> None:
    options = SearchOptions(beam=2, max_ratio=0.0, max_extra=0)
    prefixes = [(), (4, 5, 6), (6,), (5, 4, 3)]
    for search in (beam, greedy):
        found = search(TableModel(), batch([[4]] * 4), options, prefixes)
        assert [hypotheses[0].tokens for hypotheses in found] == prefixes


def test_a_forced_beginning_may_hold_what_the_rules_forbid_and_be_longer_than_the_limit() -> None:
    options = SearchOptions(beam=2, max_ratio=0.0, max_extra=1, no_repeat=1, suppress=(UNK,), min_len=0)
    (found,) = beam(TableModel(seed=1, end=5.0), batch([[4]]), options, [[UNK, UNK, 4]])
    assert found[0].tokens == (UNK, UNK, 4)
    assert found[0].finished


def bounded_by(bound: Callable[..., Tensor], *given: Any) -> list[list[Hypothesis]]:
    """The search with another bound in its early stop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "best_possible", bound)
        return beam(*given)


def endless(log_prob: Tensor, length: int, limits: Tensor, options: SearchOptions) -> Tensor:
    """Everything may still become better: no early stop."""
    return torch.full_like(log_prob, math.inf)


def from_the_wrong_end(log_prob: Tensor, length: int, limits: Tensor, options: SearchOptions) -> Tensor:
    """The bound if α had the other sign."""
    return options.rank(log_prob, (limits + 1 if options.length_penalty < 0.0 else limits * 0 + length + 1).double())


@pytest.mark.parametrize("n_best", [1, 3])
@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.4, 1.0, 2.0])
def test_the_early_stop_changes_nothing(alpha: float, n_best: int) -> None:
    """On tables where it is close: choices become surer, so that long hypotheses may yet win."""
    model = TableModel(seed=1, spread=1.0, end=0.5, growth=2.5)
    sources = batch([[i] for i in range(3, 203)])
    options = SearchOptions(beam=4, n_best=n_best, length_penalty=alpha, patience=math.inf, max_ratio=0.0, max_extra=6)
    found = beam(model, sources, options)
    assert bounded_by(endless, model, sources, options) == found
    if alpha and n_best == 1:
        assert bounded_by(from_the_wrong_end, model, sources, options) != found, "the test must see a wrong bound"


@settings(max_examples=60)
@given(model=tables, sources=some_sources, options=some_options)
def test_the_early_stop_changes_nothing_whatever_the_options(
    model: TableModel, sources: list[list[int]], options: SearchOptions
) -> None:
    found = beam(model, batch(sources), options)
    steps = len(model.rows)
    assert bounded_by(endless, model, batch(sources), options) == found
    assert len(model.rows) >= 2 * steps


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.5, 1.5])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_early_stop_changes_nothing_under_a_coverage_penalty(alpha: float, beta: float) -> None:
    model = TableModel(seed=2, heads=1, growth=2.0)
    options = replace(SHORT, length_penalty=alpha, coverage_penalty=beta, patience=math.inf, n_best=2, max_extra=4)
    sources = batch([[i, i + 1] for i in range(3, 43)])
    assert bounded_by(endless, model, sources, options) == beam(model, sources, options)


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.5, 1.0])
def test_the_early_stop_saves_steps(alpha: float) -> None:
    options = SearchOptions(beam=3, max_ratio=0.0, max_extra=30, patience=math.inf, length_penalty=alpha)
    model = TableModel(spread=0.5, end=6.0)
    beam(model, batch([[4]]), options)
    assert len(model.rows) < 31


@given(
    log_prob=st.floats(-50.0, 0.0),
    alpha=st.floats(-2.0, 2.0),
    length=st.integers(0, 20),
    more=st.integers(0, 20),
    data=st.data(),
)
def test_no_score_is_above_the_best_possible(
    log_prob: float, alpha: float, length: int, more: int, data: st.DataObject
) -> None:
    options = SearchOptions(length_penalty=alpha)
    limit = length + more
    end = data.draw(st.integers(length + 1, limit + 1))
    lost = data.draw(st.floats(-50.0, 0.0))
    bound = best_possible(torch.tensor([log_prob], dtype=torch.float64), length, torch.tensor([limit]), options)
    assert options.rank(log_prob + lost, end) <= float(bound)


@settings(max_examples=60)
@given(model=tables, sources=some_sources, options=some_options, data=st.data())
def test_a_source_has_the_same_result_alone_and_in_company(
    model: TableModel, sources: list[list[int]], options: SearchOptions, data: st.DataObject
) -> None:
    words = st.lists(st.integers(3, model.vocab_size - 1), max_size=3)
    prefixes = [data.draw(words) for _ in sources] if data.draw(st.booleans()) else None
    together = beam(model, batch(sources), options, prefixes)
    for i, source in enumerate(sources):
        alone = beam(model, batch([source]), options, None if prefixes is None else [prefixes[i]])
        assert alone == [together[i]]


@settings(max_examples=60)
@given(model=tables, sources=some_sources, options=some_options)
def test_a_beam_of_one_is_greedy(model: TableModel, sources: list[list[int]], options: SearchOptions) -> None:
    options = replace(options, beam=1, n_best=1, patience=1.0)
    assert beam(model, batch(sources), options) == greedy(model, batch(sources), options)


def test_equal_scores_go_to_the_lower_token_and_the_earlier_parent() -> None:
    """All logits are equal: what is found first is what is lowest in number."""
    options = replace(SHORT, beam=2, n_best=2, length_penalty=0.0, max_extra=2, patience=math.inf)
    (found,) = beam(TableModel(vocab_size=6, spread=0.0), batch([[4]]), options)
    assert [h.tokens for h in found] == [(), (3,)]
    options = replace(options, min_len=2)
    (found,) = beam(TableModel(vocab_size=6, spread=0.0), batch([[4]]), options)
    assert [h.tokens for h in found] == [(3, 3), (3, 4)]


def simple_beam(model: TableModel, source: list[int], options: SearchOptions, limit: int) -> list[tuple[int, ...]]:
    """The rule of the docstring in plain Python: the tokens of the n best finished, in order."""
    whole, width = (*source, EOS), options.beam
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(limit + 1):
        grown = [
            (total + gain, (*tokens, token))
            for total, tokens in live
            for token, gain in enumerate(model.log_probs(whole, (1, *tokens)))
            if token > 1
        ]
        grown = sorted(grown, key=lambda pair: -pair[0])[: 2 * width]
        finished += [(t / (length + 1) ** options.length_penalty, y[:-1]) for t, y in grown[:width] if y[-1] == EOS]
        if len(finished) >= max(options.n_best, width * options.patience):
            break
        live = [pair for pair in grown if pair[1][-1] != EOS][:width]
    return [tokens for _, tokens in sorted(finished, key=lambda pair: -pair[0])[: options.n_best]]


@settings(max_examples=60)
@given(
    model=tables,
    width=st.integers(1, 4),
    patience=st.sampled_from([0.5, 1.0, 1.5, 3.0, math.inf]),
    alpha=st.sampled_from([-0.5, 0.0, 0.7, 1.0]),
)
def test_the_search_is_the_one_described(model: TableModel, width: int, patience: float, alpha: float) -> None:
    options = replace(SHORT, beam=width, n_best=width, patience=patience, length_penalty=alpha)
    (found,) = beam(model, batch([[4, 5]]), options)
    assert [h.tokens for h in found if h.finished] == simple_beam(model, [4, 5], options, limit=6)


def test_patience_asks_for_more_finished_hypotheses() -> None:
    def steps(patience: float) -> int:
        model = TableModel(seed=2, spread=0.2)
        beam(model, batch([[4]]), SearchOptions(beam=4, n_best=1, patience=patience, length_penalty=3.0))
        return len(model.rows)

    assert steps(0.25) <= steps(1.0) < steps(4.0) <= steps(math.inf)


def test_what_is_cut_off_comes_after_what_is_finished() -> None:
    options = SearchOptions(beam=3, n_best=3, max_ratio=0.0, max_extra=2)
    (never,) = beam(TableModel(end=-50.0), batch([[4]]), options)
    assert [h.finished for h in never] == [False] * 3
    assert {len(h.tokens) for h in never} == {2}
    assert [h.score for h in never] == sorted((h.score for h in never), reverse=True)
    assert never[0].log_prob == pytest.approx(sum(never[0].token_log_probs))
    assert never[0].score == pytest.approx(never[0].log_prob / 2)
    mixed = [hs for seed in range(30) for hs in beam(TableModel(seed=seed, end=-1.0), batch([[4]]), options)]
    some = [hs for hs in mixed if len({h.finished for h in hs}) == 2]
    assert some, "the test needs a list with both"
    for hypotheses in some:
        assert [h.finished for h in hypotheses] == sorted((h.finished for h in hypotheses), reverse=True)
    for hypotheses in mixed:
        assert len({h.tokens for h in hypotheses}) == 3


def test_rules_that_leave_nothing_end_a_hypothesis() -> None:
    """Three words, none twice, and EOS not before the fifth."""
    model = TableModel(vocab_size=6)
    options = SearchOptions(beam=2, n_best=2, no_repeat=1, min_len=5)
    drawn = sample(model, batch([[4]]), SamplingOptions(samples=9, top_p=0.9), options)[0]
    for hypotheses in (beam(model, batch([[4]]), options)[0], greedy(model, batch([[4]]), options)[0], drawn):
        assert [sorted(h.tokens) for h in hypotheses] == [[3, 4, 5]] * len(hypotheses)
        assert not any(h.finished for h in hypotheses)


def test_finished_sources_and_empty_slots_leave_the_batch() -> None:
    model = TableModel(spread=0.5)
    options = SearchOptions(beam=4, max_ratio=3.0, max_extra=0, min_len=0, patience=math.inf, length_penalty=2.0)
    beam(model, batch([[4], [4, 5, 6], [5, 5]]), options)
    assert model.rows[0] == 3  # one row a source to begin with
    assert max(model.rows) == 12
    assert model.rows[4:7] == [8, 8, 8]  # limits of 3, 9 and 6 tokens
    assert model.rows[7:] == [4] * 3


def test_lengths_are_bound_by_the_source_and_the_model() -> None:
    options = SearchOptions(beam=2, max_ratio=1.5, max_extra=1)
    never = TableModel(end=-99.0)
    lengths = [len(h[0].tokens) for h in beam(never, batch([[], [4], [4] * 3, [4] * 9]), options)]
    assert lengths == [1, 2, 5, 14]
    never = TableModel(end=-99.0, max_len=12)
    lengths = [len(h[0].tokens) for h in beam(never, batch([[], [4], [4] * 3, [4] * 9]), options)]
    assert lengths == [1, 2, 5, 11]
    with pytest.raises(ValueError, match="at most 12 tokens, not 13"):
        beam(never, batch([[4] * 12]), options)


def test_no_source_gives_no_result() -> None:
    assert beam(TableModel(), batch([])) == []


def test_a_coverage_penalty_needs_attention() -> None:
    with pytest.raises(ValueError, match="does not attend to its source"):
        beam(TableModel(), batch([[4]]), replace(SHORT, coverage_penalty=0.1))


def test_a_hypothesis_is_a_value() -> None:
    assert Hypothesis((4,), -1.0, -2.0, (-1.5, -0.5), True) == Hypothesis((4,), -1.0, -2.0, (-1.5, -0.5), True)
