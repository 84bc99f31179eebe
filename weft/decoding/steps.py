"""What every search does: begin, go a step, choose rows, take the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from weft.config import BOS, EOS, PAD
from weft.kernels.steady import steady
from weft.models.contract import Seq2Seq, State


@contextmanager
def searching(model: Seq2Seq, exact: bool) -> Iterator[None]:
    """Inside, the model is in eval mode and makes no gradients; if exact, a row's numbers do not depend on its company.

    Not ``inference_mode``: what a model or a mask remembers from a search (a position table, a dense mask) must serve
    the next training step, and torch does not let inference tensors into a backward pass.
    """
    module = cast(nn.Module, model)
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad(), steady(exact):
            yield
    finally:
        for part in training:
            part.training = True


def begin(model: Seq2Seq, source: Tensor) -> State:
    """The state before the first target token of source [B, N].

    Raises:
        ValueError: if the source is no [B, N] of token numbers, or longer than the model can take.
    """
    check_source(source)
    if model.max_len is not None and source.shape[1] > model.max_len:
        raise ValueError(f"the model takes sources of at most {model.max_len} tokens, not {source.shape[1]}")
    return model.start(source)


def check_source(source: Tensor) -> None:
    """Raise ValueError unless the source is [B, N] of token numbers."""
    if source.dim() != 2 or source.dtype != torch.int64:
        raise ValueError(f"a source must be [B, N] of int64, not {list(source.shape)} of {source.dtype}")


def check_targets(what: str, targets: Sequence[Sequence[int]], source: Tensor, max_len: int | None) -> None:
    """Raise ValueError unless each source has its tokens, no PAD, BOS and EOS among them, that the model can read."""
    if len(targets) != len(source):
        raise ValueError(f"expected a {what} for each of {len(source)} sources, not {len(targets)}")
    for target in targets:
        special = [token for token in target if token in (PAD, BOS, EOS) or token < 0]
        if special:
            raise ValueError(f"a {what} must hold tokens other than PAD, BOS and EOS, not {special[0]}")
        if max_len is not None and len(target) >= max_len:
            raise ValueError(f"the model reads BOS and up to {max_len - 1} tokens, but a {what} has {len(target)}")


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Lists of tokens as [B, longest], padded with PAD."""
    longest = max(map(len, rows), default=0)
    full = [[*row, *[PAD] * (longest - len(row))] for row in rows]
    return torch.tensor(full, dtype=torch.int64, device=device).view(len(rows), longest)


def predict(model: Seq2Seq, hidden: Tensor) -> Tensor:
    """log p(next token | past, source) [R, V] of hidden [R, D].

    Raises:
        ValueError: if the model's logits are no numbers.
    """
    log_probs = model.logits(hidden).log_softmax(-1)
    if bool(log_probs[:, :1].isnan().any()):  # one NaN or infinity makes its whole row NaN
        raise ValueError("the model's logits are not finite numbers: its parameters may be damaged")
    return log_probs


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
    if k < count:
        values, places = scores.topk(k + 1)
        border = values[:, k - 1]
        if not bool(((border == values[:, k]) & (border > float("-inf"))).any()):
            places, order = places[:, :k].sort(-1)
            values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
            return values, places.gather(-1, order)
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], places[:, :k]
