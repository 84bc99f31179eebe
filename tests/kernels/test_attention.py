"""Every way of attention against the formula in float64: values, gradients, masks, dtypes, memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels import attention
from weft.kernels.attention import attend, attention_weights, pick
from weft.kernels.mask import Mask


def loop(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(scale · q·k + bias) · v, one query and one head at a time; differentiable."""
    b, h, n, _ = q.shape
    m, shared = k.shape[2], h // k.shape[1]
    rows = []
    for i in range(b):
        for j in range(h):
            for t in range(n):
                open_keys = [s for s in range(m) if bool(allowed[i, j, t, s])]
                if not open_keys:
                    rows.append(torch.zeros(v.shape[3], dtype=q.dtype))
                    continue
                scores = torch.stack(
                    [scale * (q[i, j, t] * k[i, j // shared, s]).sum() + bias[i, j, t, s] for s in open_keys]
                )
                weights = scores.exp() / scores.exp().sum()
                rows.append(sum(w * v[i, j // shared, s] for w, s in zip(weights, open_keys, strict=True)))
    return torch.stack(rows).view(b, h, n, v.shape[3])


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], Mask | None, Tensor | None]:
    b, groups, shared, n, m, d = (draw(st.integers(1, top)) for top in (3, 2, 3, 5, 6, 4))
    h = groups * shared
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    causal = draw(st.booleans())
    flags = [draw(st.booleans()) for _ in range(5)]
    mask = Mask(
        causal=causal,
        window=draw(st.integers(1, 4)) if flags[0] else None,
        lengths=whole(0, m + 1, b) if flags[1] else None,
        segments=whole(0, 2, b, m) if flags[2] else None,
        prefix=draw(st.integers(0, m)) if causal and flags[3] else None,
        pattern=whole(0, 2, b, h, n, m).bool() if flags[4] else None,
        offset=whole(0, 3, b) if draw(st.booleans()) else 0,
    )
    wide = [draw(st.booleans()) for _ in range(4)]
    bias = normal(*(x if w else 1 for x, w in zip((b, h, n, m), wide, strict=True))) if draw(st.booleans()) else None
    if bias is not None and draw(st.booleans()):  # −∞ closes keys, perhaps all of a query's
        closed = torch.rand(bias.shape, generator=generator) < 0.4
        bias = bias.detach().masked_fill(closed, float("-inf")).requires_grad_()
    qkv = (normal(b, h, n, d), normal(b, groups, m, d), normal(b, groups, m, d))
    return qkv, mask if draw(st.booleans()) else None, bias


@pytest.mark.parametrize("way", ["reference", "sdpa", "tiled"])
@settings(max_examples=60)
@given(problem=problems(), scale=st.sampled_from([None, 0.3]), tile=st.sampled_from([4, 1 << 19]), kept=st.booleans())
def test_each_way_equals_the_formula(
    way: str, problem: tuple[tuple[Tensor, ...], Mask | None, Tensor | None], scale: float | None, tile: int, kept: bool
) -> None:
    (q, k, v), mask, bias = problem
    (b, h, n, d), m = q.shape, k.shape[2]
    allowed = torch.ones(b, h, n, m, dtype=torch.bool)
    if mask is not None:
        allowed = mask.dense(n, m).expand(b, h, n, m)
    added = torch.zeros(b, h, n, m, dtype=torch.float64) if bias is None else bias.expand(b, h, n, m)
    allowed = allowed & (added != float("-inf"))
    expected = loop(q, k, v, allowed, added, d**-0.5 if scale is None else scale)
    with pytest.MonkeyPatch.context() as patch:  # small tiles and no memory, so that every branch runs
        patch.setattr(attention, "_TILE", tile)
        patch.setattr(attention, "_QUERIES", 2 if tile == 4 else 128)
        patch.setattr(attention, "_KEPT", 1 << 25 if kept else 0)
        out = attention.WAYS[way](q, k, v, mask, bias, scale, 0.0)
        torch.testing.assert_close(out, expected, atol=1e-11, rtol=1e-11)
        inputs = [x for x in (q, k, v, bias) if x is not None]
        if not expected.requires_grad:  # nobody may look anywhere: the loop has no graph
            assert not out.any()
            return
        grad = torch.randn(out.shape, dtype=torch.float64)
        given_grads = torch.autograd.grad(out, inputs, grad)
        expected_grads = torch.autograd.grad(expected, inputs, grad, allow_unused=True)
    for mine, theirs in zip(given_grads, expected_grads, strict=True):
        theirs = torch.zeros_like(mine) if theirs is None else theirs
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("tile", [4, 1 << 19])
def test_tiled_passes_gradcheck(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_TILE", tile)
    monkeypatch.setattr(attention, "_QUERIES", 2)
    q, k, v = (torch.randn(2, h, 3, 2, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    bias = torch.randn(1, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    mask = Mask(causal=True, lengths=torch.tensor([3, 2]))

    def run(*inputs: Tensor) -> Tensor:
        return attention.tiled(*inputs[:3], mask, inputs[3], None, 0.0)

    assert torch.autograd.gradcheck(run, (q, k, v, bias))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize(("n", "mask"), [(7, None), (7, Mask(causal=True)), (150, Mask(causal=True, window=9))])
def test_attend_in_each_dtype(dtype: torch.dtype, tolerance: float, n: int, mask: Mask | None) -> None:
    q, k, v = (torch.randn(3, h, n, 16, dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention.reference(*wide, mask, None, None, 0.0)
    out = attend(q, k, v, mask)
    assert out.dtype == dtype
    grad = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    for mine, theirs in zip(
        (out, *grads), (expected, *torch.autograd.grad(expected, wide, grad.double())), strict=True
    ):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("way", ["reference", "sdpa", "tiled"])
def test_a_query_that_may_attend_nowhere_gives_zeros(way: str) -> None:
    q, k, v = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
    mask = Mask(lengths=torch.tensor([0, 2]))
    out = attention.WAYS[way](q, k, v, mask, None, None, 0.0)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out[0].any()
    assert out[1].all()
    for grad in grads:
        assert grad.isfinite().all()
        assert not grad[0].any()
    assert not attention_weights(q, k, mask)[0].any()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("tile", [64, 1 << 19])
def test_dropout_is_the_same_forward_and_backward(kept: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With values the identity the output is the dropped weights themselves; the gradients must match them."""
    monkeypatch.setattr(attention, "_KEPT", 1 << 25 if kept else 0)
    monkeypatch.setattr(attention, "_TILE", tile)
    monkeypatch.setattr(attention, "_QUERIES", 3)
    n, p = 8, 0.4
    q, k = (torch.randn(4, 2, n, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    v = torch.eye(n, dtype=torch.float64).expand(4, 2, n, n).clone().requires_grad_()
    dropped = attend(q, k, v, dropout=p)
    weights = attention_weights(q, k)
    share = dropped.detach() / weights.detach()  # 0 or 1/keep
    keep = share.max()
    assert torch.all((share.abs() < 1e-12) | ((share - keep).abs() < 1e-9))
    assert keep.item() == pytest.approx(1 / (1 - p), rel=1e-4)
    expected = (weights * share) @ v
    grad = torch.randn(expected.shape, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(dropped, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


def test_dropout_of_tiles_is_independent_and_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_TILE", 64)
    n = 8
    q = k = torch.zeros(64, 2, n, 4)
    v = torch.eye(n).expand(64, 2, n, n)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return attend(q, k, v, dropout=0.5) > 0

    first = draw(1)
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))
    flat = first.float().flatten(1)
    agreement = torch.corrcoef(flat).fill_diagonal_(0).abs().max()
    assert agreement < 6 / math.sqrt(flat.shape[1])  # rows lie in different tiles: no two alike
    assert abs(first.float().mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask(lengths=torch.tensor([1, 2, 3])), "lengths has 3 rows, but the batch has 2"),
        (Mask(pattern=torch.ones(5, 4, dtype=torch.bool)), r"pattern \[5, 4\] does not fit"),
        (torch.ones(3, 3, dtype=torch.bool), "mask must be a Mask, not Tensor"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(mask: Mask, message: str) -> None:
    q = torch.randn(2, 2, 3, 4)
    with pytest.raises(ValueError, match=message):
        attend(q, q, q, mask)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 4), (2, 3, 4), (2, 3, 4)), r"must be \[batch, heads, length, dim\]"),
        (((2, 4, 3, 8), (2, 4, 3, 9), (2, 4, 3, 8)), r"expected \[2, heads, length, 8\]"),
        (((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 6, 8)), r"expected \[2, 4, 5, dim\]"),
        (((2, 4, 3, 8), (2, 3, 5, 8), (2, 3, 5, 8)), "4 query heads cannot share 3 key heads"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(*(torch.randn(shape) for shape in shapes))


def test_a_bias_that_does_not_fit_is_named() -> None:
    q = torch.randn(2, 2, 3, 4)
    with pytest.raises(ValueError, match=r"bias \[3, 3\] does not broadcast to \[2, 2, 3, 3\]"):
        attend(q, q, q, bias=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="floating point"):
        attend(q, q, q, bias=torch.ones(1, 1, 3, 3, dtype=torch.bool))
    for p in (1.0, -0.5):
        with pytest.raises(ValueError, match="dropout must be at least 0 and less than 1"):
            attend(q, q, q, dropout=p)


def test_the_rule_takes_torch_for_long_plain_attention_and_tiles_for_the_rest() -> None:
    short, long = torch.empty(1, 1, 16, 8), torch.empty(1, 1, 4096, 8)
    assert pick(short, short, short, None, None, 0.0) == "tiled"
    assert pick(long, long, long, None, None, 0.0) == "sdpa"
    assert pick(long, long, long, Mask(causal=True), None, 0.0) == "sdpa"
    for mask, dropout in ((Mask(causal=True, window=8), 0.0), (Mask(causal=True), 0.1)):
        assert pick(long, long, long, mask, None, dropout) == "tiled"
    middle, many = torch.empty(1, 1, 512, 8), torch.empty(0).expand(4096, 1, 512, 0)  # too many weights to keep
    for mask in (None, Mask(causal=True)):
        assert pick(middle, middle, middle, mask, None, 0.0) == "tiled"
        assert pick(many, many, many, mask, None, 0.0) == "sdpa"


@pytest.mark.parametrize(
    "mask", [Mask(causal=True, window=64), Mask(causal=True), Mask(segments=torch.arange(2048)[None] // 64)]
)
def test_no_matrix_is_made_for_causal_window_and_packed(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    n, sizes = 2048, []
    made: Callable[..., Tensor] = Mask.tile

    def tile(self: Mask, *args: object) -> Tensor:
        matrix = made(self, *args)
        sizes.append(matrix.numel())
        return matrix

    monkeypatch.setattr(Mask, "tile", tile)
    q = torch.randn(1, 2, n, 8, requires_grad=True)
    attend(q, q, q, mask).sum().backward()
    assert max(sizes, default=0) <= n * n / 8


def test_a_mask_used_again_answers_the_question_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mask remembers is right for the same question only: another length, dtype or part is another one."""
    made, asked = Mask.tile, []

    def tile(self: Mask, *args: object) -> Tensor:
        asked.append(args)
        return made(self, *args)

    monkeypatch.setattr(Mask, "tile", tile)
    mask = Mask(causal=True, lengths=torch.tensor([3, 2]))
    for n, dtype in ((3, torch.float32), (5, torch.float32), (5, torch.float64), (3, torch.float32)):
        q = torch.randn(2, 1, n, 4, dtype=dtype)
        torch.testing.assert_close(attend(q, q, q, mask), attention.reference(q, q, q, mask, None, None, 0.0))
    q = torch.randn(2, 1, 4, 4)
    attend(q, q, q, mask)
    before = len(asked)
    attend(q, q, q, mask)
    assert len(asked) == before
