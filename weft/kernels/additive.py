"""Additive attention of a decoder that comes once a token, compiled: a row at a time, while its keys are near.

    score_m = Σ energy · tanh(q + k_m),    w = softmax(score),    context = Σ w_m v_m

In torch's operations each step makes all that is inside of tanh, and on the way back gradients of all keys and values,
which are added up step by step. Here nothing is kept but the weights; a step's gradient of the query is made at once,
and those of keys, values and energy when all steps have theirs, in one pass.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.compiled import functions
from weft.kernels.loops import afterwards
from weft.kernels.mask import Mask
from weft.kernels.native.structures import Additive, Look
from weft.kernels.plain import is_plain
from weft.kernels.steady import is_steady


def serves(keys: Tensor, values: Tensor, energy: Tensor, mask: Mask | None) -> bool:
    """Whether such attention is a compiled one here: in fp32 on a CPU, with nothing but padding masked."""
    if functions("attention") is None or is_plain() or is_steady():
        return False
    near = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (keys, values, energy))
    return near and (mask is None or (mask.pattern is None and not mask.positional))


class Memory:
    """What is attended to, step after step. Only for what this ``serves``.

    Example:
        >>> memory = Memory(keys, values, energy, mask)
        >>> contexts = [memory.look(query) for query in queries]
    """

    def __init__(self, keys: Tensor, values: Tensor, energy: Tensor, mask: Mask | None) -> None:
        """Take keys [B, M, D], values [B, M, V], energy [D] and the lengths of a mask."""
        lengths = None if mask is None else mask.lengths
        if lengths is not None:
            lengths = lengths.to("cpu", torch.int64).expand(len(keys)).contiguous()
        k, v, e = (x.detach().contiguous() for x in (keys, values, energy))
        held = _Held(k, v, e, lengths)
        seen: list[_Seen] = []
        self._held, self._seen = held, seen
        self._end = afterwards(lambda: _gradients(held, seen), keys, values, energy)

    def look(self, query: Tensor) -> Tensor:
        """The context [B, V] of query [B, D]."""
        context: Tensor = _Step.apply(query, self._end, self._held, self._seen)  # type: ignore[no-untyped-call]
        return context


class _Held(NamedTuple):
    keys: Tensor
    values: Tensor
    energy: Tensor
    lengths: Tensor | None

    def told(self) -> Additive:
        sizes = *self.keys.shape, self.values.shape[2]
        return Additive(*sizes, *(None if x is None else x.data_ptr() for x in self))


class _Seen(NamedTuple):
    """What a step leaves for the end."""

    query: Tensor  # [B, D]
    weights: Tensor  # [B, M]
    grad: Tensor  # [B, V] of the context
    slopes: Tensor  # [B, M] gradients of the scores


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, end: Tensor, held: _Held, seen: list[_Seen]) -> Tensor:
        query = query.contiguous()
        context = query.new_empty(len(query), held.values.shape[2])
        weights = query.new_empty(held.keys.shape[:2])
        step = Look(query.data_ptr(), weights.data_ptr(), context.data_ptr())
        _library().weft_look(ctypes.byref(held.told()), ctypes.byref(step), False, torch.get_num_threads())
        ctx.save_for_backward(query, weights)
        ctx.held, ctx.seen = held, seen
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (query, weights), grad = ctx.saved_tensors, grad.contiguous()
        slopes, dq = torch.empty_like(weights), torch.empty_like(query)
        step = Look(*(x.data_ptr() for x in (query, weights, grad, slopes, dq)))
        _library().weft_look(ctypes.byref(ctx.held.told()), ctypes.byref(step), True, torch.get_num_threads())
        ctx.seen.append(_Seen(query, weights, grad, slopes))
        return dq, grad.new_zeros(()), None, None


def _gradients(held: _Held, seen: list[_Seen]) -> list[Tensor]:
    """Of keys, values and energy, from all steps."""
    found = [torch.empty_like(x) for x in (held.keys, held.values, held.energy)]
    steps = (Look * len(seen))(*(Look(*(x.data_ptr() for x in step)) for step in seen))
    sums = held.energy.new_empty(_library().weft_blocks(len(held.keys)), len(held.energy))
    _library().weft_look_all(
        ctypes.byref(held.told()), steps, len(steps), *(x.data_ptr() for x in (*found, sums)), torch.get_num_threads()
    )
    seen.clear()  # another backward pass fills it again
    return found


@cache
def _library() -> ctypes.CDLL:
    found = functions("attention")
    assert found is not None
    pointer, whole, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    found.weft_look.argtypes, found.weft_look.restype = [pointer, pointer, short, short], None
    found.weft_look_all.argtypes, found.weft_look_all.restype = [*[pointer] * 2, whole, *[pointer] * 4, short], None
    found.weft_blocks.argtypes, found.weft_blocks.restype = [whole], whole
    return found
