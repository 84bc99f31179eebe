"""Alignments against the table's weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.decoding.table import TableModel, TableState, batch
from weft.config import BOS, EOS
from weft.decoding.align import align


def test_weights_are_the_mean_over_heads_and_layers() -> None:
    model = TableModel(heads=3)
    sources, targets = [[4, 5, 6], [5]], [[6, 4], [3, 3, 5, 6]]
    found = align(model, batch(sources), targets)
    for source, target, weights in zip(sources, targets, found, strict=True):
        assert weights.shape == (len(target) + 1, 4)
        whole = (*source, EOS)
        for t, row in enumerate(weights):
            expected = model.mean_weights(whole, (BOS, *target[:t]))
            assert row[: len(whole)].tolist() == pytest.approx(expected, abs=1e-6)
            assert float(row[len(whole) :].abs().sum()) == 0.0
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(target) + 1))
    assert align(model, batch([]), []) == []


def test_a_row_is_the_same_alone_and_in_company() -> None:
    model = TableModel(heads=2)
    together = align(model, batch([[4, 5, 6], [5]]), [[6, 4], [3, 3, 5, 6]])
    (alone,) = align(model, batch([[5]]), [[3, 3, 5, 6]])
    assert torch.equal(alone, together[1][:, :2])


def test_a_result_may_be_changed_and_differentiated() -> None:
    (weights,) = align(TableModel(heads=1), batch([[4]]), [[5]])
    weights.mul_(2.0).requires_grad_().sum().backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None


def test_a_model_without_attention_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not attend to its source"):
        align(TableModel(), batch([[4]]), [[4]])


def test_attention_that_does_not_fit_the_step_is_an_error() -> None:
    class Odd(TableModel):
        def step(self, tokens: Tensor, state: TableState) -> tuple[Tensor, TableState]:
            hidden, state = super().step(tokens, state)
            self.attentions[0](torch.ones(1, 1, 7, 2))
            return hidden, state

    with pytest.raises(ValueError, match=r"'attentions.0' showed 7 queries in a step of 2 tokens"):
        align(Odd(heads=1), batch([[4]]), [[4]])
