"""The linear layer of training: activations and products in bf16, parameters and their gradients in fp32.

A bf16 product is several times as fast as an fp32 one on a CPU that has the instructions (AMX, AVX-512 BF16), and
several times as slow on one that has not (docs/results.md). There the operands are rounded to bf16 all the
same but multiplied in fp32, in the time of fp32. Both sum in fp32. The native product takes the bias in bf16, as under
torch's autocast: to add one in fp32 has torch convert everything twice, and took twice the time of the product.

In steady mode the products have fixed heights (see steady.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.machine import bf16_products
from weft.kernels.plain import is_plain
from weft.kernels.steady import by_rows, is_steady

_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # torch's compiler calls it too


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x [..., D] times weight [E, D] transposed, plus bias [E]: [..., E] in x's dtype.

    bf16 x with fp32 parameters multiplies in bf16, and the parameters' gradients come out in fp32. Weights that are
    stored in fewer bits than x (see ``narrowed``) are widened first.

    Raises:
        ValueError: if the widths or the dtypes do not go together.
    """
    if weight.dtype == torch.int8 or (weight.dtype == torch.bfloat16 and x.dtype == torch.float32):
        weight = widened(weight, scale, x.dtype)
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"the layer takes vectors of {weight.shape[-1]}, not {x.shape[-1]} (x is {list(x.shape)})")
    if x.dtype == weight.dtype:
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return by_rows(x, weight, bias) if is_steady() else F.linear(x, weight, bias)
    if x.dtype != torch.bfloat16 or weight.dtype != torch.float32:
        raise ValueError(
            f"x is {x.dtype} and the parameters {weight.dtype}: expected the same, or bfloat16 and float32"
        )
    if is_plain():
        return reference(x, weight, bias)
    if x.device.type != "cpu":
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    y: Tensor = _Bf16Linear.apply(x, 1, weight, bias)[0]  # type: ignore[no-untyped-call]
    return y


def can_join(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Whether layers with these parameters are better applied to x at once, by ``joined``: in bf16, natively."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or not bf16_products() or is_plain() or is_steady():
        return False
    alike = all(w.dtype == torch.float32 and w.shape[1] == x.shape[-1] for w in weights)
    return alike and len({bias is None for bias in biases}) == 1


def joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Several linear layers of the same x in one product: [..., E] of each, which are columns of one tensor.

    If the gradients of what comes out are the same columns of one tensor (see ``side_by_side``), they are not copied.
    Only for what ``can_join``.
    """
    found: tuple[Tensor, ...] = _Bf16Linear.apply(x, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return found


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """[R, ΣE] of parts [..., E]: themselves, if they are neighbouring columns of one tensor, else a copy."""
    first = _rows(parts[0])
    if len(parts) == 1:
        return first
    widths = [part.shape[-1] for part in parts]
    total, place = sum(widths), first.data_ptr()
    for part, width in zip(map(_rows, parts), widths, strict=True):
        if part.stride() != (total, 1) or part.data_ptr() != place:
            return torch.cat([_rows(part) for part in parts], 1)
        place += width * part.element_size()
    return first.as_strided((first.shape[0], total), (total, 1))


def narrowed(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A matrix [E, D] in fewer bits: bf16; or int8, where each row is whole numbers from −127 to 127 times its scale.

    Returns:
        The matrix, and for int8 the scales [E].
    """
    if dtype != torch.int8:
        return weight.to(dtype), None
    scale = weight.float().abs().amax(1) / 127.0
    scale = scale.where(scale != 0.0, 1.0)
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def widened(weight: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """What ``narrowed`` made of a matrix, or of some of its rows [..., D] and their scales [...], in another dtype."""
    return weight.to(dtype) if scale is None else (weight.float() * scale[..., None]).to(dtype)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same for bf16 x in torch's differentiable operations: operands rounded, then fp32, the result rounded."""
    y = F.linear(x.float(), weight.to(x.dtype).float())
    return (y if bias is None else y + bias).to(x.dtype)


def bf16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 matrices: a bf16 product where the machine has them, else an fp32 product and result."""
    if a.device.type == "cpu" and not bf16_products():
        a, b = a.float(), b.float()
    return by_rows(a, b.t()) if is_steady() else torch.mm(a, b)


class _Bf16Linear(torch.autograd.Function):
    """Some layers of one x: their weights, then their biases, all of which may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        narrow, bias = (_joined(part, x.dtype) for part in (parameters[:count], parameters[count:]))
        assert narrow is not None
        ctx.save_for_backward(x, narrow)
        ctx.widths = [weight.shape[0] for weight in parameters[:count] if weight is not None]
        rows = _rows(x)
        if bf16_products():
            y = (by_rows if is_steady() else native_linear)(rows, narrow, bias)
        else:
            y = bf16_matmul(rows, narrow.t())
            if (wide := parameters[count]) is not None:
                y += wide
        y = y.to(x.dtype).view(*x.shape[:-1], narrow.shape[0])
        return (y,) if count == 1 else y.split(ctx.widths, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow = ctx.saved_tensors
        rows, count = side_by_side(grads), len(grads)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = bf16_matmul(rows, narrow).to(x.dtype).view_as(x)
        if any(ctx.needs_input_grad[2 : 2 + count]):
            dweight = bf16_matmul(rows.t(), _rows(x)).float()
        if any(ctx.needs_input_grad[2 + count :]):
            # torch's sum of bf16 is in fp32, then rounded, as products are: with a dtype it would copy everything first
            dbias = rows.sum(0).float() if bf16_products() else rows.sum(0, dtype=torch.float32)
        if count == 1:
            return dx, None, dweight, dbias
        parts = ([None] * count if whole is None else whole.split(ctx.widths) for whole in (dweight, dbias))
        return dx, None, *chain.from_iterable(parts)


def native_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of bf16 matrices, which writes the bias into all rows of the result first: oneDNN adds it by itself."""
    if bias is None or _ONEDNN is None:
        return F.linear(rows, weight, bias)
    y: Tensor = _ONEDNN(rows, weight, bias, "none", [], "")
    return y


def _joined(parts: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """One below the other, in this dtype; None if there are none."""
    given = [part for part in parts if part is not None]
    if len(given) < 2:
        return given[0].to(dtype) if given else None
    whole = given[0].new_empty(sum(map(len, given)), *given[0].shape[1:], dtype=dtype)
    torch._foreach_copy_(whole.split([len(part) for part in given]), given)
    return whole


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
