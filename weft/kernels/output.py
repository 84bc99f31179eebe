"""The output layer and its losses in one call, compiled: nobody sees the logits as a whole.

Rows are taken through the product, their losses and all gradients while they are near. For what this does not serve,
and where it is not chosen (see compiled.py), it is done chunk by chunk (see cross_entropy.py).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.compiled import enough_memory, functions, multiplies
from weft.kernels.native.structures import Output

MOST = 1 << 26  # entries of a layer: it is packed twice, for both ways
_WHOLE = 16  # the rows' width is a multiple of this: of the numbers of the widest vector


def serves(weight: Tensor, bias: Tensor | None, *passes: Tensor) -> bool:
    """Whether this is a compiled one here: without a bias, of rows in fp32 or bf16 and a layer kept in fp32."""
    if functions("losses") is None or bias is not None or not 0 < weight.numel() <= MOST or weight.shape[1] % _WHOLE:
        return False
    near = all(x.device.type == "cpu" and x.is_contiguous() for x in (weight, *passes))
    alike = all(x.dtype == passes[0].dtype for x in passes)
    return near and alike and weight.dtype == torch.float32 and multiplies(passes[0].dtype)


class Found(NamedTuple):
    """What comes of it.

    Attributes:
        costs: [R, 2] −log p of each row's target, plain and smoothed; of two passes their mean.
        divergences: [R] how far two passes are apart.
        gradients: of the rows of each pass and of the layer; none without training.
    """

    costs: Tensor
    divergences: Tensor
    gradients: list[Tensor]


def losses(weight: Tensor, passes: list[Tensor], targets: Tensor, smoothing: float, apart: float, train: bool) -> Found:
    """Losses of the rows [R, D] of one pass or two behind the layer [V, D]. Only for what it ``serves``."""
    first = passes[0]
    rows, (words, dim) = len(first), weight.shape
    costs, divergences = (first.new_empty(shape, dtype=torch.float32) for shape in ((rows, 2), rows))
    gradients = [torch.empty_like(x) for x in passes] + [torch.empty_like(weight)] if train else []
    told = Output(rows, dim, words, _two(passes), weight.data_ptr(), targets.data_ptr(), smoothing, apart)
    told.narrow = first.dtype == torch.bfloat16
    told.costs, told.divergences = costs.data_ptr(), divergences.data_ptr()
    if train:
        told.dx, told.dweight = _two(gradients[:-1]), gradients[-1].data_ptr()
    _library().weft_output(ctypes.byref(told), torch.get_num_threads())
    return Found(costs, divergences, gradients)


_Two = ctypes.c_void_p * 2


def _two(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return _Two(*(x.data_ptr() for x in tensors))


@cache
def _library() -> ctypes.CDLL:
    found = functions("losses")
    assert found is not None
    found.weft_output.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    found.weft_output.restype, found.weft_output.errcheck = ctypes.c_int32, enough_memory
    return found
