"""What a loop over positions does at each step, with gradients that are made once, when all steps are done.

A recurrent layer multiplies by the same matrices at each position. Autograd has a gradient of all of them for each
step and adds these up. Here a step only leaves what that takes, and ``afterwards`` makes it in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.linear import bf16_matmul, can_join, linear, native_linear


def afterwards(finish: Callable[[], Sequence[Tensor | None]], *tensors: Tensor | None) -> Tensor:
    """A number for each step to take, and give a gradient of, whatever that is.

    When all steps that took it have theirs, and not before, ``finish`` is asked for the gradients of the tensors. It
    must not hold what holds the number, or both stay until Python looks for such circles.
    """
    end: Tensor = _Afterwards.apply(finish, *tensors)  # type: ignore[no-untyped-call]
    return end


def repeated(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A linear layer for a loop: of x [..., D], multiplied in a dtype, x Wᵀ + b [..., E] in the parameters' precision.

    In bf16 the matrix is narrowed once, and its gradient is one product over the rows of all steps.
    """
    if not can_join(weight.new_empty(0, weight.shape[1], dtype=dtype), [weight], [bias]):
        return lambda x: linear(x.to(dtype), weight, bias).to(weight.dtype)
    narrow, narrow_bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
    seen: list[tuple[Tensor, Tensor]] = []  # what was multiplied, and the gradient of what came out

    def finish() -> tuple[Tensor, Tensor | None]:
        x, grad = (torch.cat(parts) for parts in zip(*seen, strict=True))
        seen.clear()  # another backward pass fills it again
        return bf16_matmul(grad.t(), x).to(weight.dtype), None if bias is None else grad.sum(0).to(bias.dtype)

    end = afterwards(finish, weight, bias)

    def step(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _Step.apply(rows, end, narrow, narrow_bias, seen)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], len(narrow))

    return step


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, end: Tensor, narrow: Tensor, bias: Tensor | None, seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        rows = x.to(narrow.dtype)
        ctx.save_for_backward(rows, narrow)
        ctx.seen = seen
        return native_linear(rows, narrow, bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, narrow = ctx.saved_tensors
        found = grad.to(narrow.dtype)
        ctx.seen.append((rows, found))
        return bf16_matmul(found, narrow).to(grad.dtype), grad.new_zeros(()), None, None, None


class _Afterwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, finish: Callable[[], Sequence[Tensor | None]], *tensors: Tensor | None) -> Tensor:
        ctx.finish = finish
        return next(x for x in tensors if x is not None).new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.finish()
