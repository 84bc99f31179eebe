"""Squeeze-and-excitation: the formula on sequences and images, padding, what is recorded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weft
from weft.layers.gates import SqueezeExcitation, real_positions


def gate_of(module: SqueezeExcitation, means: Tensor) -> Tensor:
    """σ(W₂ max(0, W₁ s + b₁) + b₂) for means[C]."""
    inner = module.squeeze.weight @ means + module.squeeze.bias
    return 1 / (1 + torch.exp(-(module.excite.weight @ inner.clamp(min=0) + module.excite.bias)))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4), padded=st.booleans())
def test_sequences_are_the_formula(lengths: list[int], padded: bool) -> None:
    module = SqueezeExcitation(6, reduction=2).double()
    x = torch.randn(len(lengths), 5, 6, dtype=torch.float64)
    with weft.record(module) as seen:
        y = module(x, torch.tensor(lengths) if padded else None)
    assert seen[""].kind == "gates"
    for b, length in enumerate(lengths):
        n = length if padded else 5
        gate = gate_of(module, sum(x[b, t] for t in range(n)) / max(n, 1) + torch.zeros(6, dtype=torch.float64))
        close(seen[""]["channels"][b], gate)
        close(y[b], torch.stack([gate * x[b, t] for t in range(5)]))
        if n:
            close(y[b, :n], module(x[b : b + 1, :n])[0])


def test_images_are_the_formula() -> None:
    module = SqueezeExcitation(6, reduction=3, spatial_dims=2).double()
    x = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    with weft.record(module) as seen:
        y = module(x)
    for b in range(2):
        gate = gate_of(module, torch.stack([channel.sum() / 12 for channel in x[b]]))
        close(seen[""]["channels"][b], gate)
        close(y[b], torch.stack([g * channel for g, channel in zip(gate, x[b], strict=True)]))


def test_the_paper_s_sizes() -> None:
    """2 C² / r weights, and the biases."""
    module = SqueezeExcitation(64)
    assert sum(p.numel() for p in module.parameters()) == 2 * 64 * 64 // 16 + 64 // 16 + 64


def test_gradients_are_right_and_reach_past_the_gate() -> None:
    module = SqueezeExcitation(4, reduction=2).double()
    torch.nn.init.constant_(module.squeeze.bias, 3.0)  # away from the corner of the ReLU
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: module(x, torch.tensor([3, 1])), [x])


@pytest.mark.parametrize("shape", [(2, 5, 32), (2, 32, 4, 4)])
def test_recording_changes_nothing(shape: tuple[int, ...]) -> None:
    module = SqueezeExcitation(32, spatial_dims=len(shape) - 2)
    x = torch.randn(shape, requires_grad=True)

    def run() -> tuple[Tensor, Tensor]:
        y = module(x)
        return y, torch.autograd.grad(y.sum(), x)[0]

    plain = run()
    with weft.record(module) as seen:
        observed = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert seen[""]["channels"].shape == (2, 32)
    assert not seen[""]["channels"].requires_grad


def test_real_positions() -> None:
    real = real_positions(torch.zeros(3, 4, 2), torch.tensor([4, 0, 2]))
    assert real[..., 0].tolist() == [[True] * 4, [False] * 4, [True, True, False, False]]


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="from 1 to channels = 8, not 16"):
        SqueezeExcitation(8)
    with pytest.raises(ValueError, match="not 3"):
        SqueezeExcitation(32, spatial_dims=3)
    with pytest.raises(ValueError, match=r"expected \[B, N, 32\], not \[2, 32, 5\]"):
        SqueezeExcitation(32)(torch.zeros(2, 32, 5))
    with pytest.raises(ValueError, match=r"expected \[B, 32, H, W\], not \[2, 4, 4, 32\]"):
        SqueezeExcitation(32, spatial_dims=2)(torch.zeros(2, 4, 4, 32))
    with pytest.raises(ValueError, match="images have no padding"):
        SqueezeExcitation(32, spatial_dims=2)(torch.zeros(2, 32, 4, 4), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"2 whole numbers ≤ 5, not \[9, 1\]"):
        SqueezeExcitation(32)(torch.zeros(2, 5, 32), torch.tensor([9, 1]))
    with pytest.raises(ValueError, match="lengths must be ≥ 0, not -1"):
        SqueezeExcitation(32)(torch.zeros(2, 5, 32), torch.tensor([-1, 1]))
