"""The bf16 product with fp32 parameters, both ways of computing it, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels import linear as kernel
from weft.kernels.linear import linear


@pytest.mark.parametrize("native", [True, False])
@given(
    rows=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    din=st.integers(1, 40),
    dout=st.integers(1, 40),
    bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_bf16_with_fp32_parameters(native: bool, rows: list[int], din: int, dout: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(*rows, din).bfloat16().requires_grad_()
    weight, b = torch.randn(dout, din, requires_grad=True), torch.randn(dout, requires_grad=True) if bias else None
    inputs = [t for t in (x, weight, b) if t is not None]
    # the definition: operands rounded to bf16, everything else exact
    wide = [x.detach().double(), weight.detach().bfloat16().double(), *([b.detach().double()] if b is not None else [])]
    wide = [t.requires_grad_() for t in wide]
    expected = wide[0] @ wide[1].T + (wide[2] if bias else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "bf16_products", lambda: native)
        y = linear(x, weight, b)
        grad = torch.randn(y.shape).bfloat16()
        grads = torch.autograd.grad(y, inputs, grad)
    assert y.dtype == torch.bfloat16
    assert [g.dtype for g in grads] == [t.dtype for t in inputs]
    exact = torch.autograd.grad(expected, wide, grad.double())
    for mine, theirs in zip((y, *grads), (expected, *exact), strict=True):
        # two roundings of eight bits: the product's, and the sum's or the dtype's
        assert (mine.double() - theirs).abs().max() <= 2**-7 * theirs.abs().max().clamp(min=1.0)


def test_where_bf16_is_emulated_gradients_of_parameters_keep_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "bf16_products", lambda: False)
    x = torch.randn(50, 8).bfloat16()
    weight = torch.randn(4, 8, requires_grad=True)
    y = linear(x, weight)
    assert torch.equal(y, kernel.reference(x, weight))
    grad = torch.randn(50, 4).bfloat16()
    (dweight,) = torch.autograd.grad(y, weight, grad)
    torch.testing.assert_close(dweight, (grad.double().T @ x.double()).float())


def test_equal_dtypes_are_torchs_own() -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    assert torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


def test_what_does_not_go_together_is_named() -> None:
    with pytest.raises(ValueError, match="takes vectors of 5, not 6"):
        linear(torch.randn(2, 6), torch.randn(4, 5))
    with pytest.raises(ValueError, match=r"x is torch.float64 and the parameters torch.float32"):
        linear(torch.randn(2, 5).double(), torch.randn(4, 5))
