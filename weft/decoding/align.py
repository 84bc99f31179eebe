"""Which source tokens a target attended to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from weft.decoding.score import teacher_inputs
from weft.decoding.steps import begin, searching
from weft.models.contract import Seq2Seq, State
from weft.observe import Seen, record


def align(model: Seq2Seq, source: Tensor, targets: Sequence[Sequence[int]]) -> list[Tensor]:
    """The attention from each target to its source while it was said: the mean over heads and layers.

    ``weights.argmax(-1)`` is the source position that each token comes from most. The mean over all layers is the
    choice that needs no tuning: which layer aligns best differs from model to model.

    Args:
        model: one that attends to the source.
        source: [B, N] tokens and EOS, padded with PAD.
        targets: the tokens of each target, without BOS and EOS.

    Returns:
        For each source weights [T + 1, N], a row for each token of its target and one for EOS; rows sum to 1.

    Raises:
        ValueError: if the model does not attend to the source, or the targets are not as described.
    """
    inputs = teacher_inputs(model, source, targets)
    if not targets:
        return []
    with searching(model, exact=True, observed=True):
        _, weights, _ = observed_step(model, inputs, begin(model, source), source.shape[1])
    return [row[: len(target) + 1].clone() for row, target in zip(weights, targets, strict=True)]


def observed_step(model: Seq2Seq, tokens: Tensor, state: State, width: int) -> tuple[Tensor, Tensor, State]:
    """``model.step(tokens [R, T], state)``, and what it attended to: hidden [R, T, D], weights [R, T, width], state.

    Raises:
        ValueError: if the model does not attend to the source.
    """
    if not model.cross_attentions:
        raise ValueError("this model does not attend to its source, so there is no attention to align or cover it with")
    with record(cast(nn.Module, model), names=model.cross_attentions) as seen:
        hidden, state = model.step(tokens, state)
    entries = [entry for entry in seen if entry.kind == "weights"]
    weights = [_mean_of_heads(entry, tokens.shape[1], width) for entry in entries]
    return hidden, torch.stack(weights).mean(0), state


def _mean_of_heads(entry: Seen, length: int, width: int) -> Tensor:
    """Weights [R, T, width] of entry's [R, H, T, M]; keys from ``width`` on are padding."""
    if entry.weights.shape[2] != length:
        raise ValueError(f"{entry.name!r} showed {entry.weights.shape[2]} queries in a step of {length} tokens")
    return entry.weights[..., :width].mean(1)
