"""Dropout from a counter: the decisions are a hash of a key and a running number.

torch's own ``F.dropout`` spends its time in a serial ``bernoulli_``. Here torch's generator gives one 64-bit
key a call, and the decisions are computed from it by element-wise integer operations, which torch vectorises
and threads. So the mask depends on the generator's state alone, not on the thread count, and it can be made
again from its key (attention's backward does) instead of being stored.

A decision has 16 bits: p is rounded to a multiple of 1/65536, and what is kept is divided by the realised
keep rate, so that the mean is right.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels import rows
from weft.kernels.plain import is_plain

_LEVELS = 1 << 16  # how finely p is resolved
_WORDS = 1 << 17  # 64-bit words hashed at a time: enough for all threads, and still in their caches


def dropout(x: Tensor, p: float, training: bool = True, onto: Tensor | None = None) -> Tensor:
    """Each element becomes 0 with probability p, and is divided by the keep rate otherwise.

    Args:
        x: any shape.
        p: 0 ≤ p < 1; 1 gives zeros.
        training: False drops nothing.
        onto: added to the result in the same pass, as a residual is; of x's shape.

    Raises:
        ValueError: if p is not a probability, or onto has another shape.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout needs a probability between 0 and 1, not {p}")
    if onto is not None and onto.shape != x.shape:
        raise ValueError(f"x {list(x.shape)} cannot be added onto {list(onto.shape)}: expected the same shape")
    if not training or p == 0.0:
        return x if onto is None else onto + x
    if x.device.type != "cpu" or p == 1.0 or is_plain() or torch.compiler.is_compiling():
        return F.dropout(x, p) if onto is None else onto + F.dropout(x, p)
    dropped: Tensor = _Dropout.apply(x, onto, p, draw_key())  # type: ignore[no-untyped-call]
    return dropped


def draw_key() -> int:
    """64 random bits from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None))


def keep_rate(p: float) -> float:
    """The share that is really kept: 1 − p in steps of 1/65536, at least one step."""
    return max(round((1.0 - p) * _LEVELS), 1) / _LEVELS


def keep_bound(p: float) -> int:
    """An element is kept if its decision, a signed 16-bit number, is below this."""
    return round(keep_rate(p) * _LEVELS) - _LEVELS // 2


def keep_mask(shape: tuple[int, ...], p: float, key: int, start: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """1 where an element is kept and 0 where it is dropped; the same arguments give the same mask.

    Args:
        shape: of the mask.
        p: probability of 0.
        key: as from ``draw_key``.
        start: where the counter begins; masks of one key that shall be independent must not overlap.
        dtype: of the mask.
    """
    count = prod(shape)
    words = -(-count // 4)
    start = -(-start // 4)
    bound = keep_bound(p)
    kept = torch.empty(words * 4, dtype=dtype)
    for begin in range(0, words, _WORDS):
        size = min(_WORDS, words - begin)
        bits = _hash(key, start + begin, size).view(torch.int16)
        part = kept[4 * begin : 4 * (begin + size)]
        if bound < _LEVELS // 2:
            torch.lt(bits, bound, out=part)
        else:
            part.fill_(1)
    return kept[:count].view(shape)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, onto: Tensor | None, p: float, key: int) -> Tensor:
        ctx.scale = 1.0 / keep_rate(p)
        if rows.serves(x, onto):
            ctx.again = keep_bound(p), ctx.scale, key  # which is all that the backward pass needs
            return rows.dropped(x, onto, *ctx.again)
        ctx.again = None
        mask = keep_mask(tuple(x.shape), p, key, dtype=x.dtype)
        ctx.save_for_backward(mask)
        return scaled_product(x, mask, ctx.scale, onto)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if ctx.again is not None:
            dx = rows.dropped(grad, None, *ctx.again)
        else:
            dx = scaled_product(grad, ctx.saved_tensors[0], ctx.scale)
        return dx, grad if ctx.needs_input_grad[1] else None, None, None


def scaled_product(x: Tensor, mask: Tensor, scale: float, onto: Tensor | None = None) -> Tensor:
    """x · mask · scale + onto in one pass, rounded once (a scaled mask would be rounded before it is used, in bf16)."""
    return torch.addcmul(x.new_zeros(()) if onto is None else onto, x, mask, value=scale)


def _hash(key: int, start: int, size: int) -> Tensor:
    """``size`` 64-bit words: counters, mixed by rounds of "fold the high half into the low, multiply".

    The first half of the words has two rounds, the second half is a third round of the first. Each pass costs
    as much as reading and writing the words, so there are no more than the statistics in
    tests/kernels/test_dropout.py need. torch shifts arithmetically: a fold loses one of 64 bits, no matter.
    """
    half = -(-size // 2)
    words = torch.empty(2 * half, dtype=torch.int64)
    x, t = words[:half], words[half:]
    torch.add(_counters()[:half], _signed(key + start * _STRIDE), out=x)
    for factor in _FACTORS[:2]:
        torch.bitwise_right_shift(x, 32, out=t)
        x.bitwise_xor_(t).mul_(factor)
    torch.bitwise_right_shift(x, 32, out=t)
    t.bitwise_xor_(x).mul_(_FACTORS[2])
    return words[:size]


def _signed(value: int) -> int:
    """The low 64 bits, as a signed number."""
    return (value + 2**63) % 2**64 - 2**63


_STRIDE = 0x9E3779B97F4A7C15
_FACTORS = tuple(map(_signed, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)))


@lru_cache(maxsize=1)
def _counters() -> Tensor:
    return torch.arange(_WORDS // 2).mul_(_signed(_STRIDE))
