"""Dropout: right in mean and variance, the same for the same generator state at any thread count, independent."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels.dropout import _hash, dropout, keep_mask, keep_rate


@given(
    p=st.floats(0.01, 0.99),
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_kept_elements_are_divided_by_the_keep_rate_and_the_gradient_is_the_same(
    p: float, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = (torch.rand(shape, dtype=torch.float64) + 0.5).to(dtype).requires_grad_()
    y = dropout(x, p)
    kept = y != 0
    scaled = (x.detach().double() / keep_rate(p)).to(dtype)
    torch.testing.assert_close(y.detach()[kept], scaled[kept], rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)
    g = (torch.rand(shape, dtype=torch.float64) + 0.5).to(dtype)
    (grad,) = torch.autograd.grad(y, x, g)
    assert torch.equal(grad != 0, kept)
    torch.testing.assert_close(grad, torch.where(kept, (g.double() / keep_rate(p)).to(dtype), 0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_is_added_in_the_same_pass(p: float, training: bool, dtype: torch.dtype) -> None:
    x, onto = (torch.randn(3, 50, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(2))
    results = []
    for together in (True, False):
        torch.manual_seed(4)
        y = dropout(x, p, training, onto=onto) if together else onto + dropout(x, p, training)
        results.append([y, *torch.autograd.grad(y, (x, onto), torch.arange(150.0).view(3, 50).to(dtype))])
    for one, other in zip(*results, strict=True):  # rounded once instead of twice
        torch.testing.assert_close(one, other, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=2**-7)
    with pytest.raises(ValueError, match=r"\[3, 50\] cannot be added onto \[50\]"):
        dropout(x, p, onto=onto[0])


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_and_variance_are_those_of_the_definition(p: float, dtype: torch.dtype) -> None:
    count = 1 << 20
    y = dropout(torch.ones(count, dtype=dtype), p).double()
    deviation = math.sqrt(p / (1 - p))  # of one element: E y = 1, Var y = p/(1−p)
    assert abs(y.mean() - 1) < 5 * deviation / math.sqrt(count) + (2**-9 if dtype == torch.bfloat16 else 1e-6)
    assert float(y.var()) == pytest.approx(p / (1 - p), rel=0.02)


def test_the_rate_is_resolved_to_sixteen_bits() -> None:
    assert keep_rate(0.3) == pytest.approx(0.7, abs=2**-17)
    assert keep_rate(1e-9) == 1.0
    assert keep_mask((9,), 1e-9, 5).tolist() == [1.0] * 9


def test_the_same_generator_state_gives_the_same_mask_at_any_thread_count() -> None:
    x, threads, masks = torch.ones(300_001), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(11)
            masks.append((dropout(x, 0.3), dropout(x, 0.3)))
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(masks[0][0], masks[0][1])
    for one, two in masks[1:]:
        assert torch.equal(one, masks[0][0])
        assert torch.equal(two, masks[0][1])


def test_it_draws_from_torchs_generator() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = dropout(torch.ones(100), 0.5)
    assert not torch.equal(state, torch.get_rng_state())
    torch.set_rng_state(state)
    assert torch.equal(first, dropout(torch.ones(100), 0.5))


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent numbers would show."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * math.sqrt(len(a))


@pytest.mark.parametrize("key", [0, 1, -1, 0x0123456789ABCDEF])
def test_the_hash_has_no_pattern_that_dropout_could_show(key: int) -> None:
    """Chi-square of each 16-bit lane, correlations of lanes, neighbours at many distances, and close keys."""
    count = 1 << 17
    lanes = _hash(key, 0, count).view(torch.int16).double()
    for lane in lanes.view(-1, 4).T:
        histogram = torch.histc(lane, 256, -32768, 32768)
        expected = count / 256
        chi_square = float(((histogram - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 6 * math.sqrt(2 * 255)
    for lag in (1, 2, 3, 4, 8, 16, 32, 128, 512, 1024, 4096, 2 * count):
        assert abs(correlation(lanes[:-lag], lanes[lag:])) < 5.5
        kept = (lanes < 9000).double()
        assert abs(correlation(kept[:-lag], kept[lag:])) < 5.5
    for other in (key + 1, key ^ (1 << 31), key ^ (1 << 40), key ^ (1 << 62)):
        assert abs(correlation(lanes, _hash(other, 0, count).view(torch.int16).double())) < 5.5
    bits = (_hash(key, 0, count)[:, None] >> torch.arange(64)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() * 2 * math.sqrt(count) < 6
    signs = bits.float() * 2 - 1
    assert ((signs.T @ signs).fill_diagonal_(0) / math.sqrt(count)).abs().max() < 6.5


def test_parts_of_one_key_do_not_overlap() -> None:
    whole = keep_mask((1 << 20,), 0.5, 7)
    assert abs(correlation(whole[: 1 << 19], whole[1 << 19 :])) < 5.5  # the hash works in blocks
    later = keep_mask((1 << 20,), 0.5, 7, start=1 << 20)
    assert abs(correlation(whole, later)) < 5.5
    assert torch.equal(later, keep_mask((1 << 20,), 0.5, 7, start=1 << 20))


def test_eval_zero_and_one() -> None:
    x = torch.randn(5, requires_grad=True)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    assert not dropout(x, 1.0).any()


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
def test_p_must_be_a_probability(p: float) -> None:
    with pytest.raises(ValueError, match="probability between 0 and 1"):
        dropout(torch.ones(2), p)
