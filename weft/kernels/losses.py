"""Softmax, cross entropy and R-Drop of logits, and their gradients, compiled: a row at a time, while it is near.

Without a compiler, and unless they are chosen (see compiled.py), all is torch's (see cross_entropy.py).
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from weft.kernels.compiled import enough_memory, functions

_DTYPES = (torch.float32, torch.bfloat16)


def is_compiled(*logits: Tensor) -> bool:
    """Whether the losses of these are compiled ones here."""
    on = functions("losses") is not None
    return on and all(x.dtype in _DTYPES and x.device.type == "cpu" for x in logits)


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float, train: bool) -> Tensor:
    """[R, 2] −log p of each row's target, plain and smoothed; the logits [R, V] become their gradient, if so wanted.

    Only for what ``is_compiled``.
    """
    costs = logits.new_empty(len(logits), 2, dtype=torch.float32)
    _library().weft_cross_entropy(
        logits.data_ptr(), logits.dtype == torch.bfloat16, len(logits), logits.shape[1], targets.data_ptr(), smoothing,
        train, costs.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return costs


def rdrop(
    first: Tensor, second: Tensor, targets: Tensor, smoothing: float, apart: float, train: bool
) -> tuple[Tensor, Tensor]:
    """[R, 2] the costs of each row, the mean of two passes, and [R] how far they are apart; else as cross_entropy."""
    costs, divergences = (first.new_empty(shape, dtype=torch.float32) for shape in ((len(first), 2), len(first)))
    _library().weft_rdrop(
        first.data_ptr(), second.data_ptr(), first.dtype == torch.bfloat16, len(first), first.shape[1],
        targets.data_ptr(), smoothing, apart, train, costs.data_ptr(), divergences.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return costs, divergences


@cache
def _library() -> ctypes.CDLL:
    found = functions("losses")
    assert found is not None
    pointer, whole, short, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
    found.weft_cross_entropy.argtypes = [pointer, short, short, whole, pointer, real, short, pointer, short]
    found.weft_rdrop.argtypes = [*[pointer] * 2, short, short, whole, pointer, real, real, short, *[pointer] * 2, short]
    for function in (found.weft_cross_entropy, found.weft_rdrop):
        function.restype, function.errcheck = short, enough_memory
    return found
