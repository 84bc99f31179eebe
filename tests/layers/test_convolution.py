"""Gated convolution: torch's conv1d and glu, a loop from the formula, causality, padding, stepping."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weft
from weft.layers.convolution import GatedConvolution


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def make(dim: int, kernel_size: int, causal: bool, dilation: int = 1, out_dim: int | None = None) -> GatedConvolution:
    convolution = GatedConvolution(dim, kernel_size, causal, dilation, out_dim=out_dim).double()
    torch.nn.init.normal_(convolution.convolution.bias)  # it starts at zero, where a fault would not show
    return convolution


@settings(max_examples=30)
@given(
    dim=st.integers(1, 3),
    half=st.integers(0, 2),
    causal=st.booleans(),
    dilation=st.integers(1, 3),
    n=st.integers(1, 7),
    out_dim=st.sampled_from([None, 2]),
)
def test_is_a_loop_over_the_formula(
    dim: int, half: int, causal: bool, dilation: int, n: int, out_dim: int | None
) -> None:
    size = half + 1 if causal else 2 * half + 1
    convolution = make(dim, size, causal, dilation, out_dim)
    x = draw(2, n, dim)
    with weft.record(convolution) as seen:
        y, state = convolution(x)
    weight, bias = convolution.convolution.weight.tolist(), convolution.convolution.bias.tolist()
    width = dim if out_dim is None else out_dim
    assert y.shape == seen[""]["gate"].shape == (2, n, width)
    assert (state is None) == (not causal)
    for b in range(2):
        for t in range(n):
            places = [t + (j - (size - 1 if causal else half)) * dilation for j in range(size)]
            sums = [
                bias[o]
                + sum(
                    weight[o][d][j] * float(x[b, p, d]) for j, p in enumerate(places) if 0 <= p < n for d in range(dim)
                )
                for o in range(2 * width)
            ]
            gate = [1 / (1 + math.exp(-s)) for s in sums[width:]]
            close(seen[""]["gate"][b, t], torch.tensor(gate, dtype=torch.float64))
            expected = [a * g for a, g in zip(sums, gate, strict=False)]
            close(y[b, t], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_is_conv1d_and_glu(causal: bool, dilation: int) -> None:
    convolution = GatedConvolution(4, 5, causal, dilation, out_dim=6)
    convolution = convolution.double()
    x = draw(3, 9, 4)
    sides = (4 * dilation, 0) if causal else (2 * dilation, 2 * dilation)
    weight, bias = convolution.convolution.weight, convolution.convolution.bias
    expected = F.glu(F.conv1d(F.pad(x.mT, sides), weight, bias, dilation=dilation), 1).mT
    close(convolution(x)[0], expected)


def test_bf16_inputs_meet_fp32_parameters() -> None:
    convolution = GatedConvolution(4, 3, causal=True)
    x = torch.randn(3, 9, 4)
    y, state = convolution(x.bfloat16())
    assert state is not None
    assert y.dtype == state.dtype == torch.bfloat16
    close(y.float(), convolution(x)[0], 0.05)
    y.sum().backward()
    assert convolution.convolution.weight.grad.dtype == torch.float32


def test_causal_does_not_see_the_future() -> None:
    x = draw(2, 8, 3)
    for t in range(8):
        other = torch.cat([x[:, : t + 1], draw(2, 7 - t, 3)], 1)
        causal, centred = make(3, 3, True), make(3, 3, False)
        close(causal(other)[0][:, : t + 1], causal(x)[0][:, : t + 1], 0.0)
        if t < 7:
            assert not torch.isclose(centred(other)[0][:, t], centred(x)[0][:, t]).any()


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    causal=st.booleans(),
    size=st.sampled_from([1, 3, 5]),
    dilation=st.integers(1, 2),
)
def test_padded_is_unpadded(lengths: list[int], causal: bool, size: int, dilation: int) -> None:
    convolution = make(3, size, causal, dilation)
    x = draw(len(lengths), 6, 3)
    with weft.record(convolution) as seen:
        y, state = convolution(x, torch.tensor(lengths))
    gate = seen[""]["gate"]
    for b, n in enumerate(lengths):
        assert not y[b, n:].any()
        assert not gate[b, n:].any()
        if n:
            with weft.record(convolution) as seen:
                alone, last = convolution(x[b : b + 1, :n])
            close(y[b, :n], alone[0])
            close(gate[b, :n], seen[""]["gate"][0])
            if state is not None and last is not None:
                close(state[b], last[0], 0.0)


@settings(max_examples=25)
@given(parts=st.lists(st.integers(1, 4), min_size=1, max_size=5), size=st.integers(1, 4), dilation=st.integers(1, 3))
def test_step_by_step_is_the_whole(parts: list[int], size: int, dilation: int) -> None:
    convolution = make(3, size, True, dilation)
    x = draw(2, sum(parts), 3)
    whole, last = convolution(x)
    state: Tensor | None = convolution.start(2)
    assert state is not None
    assert state.shape == (2, (size - 1) * dilation, 3)
    outputs = []
    for part in x.split(parts, 1):
        y, state = convolution(part, state=state)
        outputs.append(y)
    close(torch.cat(outputs, 1), whole)
    assert state is not None
    close(state, last, 0.0)


def test_rows_of_unequal_length_go_on_from_their_own_ends() -> None:
    convolution = make(3, 3, True, 2)
    x, more = draw(3, 6, 3), draw(3, 2, 3)
    lengths = [6, 1, 0]
    _, state = convolution(x, torch.tensor(lengths))
    y, _ = convolution(more, state=state)
    for b, n in enumerate(lengths):
        whole, _ = convolution(torch.cat([x[b : b + 1, :n], more[b : b + 1]], 1))
        close(y[b], whole[0, n:])
    assert state is not None
    swapped, _ = convolution(more[[2, 0]], state=state.index_select(0, torch.tensor([2, 0])))
    close(swapped, y[[2, 0]])


def test_variance_is_kept_through_the_gate() -> None:
    y, _ = GatedConvolution(256, 3, True)(torch.randn(4, 100, 256))
    assert 0.8 < float(y[:, 2:].detach().var()) < 2.0  # torch's own initialisation gives 0.1


def test_dropout_is_in_training_only() -> None:
    convolution = GatedConvolution(8, 3, True, dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(convolution(x)[0], convolution(x)[0])
    convolution.eval()
    assert torch.equal(convolution(x)[0], convolution(x)[0])


def test_gradients_are_right_and_padding_has_none() -> None:
    convolution = make(2, 3, False)
    x = draw(2, 4, 2).requires_grad_()
    lengths = torch.tensor([4, 2])
    assert torch.autograd.gradcheck(lambda x: convolution(x, lengths)[0], [x])
    (gradient,) = torch.autograd.grad(convolution(x, lengths)[0].sum(), x)
    assert not gradient[1, 2:].any()
    assert gradient[1, :2].all()


def test_recording_changes_nothing() -> None:
    convolution = GatedConvolution(4, 3, False, dropout=0.3)
    x = torch.randn(2, 5, 4, requires_grad=True)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(1)
        y, _ = convolution(x, torch.tensor([5, 3]))
        return y, torch.autograd.grad(y.sum(), x)[0], torch.random.get_rng_state()

    plain = run()
    with weft.record(convolution) as seen:
        observed = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert seen[""].kind == "gates"
    assert not seen[""]["gate"].requires_grad


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="odd kernel_size, not 4"):
        GatedConvolution(3, 4, causal=False)
    with pytest.raises(ValueError, match="≥ 1, not 0 and 1"):
        GatedConvolution(3, 0, causal=True)
    causal, centred = GatedConvolution(3, 3, True), GatedConvolution(3, 3, False)
    x = torch.randn(2, 5, 3)
    with pytest.raises(ValueError, match="takes no state"):
        centred(x, state=causal.start(2))
    with pytest.raises(ValueError, match=r"a state \[2, 2, 3\], not \[1, 2, 3\]"):
        causal(x, state=causal.start(1))
    with pytest.raises(ValueError, match=r"expected x \[B, T ≥ 1, 3\], not \[2, 5, 4\]"):
        causal(torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match=r"not \[2, 0, 3\]"):
        causal(x[:, :0])
    with pytest.raises(ValueError, match=r"2 whole numbers ≤ 5, not \[6, 2\]"):
        causal(x, torch.tensor([6, 2]))
