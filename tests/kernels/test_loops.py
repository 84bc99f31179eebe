"""What a loop does at each step: the same layer, and gradients that wait for the end."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from weft.kernels.linear import linear
from weft.kernels.loops import afterwards, repeated
from weft.kernels.machine import bf16_products
from weft.kernels.plain import plain

native = pytest.mark.skipif(not bf16_products(), reason="this CPU has no bf16 products")


def recurrence(weight: Tensor, bias: Tensor | None, x: Tensor, dtype: torch.dtype, loop: bool) -> Tensor:
    """h ← tanh(W h + b + x_t), with the layer of a loop or anew at each step."""
    step = repeated(weight, bias, dtype) if loop else lambda h: linear(h.to(dtype), weight, bias).to(weight.dtype)
    h, found = torch.zeros(x.shape[0], weight.shape[0]), []
    for part in x.unbind(1):
        h = (step(h) + part).tanh()
        found.append(h)
    return torch.stack(found, 1)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=native, id="bf16")], ids=["fp32", None]
)
def test_a_loop_learns_as_the_layer_does(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias = (0.3 * torch.randn(24, 24)).requires_grad_(), torch.randn(24, requires_grad=True)
    x = torch.randn(6, 9, 24, requires_grad=True)
    given = [weight, x, bias] if biased else [weight, x]
    found = []
    for loop in (True, False):
        out = recurrence(weight, bias if biased else None, x, dtype, loop)
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    assert torch.equal(found[0][0], found[1][0])  # the way forward is the same
    for mine, plain_one in zip(*found, strict=True):
        assert mine.dtype == torch.float32
        assert float((mine - plain_one).detach().norm()) <= 1e-2 * float(plain_one.detach().norm())


@native
def test_the_gradient_of_a_loop_is_nearer_to_the_truth_than_a_sum_of_rounded_ones() -> None:
    torch.manual_seed(1)
    weight = torch.randn(32, 32, requires_grad=True)
    xs = [torch.randn(8, 32).bfloat16().float() for _ in range(60)]
    signs = torch.randn(8, 32).bfloat16().float()
    grads = []
    for step in (repeated(weight, None, torch.bfloat16), lambda x: linear(x.bfloat16(), weight).float()):
        grads.append(torch.autograd.grad(sum((step(x) * signs).sum() for x in xs), weight)[0])
    truth = sum(signs.double().t() @ x.double() for x in xs)
    far = [float((grad - truth).norm() / truth.norm()) for grad in grads]
    assert far[0] <= far[1]
    assert far[0] < 4e-3


@native
def test_a_second_backward_pass_gives_the_same_and_any_shape_goes() -> None:
    weight = torch.randn(5, 7, requires_grad=True)
    step = repeated(weight, None, torch.bfloat16)
    total = step(torch.randn(2, 3, 7)).sum() + step(torch.randn(4, 7)).square().sum()
    once, again = (torch.autograd.grad(total, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)
    assert step(torch.randn(2, 3, 7)).shape == (2, 3, 5)


def test_the_plain_way_is_the_layer_itself() -> None:
    weight, x = torch.randn(5, 7), torch.randn(3, 7)
    with plain():
        assert torch.equal(repeated(weight, None, torch.bfloat16)(x), linear(x.bfloat16(), weight).float())


def test_the_end_comes_after_all_steps() -> None:
    told: list[str] = []

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, end: Tensor, name: str) -> Tensor:
            ctx.name = name  # type: ignore[attr-defined]
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            told.append(ctx.name)  # type: ignore[attr-defined]
            return grad * 2, grad.new_zeros(()), None

    def finish() -> list[Tensor]:
        told.append("end")
        return [torch.full((2,), 3.0)]

    table, x = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    end = afterwards(finish, table)
    y = Step.apply(Step.apply(x, end, "first"), end, "second")  # type: ignore[no-untyped-call]
    (y.sum() + Step.apply(x, end, "beside").sum()).backward()  # type: ignore[no-untyped-call]
    assert told[-1] == "end"
    assert sorted(told) == ["beside", "end", "first", "second"]
    assert table.grad is not None
    assert table.grad.tolist() == [3.0, 3.0]


@native
def test_nothing_stays_when_a_loop_is_forgotten() -> None:
    gc.disable()
    try:
        weight = torch.randn(4, 4, requires_grad=True)
        x = torch.randn(2, 4, requires_grad=True)
        step = repeated(weight, None, torch.bfloat16)
        y = step(step(x))
        y.sum().backward()
        kept = weakref.ref(y)
        del step, y
        assert kept() is None
    finally:
        gc.enable()
