"""The passes between products in training, compiled: norms, activations, dropout with the residual it is added onto.

Torch has each of them in several steps that go through memory, widens bf16 numbers one by one for some of them, and
sums the gradients of a norm's gains in bf16. Here each is one pass forward and one backward, in fp32 but for what is
read and written.

Unless they are chosen (see compiled.py), and for all that they do not serve, they are torch's own.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.compiled import functions
from weft.kernels.native.structures import Drop, Norming

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "swiglu")  # numbered as in native/activations.h
_DTYPES = (torch.float32, torch.bfloat16)


def serves(*tensors: Tensor | None) -> bool:
    """Whether passes over these are compiled ones here: all of one shape and dtype, fp32 or bf16, on the CPU.

    What is compiled reads as many numbers of each as the first has, and asks nobody: others are left to torch, which
    broadcasts them or says what is wrong.
    """
    if functions("rows") is None:
        return False
    given = [x for x in tensors if x is not None]
    alike = all(x.shape == given[0].shape and x.dtype == given[0].dtype for x in given)
    return alike and given[0].dtype in _DTYPES and all(x.device.type == "cpu" for x in given)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """LayerNorm of the last dimension of x, or RMSNorm if not ``centred``. Only for an x that this ``serves``."""
    normed: Tensor = _Norm.apply(x, weight, bias, eps, centred)  # type: ignore[no-untyped-call]
    return normed


def serves_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether this norm is a compiled one: of an x that this ``serves``, with gains, and these and a bias in fp32."""
    return weight is not None and serves(x) and all(p is None or _fits(p, x) for p in (weight, bias))


def _fits(parameter: Tensor, x: Tensor) -> bool:
    alike = parameter.shape == x.shape[-1:] and parameter.device == x.device
    return alike and parameter.dtype == torch.float32 and parameter.is_contiguous()


def activated(x: Tensor, by: Tensor | None, activation: str) -> Tensor:
    """f(x), or f(x) · by, where f is one of ``ACTIVATIONS``. Only for what this ``serves``."""
    y: Tensor = _Activated.apply(x, by, ACTIVATIONS.index(activation))  # type: ignore[no-untyped-call]
    return y


def dropped(x: Tensor, onto: Tensor | None, bound: int, kept: float, key: int) -> Tensor:
    """x · kept where the decision (see dropout.py) is below the bound, else 0; plus onto. For what this ``serves``."""
    x, onto = x.contiguous(), None if onto is None else onto.contiguous()
    y = torch.empty_like(x)
    told = Drop(key % 2**64, x.numel(), bound, kept)
    _library().weft_drop(ctypes.byref(told), _narrow(x), _at(x), _at(onto), _at(y), torch.get_num_threads())
    return y


def add(to: Tensor, x: Tensor) -> None:
    """Add x to ``to``, in place: torch makes an fp32 copy of a bf16 x first."""
    narrow_onto_wide = (to.dtype, x.dtype) == (torch.float32, torch.bfloat16)
    if narrow_onto_wide and to.is_contiguous() and to.shape == x.shape and serves(x):
        x = x.contiguous()
        _library().weft_add(_at(x), _at(to), x.numel(), torch.get_num_threads())
    else:
        to += x


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
        x = x.contiguous()
        spreads = x.new_empty(x.numel() // x.shape[-1], 2, dtype=torch.float32)
        y = torch.empty_like(x)
        told = _norming(x, weight, bias, spreads, eps, centred)
        _library().weft_norm(ctypes.byref(told), _at(y), torch.get_num_threads())
        ctx.save_for_backward(x, weight, bias, spreads)
        ctx.eps, ctx.centred = eps, centred
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, spreads = ctx.saved_tensors
        grad, dx, dweight = grad.contiguous(), torch.empty_like(x), torch.empty_like(weight)
        dbias = None if bias is None else torch.empty_like(bias)
        told = _norming(x, weight, bias, spreads, ctx.eps, ctx.centred)
        sums = weight.new_empty(_library().weft_blocks(told.rows), 2, told.n)
        _library().weft_norm_back(
            ctypes.byref(told), _at(grad), _at(dx), _at(dweight), _at(dbias), _at(sums), torch.get_num_threads()
        )
        return dx, dweight, dbias, None, None


def _norming(x: Tensor, weight: Tensor, bias: Tensor | None, spreads: Tensor, eps: float, centred: bool) -> Norming:
    n = x.shape[-1]
    return Norming(_at(x), _at(weight), _at(bias), _at(spreads), x.numel() // n, n, eps, centred, _narrow(x))


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor | None, activation: int) -> Tensor:
        x, by = x.contiguous(), None if by is None else by.contiguous()
        y = torch.empty_like(x)
        _library().weft_activate(activation, _narrow(x), x.numel(), _at(x), _at(by), _at(y), torch.get_num_threads())
        ctx.save_for_backward(x, by)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, by = ctx.saved_tensors
        grad, dx = grad.contiguous(), torch.empty_like(x)
        dby = None if by is None else torch.empty_like(by)
        _library().weft_activate_back(
            ctx.activation, _narrow(x), x.numel(), _at(x), _at(by), _at(grad), _at(dx), _at(dby),
            torch.get_num_threads(),
        )  # fmt: skip
        return dx, dby, None


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _narrow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


@cache
def _library() -> ctypes.CDLL:
    found = functions("rows")
    assert found is not None
    pointer, whole, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, kinds in {
        "norm": [*[pointer] * 2, short],
        "norm_back": [*[pointer] * 6, short],
        "activate": [short, short, whole, *[pointer] * 3, short],
        "activate_back": [short, short, whole, *[pointer] * 5, short],
        "add": [*[pointer] * 2, whole, short],
        "drop": [pointer, short, *[pointer] * 3, short],
    }.items():
        function = getattr(found, f"weft_{name}")
        function.argtypes, function.restype = kinds, None
    found.weft_blocks.argtypes, found.weft_blocks.restype = [whole], whole
    return found
