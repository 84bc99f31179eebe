"""Attention of training, compiled: a head of a row at a time, while all that it needs is near.

Torch's products of many small matrices want their operands copied together and widened, and each pass between them goes
through memory. Here queries, keys and values are read where the projections left them, and what comes out stands as the
output layer reads it: [B, N, H, D]. Sums are in fp32; where the CPU multiplies bf16, the weights of bf16 vectors are
rounded to it for that, as in torch's kernel. The weights, and which of them are dropped, are made again for the
backward pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.compiled import enough_memory, functions
from weft.kernels.dropout import draw_key, keep_bound, keep_rate
from weft.kernels.mask import Mask
from weft.kernels.native.structures import Attention, Heads

_DTYPES = (torch.float32, torch.bfloat16)
MOST = 1024 * 1024  # scores a head; see ``pick`` in attention.py


def serves(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> bool:
    """Whether this attention is a compiled one here: no longer than ``MOST``, behind no mask but causality and padding.

    A bias it has not.
    """
    if functions("attention") is None or q.shape[2] * k.shape[2] > MOST:
        return False
    alike = q.dtype in _DTYPES and q.dtype == k.dtype == v.dtype and q.shape[3] == v.shape[3]
    near = all(x.device.type == "cpu" and x.stride(3) == 1 for x in (q, k, v))
    return alike and near and is_simple(mask)


def is_simple(mask: Mask | None) -> bool:
    """Whether there is no mask but causality and padding."""
    if not isinstance(mask, Mask):
        return mask is None
    at_start = isinstance(mask.offset, int) and mask.offset == 0
    return at_start and all(given is None for given in (mask.window, mask.segments, mask.prefix, mask.pattern))


class _Plan(NamedTuple):
    """What is to be done besides the tensors."""

    mask: Mask
    scale: float
    dropout: float
    key: int  # of the dropout


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float, dropout: float = 0.0) -> Tensor:
    """Attention of q [B, H, N, D] over k and v [B, G, M, D]: [B, H, N, D]. Only for what this ``serves``."""
    plan = _Plan(mask or Mask(), scale, dropout, draw_key() if dropout else 0)
    if torch.is_grad_enabled():
        out: Tensor = _Attend.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
        return out
    return _forward(q, k, v, plan)


def _forward(q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
    out = _empty_like(q)
    _call(q, k, v, out, plan)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.plan = plan
        return _forward(q, k, v, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grad = grad if grad.stride(3) == 1 and grad.dtype == q.dtype else grad.to(q.dtype).contiguous()
        found = _beside(q, k, v) or [_empty_like(q), *(_beside(k, v) or [_empty_like(x) for x in (k, v)])]
        _call(q, k, v, grad, ctx.plan, found)
        return *found, None


def _empty_like(x: Tensor) -> Tensor:
    """[B, H, N, D] whose heads of a token stand side by side, as a linear layer has them."""
    b, h, n, d = x.shape
    return x.new_empty(b, n, h, d).transpose(1, 2)


def _beside(*tensors: Tensor) -> list[Tensor]:
    """Room for the gradients of what are columns of one product: columns of one tensor too; else nothing."""
    b, n = tensors[0].shape[0], tensors[0].shape[2]
    widths = [x.shape[1] * x.shape[3] for x in tensors]
    if any(x.shape[2] != n or x.stride(2) != sum(widths) for x in tensors):
        return []
    parts = tensors[0].new_empty(b, n, sum(widths)).split(widths, -1)
    shapes = [(x.shape[1], x.shape[3]) for x in tensors]
    return [part.unflatten(-1, shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def described(
    sizes: tuple[int, int, int, int, int, int], narrow: bool, scale: float, mask: Mask, dropout: float, key: int
) -> Attention:
    """What the library is told of attention: rows, heads, groups, queries, keys, dim; not where anything stands."""
    told = Attention(*sizes, mask.causal, narrow, keep_bound(dropout), scale)
    if dropout:
        told.kept, told.key = 1.0 / keep_rate(dropout), key % 2**64
    return told


def lengths_of(mask: Mask, rows: int) -> Tensor | None:
    """How many keys each row has, as the library reads them; it must live for as long."""
    return None if mask.lengths is None else mask.lengths.to("cpu", torch.int64).expand(rows).contiguous()


def _place(x: Tensor) -> Heads:
    return Heads(x.data_ptr(), *x.stride()[:3])


def _call(q: Tensor, k: Tensor, v: Tensor, out: Tensor, plan: _Plan, gradients: Sequence[Tensor] = ()) -> None:
    """Fill ``out``; or, where it is the gradient of what came out, the gradients of q, k and v."""
    (b, h, n, d), (_, g, m, _) = q.shape, k.shape
    told = described((b, h, g, n, m, d), q.dtype == torch.bfloat16, plan.scale, plan.mask, plan.dropout, plan.key)
    lengths = lengths_of(plan.mask, b)
    told.lengths = None if lengths is None else lengths.data_ptr()
    told.q, told.k, told.v, told.out = map(_place, (q, k, v, out))
    if gradients:
        told.dq, told.dk, told.dv = map(_place, gradients)
    _library().weft_attend(ctypes.byref(told), bool(gradients), torch.get_num_threads())


@cache
def _library() -> ctypes.CDLL:
    found = functions("attention")
    assert found is not None
    found.weft_attend.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    found.weft_attend.restype, found.weft_attend.errcheck = ctypes.c_int32, enough_memory
    return found
