"""Targets that are given: their log-probabilities, token by token, in one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.steps import begin, check_targets, choose, padded, predict, searching
from weft.models.contract import Seq2Seq, State, Steps

_ROWS = 256  # positions whose logits exist at a time


def score(
    model: Seq2Seq,
    source: Tensor,
    targets: Sequence[Sequence[int]],
    options: SearchOptions | None = None,
    finished: bool = True,
) -> list[Hypothesis]:
    """log p(target | source) of one target for each source.

    Args:
        model: any that fulfils the contract.
        source: [B, N] tokens and EOS, or prompts, padded with PAD.
        targets: the tokens of each target, without BOS and EOS.
        options: ``length_penalty`` and ``exact`` of it are used; the defaults if None.
        finished: whether each target ends with EOS, which then counts; else it is taken as the beginning of a target.

    Returns:
        For each source its target with its log-probabilities.

    Raises:
        ValueError: if the targets are not one a source, hold PAD, BOS or EOS, or are longer than the model can take.
    """
    options = SearchOptions() if options is None else options
    inputs = teacher_inputs(model, source, targets)
    if not targets:
        return []
    eos = model.specials.eos
    wanted = padded([[*target, eos] for target in targets], source.device, eos)  # [B, T + 1], as the inputs
    counts = torch.tensor([len(target) + finished for target in targets], device=source.device)
    real = torch.arange(wanted.shape[1], device=source.device) < counts[:, None]
    with searching(model, options.exact) as runner:
        hidden = _read(runner, inputs, begin(runner, source), model.room(source))
        parts = [
            predict(runner, h).gather(1, w[:, None])[:, 0]
            for h, w in zip(hidden[real].split(_ROWS), wanted[real].split(_ROWS), strict=True)
        ]
    gained = torch.cat(parts).split(counts.tolist())
    return [options.hypothesis(target, gain.tolist(), finished) for target, gain in zip(targets, gained, strict=True)]


def teacher_inputs(model: Seq2Seq, source: Tensor, targets: Sequence[Sequence[int]]) -> Tensor:
    """What a decoder reads to say the targets: [B, T + 1] its first token, the target's; behind its end anything.

    Raises:
        ValueError: if the targets are not one a source, hold PAD, BOS or EOS, or are longer than the model can take.
    """
    check_targets(model, source, targets)
    words = padded(targets, source.device, model.specials.eos)
    return torch.cat([model.first(source)[:, None], words], 1) if targets else words


def _read(model: Steps, inputs: Tensor, state: State, room: Tensor | None) -> Tensor:
    """hidden [B, T, D] after each token of inputs [B, T]; zeros where a row has no room left behind its first token.

    One step, unless rows with long prompts have no room for the targets of others: then these go on without them.
    """
    longest = inputs.shape[1]
    end = longest if room is None else min(longest, int(room.min()) + 1)
    hidden, state = model.step(inputs[:, :end], state)
    if room is None or end == longest:
        return hidden
    going = (room >= end).nonzero()[:, 0]
    rest = _read(model, inputs[going, end:], choose(state, going), room[going] - end)
    return torch.cat([hidden, hidden.new_zeros(len(inputs), *rest.shape[1:]).index_copy(0, going, rest)], 1)
