"""What an update does to parameters: the norm of all gradients, and AdamW.

Torch has them parameter by parameter; a model of a few small layers waits longer for these calls than for what they do,
and gradients are written again where they are only to be divided. Compiled, all parameters are one pass each.

Unless they are chosen (see compiled.py), and for all that they do not serve, they are torch's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels import native
from weft.kernels.compiled import enough_memory, functions
from weft.kernels.native.structures import AdamW

_PARAMETER = Struct("@PPPPqf0P")  # as native/updates.h has it: made of numbers at once, where there may be hundreds


class Trained(NamedTuple):
    """A parameter with a gradient, AdamW's means of this and of its square, and its weight decay."""

    parameter: Tensor
    mean: Tensor
    square: Tensor
    decay: float


def norm(gradients: Sequence[Tensor]) -> float:
    """The norm of all of them together."""
    if not _serves(gradients):
        return float(torch.nn.utils.get_total_norm(gradients))
    told = b"".join([_PARAMETER.pack(0, g.data_ptr(), 0, 0, g.numel(), 0.0) for g in gradients])
    squares = ctypes.c_double()
    _library().weft_squares(told, len(gradients), ctypes.byref(squares), torch.get_num_threads())
    return float(squares.value**0.5)


def adamw(
    trained: Sequence[Trained], step: int, rate: float, by: float, betas: tuple[float, float], eps: float
) -> None:
    """Update number ``step`` = 1, 2, … with gradients ``by`` times as large, by Loshchilov and Hutter's formula::

        m ← m + (1 − β₁)(g − m),   v ← β₂ v + (1 − β₂) g²
        w ← (1 − rate · decay) w − rate · m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε)

    What has no gradient stays as it is; what the gradients are afterwards is not said.
    """
    live = [(p, p.grad, mean, square, decay) for p, mean, square, decay in trained if p.grad is not None]
    if not live:
        return
    if _serves([x for *tensors, _ in live for x in tensors]):
        places = [(p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), p.numel(), d) for p, g, m, v, d in live]
        told = b"".join([_PARAMETER.pack(*place) for place in places])
        how = AdamW(by, rate, *betas, eps, *(1.0 - beta**step for beta in betas))
        _library().weft_adamw(told, len(live), ctypes.byref(how), torch.get_num_threads())
    else:
        _by_torch(live, step, rate, by, betas, eps)
    torch.autograd.graph.increment_version([p for p, *_ in live])  # torch does not count what others change


_Live = tuple[Tensor, Tensor, Tensor, Tensor, float]  # as Trained, with the gradient behind the parameter


def _by_torch(live: Sequence[_Live], step: int, rate: float, by: float, betas: tuple[float, float], eps: float) -> None:
    """By the kernel of torch.optim.AdamW(fused=True).

    One pass over each parameter: 3 M parameters on one core took 2.1 ms, 11 to 15 ms the other ways. Not by that class
    itself, since to make one has torch import its compiler, which takes 2 s.
    """
    if by != 1.0:
        torch._foreach_mul_([grad for _, grad, *_ in live], by)
    counts = {p.device: torch.full((), float(step), device=p.device) for p, *_ in live}
    for decay in dict.fromkeys(one[4] for one in live):
        alike = [one for one in live if one[4] == decay]
        parameters, gradients, means, squares, _ = zip(*alike, strict=True)
        torch._fused_adamw_(
            parameters,
            gradients,
            means,
            squares,
            [],
            [counts[p.device] for p, *_ in alike],
            lr=rate,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )


def _serves(tensors: Sequence[Tensor]) -> bool:
    """Whether these are what a compiled pass takes: fp32, on the CPU, in one piece each."""
    return functions("updates") is not None and all(
        x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() for x in tensors
    )


@cache
def _library() -> ctypes.CDLL:
    found = native.library()
    assert found is not None
    pointer, short = ctypes.c_void_p, ctypes.c_int32
    for function in (found.weft_squares, found.weft_adamw):
        function.argtypes, function.restype, function.errcheck = [pointer, short, pointer, short], short, enough_memory
    return found
