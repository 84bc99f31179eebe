"""What every search does: begin, go a step, choose rows, take the best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from weft.kernels.steady import steady
from weft.models.bound import bound
from weft.models.compiled import NO_NUMBERS, Compiled, compiled
from weft.models.contract import Seq2Seq, State, Steps

_FEW = 128  # so many numbers are sorted as fast as the largest of them are found


@contextmanager
def searching(model: Seq2Seq, exact: bool, observed: bool = False) -> Iterator[Steps]:
    """Inside, the model is in eval mode and makes no gradients; if exact, a row's numbers do not depend on its company.

    Gives what is to be called for the steps: the model compiled, where it can be and is not observed, or bound, where
    its numbers may depend on their company, or itself.

    Not ``inference_mode``: what a model or a mask remembers from a search (a position table, a dense mask) must serve
    the next training step, and torch does not let inference tensors into a backward pass.
    """
    runner = None if observed else compiled(model)
    if runner is not None:
        yield runner
        return
    module = cast(nn.Module, model)
    training = [part for part in module.modules() if part.training]
    if training:
        module.eval()
    try:
        with torch.no_grad(), steady(exact):
            yield model if exact or observed else bound(model)
    finally:
        for part in training:
            part.training = True


def begin(model: Steps, source: Tensor) -> State:
    """The state before the first target token of source [B, N].

    Raises:
        ValueError: if the source is no [B, N] of token numbers, or longer than the model can take.
    """
    check_source(source)
    check_length(model, source)
    return model.start(source)


def check_length(model: Steps, source: Tensor) -> None:
    """Raise ValueError if a source of [B, N] is longer than the model can take."""
    longest = int((source != model.specials.pad).sum(1).max()) if len(source) else 0
    if model.max_len is not None and longest > model.max_len:
        raise ValueError(f"the model takes sources of at most {model.max_len} tokens, not {longest}")


def check_source(source: Tensor) -> None:
    """Raise ValueError unless the source is [B, N] of token numbers."""
    if source.dim() != 2 or source.dtype != torch.int64:
        raise ValueError(f"a source must be [B, N] of int64, not {list(source.shape)} of {source.dtype}")


def check_targets(model: Steps, source: Tensor, targets: Sequence[Sequence[int]], what: str = "target") -> None:
    """Raise ValueError unless each source has its tokens, no PAD, BOS and EOS among them, that the model can read."""
    if len(targets) != len(source):
        raise ValueError(f"expected a {what} for each of {len(source)} sources, not {len(targets)}")
    rooms = model.room(source) if any(targets) else None
    specials = model.specials
    for number, target in enumerate(targets):
        special = [token for token in target if token in (specials.pad, specials.bos, *specials.ends) or token < 0]
        if special:
            raise ValueError(f"a {what} must hold tokens other than PAD, BOS and EOS, not {special[0]}")
        if rooms is not None and len(target) > int(rooms[number]):
            raise ValueError(f"the model has room for {int(rooms[number])} tokens, but a {what} has {len(target)}")


def is_one_of(tokens: Tensor, numbers: Sequence[int]) -> Tensor:
    """Which of the tokens are one of these numbers, most often a single one."""
    if len(numbers) == 1:
        return tokens == numbers[0]
    return torch.isin(tokens, tokens.new_tensor(numbers))


def padded(rows: Sequence[Sequence[int]], device: torch.device, fill: int) -> Tensor:
    """Lists of tokens as [B, longest], filled up at the right."""
    longest = max(map(len, rows), default=0)
    full = [[*row, *[fill] * (longest - len(row))] for row in rows]
    return torch.tensor(full, dtype=torch.int64, device=device).view(len(rows), longest)


def predict(model: Steps, hidden: Tensor) -> Tensor:
    """log p(next token | past, source) [R, V] of hidden [R, D].

    Raises:
        ValueError: if the model's logits are no numbers.
    """
    if not isinstance(model, Compiled):
        return normalised(model.logits(hidden))
    log_probs = model.log_probs(hidden)
    check_numbers(log_probs)
    return log_probs


def normalised(logits: Tensor) -> Tensor:
    """The log-probabilities of logits [R, V].

    Raises:
        ValueError: if the logits are no numbers.
    """
    log_probs = logits.log_softmax(-1)
    check_numbers(log_probs)
    return log_probs


def check_numbers(log_probs: Tensor) -> None:
    """Raise ValueError if a row of log-probabilities [R, V] is no numbers: one NaN or infinity makes all of it NaN."""
    if math.isnan(float(log_probs[:, 0].sum())):
        raise ValueError(NO_NUMBERS)


def distribution(log_probs: Tensor) -> dict[str, Tensor]:
    """Log-probabilities [R, V] of a step, for an observer: a search closes what its rules forbid in place."""
    return {"log_probs": log_probs[:, None].clone()}


def choose(state: State, rows: Tensor) -> State:
    """``state.select(rows)``, without the copy if these are the rows that there are."""
    count = len(state.lengths)
    if len(rows) == count and torch.equal(rows, torch.arange(count, device=rows.device)):
        return state
    return state.select(rows)


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of scores [R, C] and their places, largest first; of equals, the first comes first.

    torch.topk does not say which of several equals it takes, and in bf16 equal logits are common.
    """
    count = scores.shape[-1]
    if count <= _FEW:
        values, places = scores.sort(dim=-1, descending=True, stable=True)
        return values[:, :k], places[:, :k]
    if k == 1:
        best = scores.max(-1, keepdim=True)
        return best.values, best.indices
    if k < count:
        values, places = scores.topk(k + 1)
        border = values[:, k - 1]
        if not bool(((border == values[:, k]) & (border > float("-inf"))).any()):
            places, order = places[:, :k].sort(-1)
            values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
            return values, places.gather(-1, order)
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], places[:, :k]
