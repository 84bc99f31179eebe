"""Scores of given targets against the table, and against what the searches report."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.table import TableModel, batch
from weft.config import BOS, EOS
from weft.decoding import score as module
from weft.decoding.beam import beam
from weft.decoding.options import SearchOptions
from weft.decoding.score import score

words = st.lists(st.integers(3, 6), max_size=6)


@settings(max_examples=50)
@given(pairs=st.lists(st.tuples(words, words), min_size=1, max_size=5), finished=st.booleans(), rows=st.integers(1, 9))
def test_scores_are_those_of_the_table(pairs: list[tuple[list[int], list[int]]], finished: bool, rows: int) -> None:
    """Whatever the lengths, and however many positions a portion of logits has."""
    model = TableModel(seed=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROWS", rows)
        found = score(
            model, batch([s for s, _ in pairs]), [t for _, t in pairs], SearchOptions(length_penalty=0.5), finished
        )
    assert len(model.rows) == 1  # one step for all
    for (source, target), hypothesis in zip(pairs, found, strict=True):
        said = [*target, EOS] if finished else target
        parts = [model.log_probs((*source, EOS), (BOS, *target[:i]))[token] for i, token in enumerate(said)]
        assert hypothesis.tokens == tuple(target)
        assert hypothesis.finished == finished
        assert hypothesis.token_log_probs == pytest.approx(parts)
        assert hypothesis.log_prob == pytest.approx(sum(parts))
        assert hypothesis.score == pytest.approx(sum(parts) / max(len(parts), 1) ** 0.5)


@pytest.mark.parametrize("end", [-50.0, 0.0])
def test_what_a_search_reports_is_what_scoring_gives(end: float) -> None:
    model, source = TableModel(seed=6, end=end), batch([[4, 5], [6], []])
    options = SearchOptions(beam=3, n_best=3, max_extra=4, suppress=(3,), no_repeat=2)
    for hypotheses in zip(*beam(model, source, options), strict=True):
        for finished in (True, False):
            again = score(model, source, [h.tokens for h in hypotheses], options, finished)
            for h, other in zip(hypotheses, again, strict=True):
                if h.finished == finished:
                    assert h.token_log_probs == pytest.approx(other.token_log_probs)
                    assert h.score == pytest.approx(other.score)


def test_no_source_gives_no_result() -> None:
    assert score(TableModel(), batch([]), []) == []


def test_targets_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="a target for each of 1 sources, not 0"):
        score(TableModel(), batch([[4]]), [])
    with pytest.raises(ValueError, match="not 2"):
        score(TableModel(), batch([[4]]), [[4, EOS]])
    with pytest.raises(ValueError, match="room for 3 tokens, but a target has 4"):
        score(TableModel(max_len=4), batch([[4]]), [[4] * 4])
