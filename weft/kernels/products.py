"""fp32 products of training: torch's, or compiled ones where these are faster.

torch multiplies by MKL, at 60 to 90% of what an AMD EPYC can do (docs/performance.md). ``kernels/native/matrices.h``
has the same products, each number of which has the same bits whatever stands beside it and however many threads there
are. Outside of ``compiled()`` all products are torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from weft.kernels import machine, native
from weft.kernels.native.structures import Plain

_on: ctypes.CDLL | None = None  # autograd runs backward passes in threads of its own, so this is no context variable


@contextmanager
def compiled(on: bool = True) -> Iterator[None]:
    """Inside, products of fp32 matrices on the CPU are compiled ones, in all threads; if there is a compiler."""
    global _on
    before, _on = _on, _library() if on else None
    try:
        yield
    finally:
        _on = before


def is_compiled(*tensors: Tensor) -> bool:
    """Whether products of these are compiled ones here."""
    return _on is not None and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def fastest() -> str:
    """Which products training should take here, "compiled" or "torch".

    Compiled ones on AMD's CPUs: on one of these they were measured to be faster than MKL's (docs/performance.md), on
    others nothing was measured. No timing decides, which might say one thing today and another tomorrow.
    """
    slow = machine.cpu_vendor() == "AuthenticAMD" and torch.backends.mkl.is_available()
    return "compiled" if slow and _library() is not None else "torch"


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [M, K] · b [K, N] + bias [N]: [M, N]."""
    if not is_compiled(a, b):
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return _multiplied(a, b, bias, a.new_empty(a.shape[0], b.shape[1]), add=False)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total [M, N] += a [M, K] · b [K, N]."""
    if not is_compiled(total, a, b) or total.stride(1) != 1:
        return total.addmm_(a, b)
    return _multiplied(a, b, None, total, add=True)


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float, train: bool) -> Tensor:
    """[R, 2] −log p of each row's target, plain and smoothed; the logits [R, V] become their gradient, if so wanted.

    Only for what ``is_compiled``.
    """
    assert _on is not None
    costs = logits.new_empty(len(logits), 2)
    _on.weft_cross_entropy(
        logits.data_ptr(), len(logits), logits.shape[1], targets.data_ptr(), smoothing, train, costs.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return costs


def rdrop(
    first: Tensor, second: Tensor, targets: Tensor, smoothing: float, apart: float, train: bool
) -> tuple[Tensor, Tensor]:
    """[R, 2] the costs of each row, the mean of two passes, and [R] how far they are apart; else as cross_entropy."""
    assert _on is not None
    costs, divergences = first.new_empty(len(first), 2), first.new_empty(len(first))
    _on.weft_rdrop(
        first.data_ptr(), second.data_ptr(), len(first), first.shape[1], targets.data_ptr(), smoothing, apart, train,
        costs.data_ptr(), divergences.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return costs, divergences


def _multiplied(a: Tensor, b: Tensor, bias: Tensor | None, into: Tensor, add: bool) -> Tensor:
    assert _on is not None
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"{list(a.shape)} and {list(b.shape)} do not fit: expected [M, K] and [K, N]")
    a, b, bias = _stepped(a), _stepped(b), None if bias is None else bias.contiguous()
    at = None if bias is None else bias.data_ptr()
    if into.numel():
        _on.weft_product(
            Plain(a.data_ptr(), *a.stride()), Plain(b.data_ptr(), *b.stride()), into.data_ptr(), into.stride(0),
            *into.shape, a.shape[1], at, add, torch.get_num_threads(),
        )  # fmt: skip
    return into


def _stepped(x: Tensor) -> Tensor:
    """The matrix, with numbers of a row or of a column one behind the other."""
    return x if 1 in x.stride() and 0 not in x.stride() else x.contiguous()


@cache
def _library() -> ctypes.CDLL | None:
    found = native.library()
    if found is not None:
        pointer, plain = ctypes.c_void_p, ctypes.POINTER(Plain)
        whole, short, real = ctypes.c_int64, ctypes.c_int32, ctypes.c_float
        found.weft_product.argtypes = [plain, plain, pointer, whole, whole, whole, whole, pointer, short, short]
        found.weft_product.restype = None
        found.weft_cross_entropy.argtypes = [pointer, short, whole, pointer, real, short, pointer, short]
        found.weft_cross_entropy.restype = None
        found.weft_rdrop.argtypes = [*[pointer] * 2, short, whole, pointer, real, real, short, *[pointer] * 2, short]
        found.weft_rdrop.restype = None
    return found
