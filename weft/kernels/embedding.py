"""Rows of a table by number, with learned positions added, in the activations' dtype: one pass, and one back.

Compiled where passes over rows are (see rows.py); else, and for all that this does not serve, torch's.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels import native
from weft.kernels.compiled import functions
from weft.kernels.native.structures import Embedding
from weft.kernels.plain import is_plain


def embedded(numbers: Tensor, table: Tensor, added: Tensor | None, dtype: torch.dtype) -> Tensor:
    """table[numbers] + added: [B, N, D] of numbers [B, N], a table [V, D] and what is added [N, D], in this dtype.

    Raises:
        IndexError: if a number is not below V.
    """
    if _serves(numbers, table, added, dtype):
        y: Tensor = _Embedded.apply(numbers, table, added, dtype)  # type: ignore[no-untyped-call]
        return y
    x = F.embedding(numbers, table)
    return (x if added is None else x + added).to(dtype)


def _serves(numbers: Tensor, table: Tensor, added: Tensor | None, dtype: torch.dtype) -> bool:
    if functions("rows") is None or is_plain() or numbers.dim() != 2 or table.dim() != 2:
        return False
    fits = added is None or added.shape == (numbers.shape[1], table.shape[1])
    narrow = dtype in (torch.float32, torch.bfloat16) and numbers.dtype == torch.int64 and numbers.is_cpu
    floats = [table] if added is None else [table, added]
    return fits and narrow and all(x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() for x in floats)


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, table: Tensor, added: Tensor | None, dtype: torch.dtype) -> Tensor:
        numbers = numbers.contiguous()
        y = table.new_empty(*numbers.shape, table.shape[1], dtype=dtype)
        told = _told(numbers, table, added)
        if _library().weft_embed(ctypes.byref(told), _narrow(y), y.data_ptr(), torch.get_num_threads()):
            raise IndexError(
                f"a token is not in a table of {len(table)}: numbers from {numbers.min()} to {numbers.max()}"
            )
        ctx.save_for_backward(numbers)
        ctx.table, ctx.added = table.shape, added is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (numbers,) = ctx.saved_tensors
        grad = grad.contiguous()
        table = grad.new_zeros(ctx.table, dtype=torch.float32)
        added = grad.new_zeros(numbers.shape[1], ctx.table[1], dtype=torch.float32) if ctx.added else None
        _library().weft_embed_back(
            ctypes.byref(_told(numbers, table, added)), _narrow(grad), grad.data_ptr(), table.data_ptr(),
            None if added is None else added.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return None, table, added, None


def _told(numbers: Tensor, table: Tensor, added: Tensor | None) -> Embedding:
    at = None if added is None else added.data_ptr()
    return Embedding(numbers.data_ptr(), numbers.numel(), *table.shape, table.data_ptr(), at, max(numbers.shape[1], 1))


def _narrow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


@cache
def _library() -> ctypes.CDLL:
    found = native.library()
    assert found is not None
    pointer, short = ctypes.c_void_p, ctypes.c_int32
    found.weft_embed.argtypes, found.weft_embed.restype = [pointer, short, pointer, short], short
    found.weft_embed_back.argtypes, found.weft_embed_back.restype = [pointer, short, *[pointer] * 3, short], None
    return found
