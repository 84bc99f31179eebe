"""Compiled passes over rows: the formulas of torch, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kernels.test_steady import threads
from weft.kernels import native, rows
from weft.kernels.compiled import compiled, functions
from weft.kernels.dropout import dropout, keep_mask, keep_rate
from weft.layers.blocks import BlockConfig, DecoderBlock
from weft.layers.norms import LayerNorm, RMSNorm

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": F.silu,
}
WIDTHS = [1, 7, 16, 100, 128]  # less than a vector, whole vectors, and some more


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with compiled("rows"):
        yield


def found(f: Callable[..., Tensor], inputs: list[Tensor], by: Tensor) -> list[Tensor]:
    """What f gives and the gradients of its inputs, in fp64."""
    out = f(*inputs)
    return [x.double() for x in (out, *torch.autograd.grad((out * by.to(out.dtype)).sum(), inputs))]


def agree(mine: list[Tensor], plain: list[Tensor], narrow: bool) -> None:
    """bf16 is rounded once: half a step of 1/128 of the number."""
    tolerance = {"rtol": 2**-8, "atol": 1e-5} if narrow else {"rtol": 1e-5, "atol": 1e-5}
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
def test_norms_are_torchs(dtype: torch.dtype, width: int, kind: str) -> None:
    eps = 1e-3
    norm = RMSNorm(width, eps=eps) if kind == "rms" else LayerNorm(width, eps=eps, bias=kind == "layer")
    for p in norm.parameters():
        nn.init.normal_(p)
    parameters = list(norm.parameters())
    x = (2 * torch.randn(3, 70, width) + 1).to(dtype).requires_grad_()  # more rows than are summed at once
    by = torch.randn(3, 70, width).to(dtype)
    assert rows.serves_norm(x, norm.weight, None)
    mine = found(lambda x, *_: norm(x), [x, *parameters], by)
    wide = [part.detach().double().requires_grad_() for part in (x, *parameters)]
    if kind == "rms":
        plain = found(lambda x, w: F.rms_norm(x, (width,), w, eps), wide, by)
    else:
        plain = found(lambda x, w, b=None: F.layer_norm(x, (width,), w, b, eps), wide, by)
    agree(mine, plain, dtype == torch.bfloat16)
    assert mine[0].shape == x.shape


def test_gains_of_bf16_are_summed_in_fp32() -> None:
    """Of torch's LayerNorm they are not: its sums over many rows stop growing."""
    norm, x = LayerNorm(8), torch.randn(4096, 8).bfloat16()
    (mine,) = torch.autograd.grad(norm(x).sum(), [norm.bias])
    assert (mine == 4096).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 16, 5000, 40_000])
@pytest.mark.parametrize("activation", rows.ACTIVATIONS)
def test_activations_are_torchs(dtype: torch.dtype, count: int, activation: str) -> None:
    f = FORMULAS[activation]
    x, by, grad = ((4 * torch.randn(count)).to(dtype).requires_grad_() for _ in range(3))
    wide = [part.detach().double().requires_grad_() for part in (x, by)]
    narrow = dtype == torch.bfloat16
    agree(
        found(lambda x: rows.activated(x, None, activation), [x], grad.detach()),
        found(f, wide[:1], grad.detach()),
        narrow,
    )
    agree(
        found(lambda x, by: rows.activated(x, by, activation), [x, by], grad.detach()),
        found(lambda x, by: f(x) * by, wide, grad.detach()),
        narrow,
    )


@pytest.mark.parametrize("activation", rows.ACTIVATIONS)
def test_activations_of_what_is_far_out(activation: str) -> None:
    x = torch.tensor([-1e4, -100.0, -20.0, -0.0, 0.0, 20.0, 100.0, 1e4], requires_grad=True)
    torch.testing.assert_close(rows.activated(x, None, activation), FORMULAS[activation](x), atol=1e-6, rtol=1e-6)
    mine, plain = (
        torch.autograd.grad(f(x).sum(), [x])[0]
        for f in (lambda x: rows.activated(x, None, activation), FORMULAS[activation])
    )
    torch.testing.assert_close(mine, plain, atol=1e-6, rtol=1e-6)
    assert rows.activated(torch.tensor([torch.nan, 1.0]), None, activation)[0].isnan()


# Counts that end inside a word, inside a vector, and beyond what is hashed at a time.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 33, 4099, 700_001])
@pytest.mark.parametrize("p", [0.3, 1e-7])
def test_dropout_is_the_references(dtype: torch.dtype, count: int, p: float) -> None:
    x, onto = (torch.randn(count).to(dtype).requires_grad_() for _ in range(2))
    by = torch.randn(count).to(dtype)
    torch.manual_seed(5)
    mine = found(lambda x, onto: dropout(x, p, onto=onto), [x, onto], by)
    torch.manual_seed(5)
    key = int(torch.empty((), dtype=torch.int64).random_(-(2**63), None))
    kept = keep_mask((count,), p, key, dtype=torch.float64) / keep_rate(p)
    wide = [part.detach().double().requires_grad_() for part in (x, onto)]
    agree(mine, found(lambda x, onto: x * kept + onto, wide, by), dtype == torch.bfloat16)
    torch.manual_seed(5)
    agree([dropout(x, p).double()], [wide[0] * kept], dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    config = BlockConfig(dim=48, num_heads=4, ffn_dim=100, activation="swiglu", dropout=0.2, ffn_dropout=0.1)
    block = DecoderBlock(config)
    x, memory = (torch.randn(7, 33, 48).to(dtype).requires_grad_() for _ in range(2))
    norms = list(block.around_attention.parameters())
    results = []
    for count in (1, 2, 3):
        with threads(count):
            torch.manual_seed(1)
            y = block.around_attention(x, lambda y: rows.activated(y, memory, "gelu"))
            results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, memory, *norms])])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def test_what_lies_apart_in_memory() -> None:
    x = torch.randn(6, 20, 12).transpose(0, 1).requires_grad_()
    norm = LayerNorm(12)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (12,), norm.weight, norm.bias))
    torch.testing.assert_close(rows.activated(x, x.flip(0), "gelu"), F.gelu(x) * x.flip(0))
    (grad,) = torch.autograd.grad(norm(x).transpose(0, 1).cumsum(0).sum(), [x])
    (plain,) = torch.autograd.grad(F.layer_norm(x, (12,)).transpose(0, 1).cumsum(0).sum(), [x])
    torch.testing.assert_close(grad, plain, atol=1e-5, rtol=1e-5)


def test_nothing_is_no_problem() -> None:
    for shape in ((0, 5), (2, 0, 5)):
        x = torch.randn(shape, requires_grad=True)
        assert LayerNorm(5)(x).shape == rows.activated(x, None, "gelu").shape == dropout(x, 0.5).shape == x.shape
        (grad,) = torch.autograd.grad(LayerNorm(5)(x).sum(), [x])
        assert grad.shape == x.shape


def test_sums_of_bf16_in_fp32() -> None:
    for x in (torch.randn(37, 5).bfloat16(), torch.randn(5, 37).bfloat16().t(), torch.randn(37, 5)):
        for total in (torch.randn(37, 5), torch.randn(5, 37).t()):
            expected = total + x.float()
            rows.add(total, x)
            assert torch.equal(total, expected)


@pytest.mark.parametrize("norm", [LayerNorm(8), RMSNorm(8, eps=1e-5)])
@pytest.mark.parametrize("width", [4, 16])
def test_a_norm_of_another_width_is_told_and_not_read_beyond_its_end(norm: nn.Module, width: int) -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(torch.randn(3, width))


@pytest.mark.parametrize("width", [20, 100, 128, 300])
@pytest.mark.parametrize("centre", [1e3 + 0.1, 3e4])
def test_a_norm_of_what_is_far_from_zero(width: int, centre: float) -> None:
    norm, rounding = LayerNorm(width), centre * 2**-22
    x = centre + torch.randn(40, width)
    torch.testing.assert_close(norm(x).double(), F.layer_norm(x.double(), (width,)), atol=8 * rounding, rtol=1e-3)
    alike = norm(torch.full((40, width), centre))  # but for the rounding of their mean nothing is left
    assert float(alike.detach().abs().max()) <= rounding / norm.eps**0.5


@pytest.mark.parametrize("norm", [LayerNorm(8, elementwise_affine=False), LayerNorm(8)])
def test_a_norm_without_gains_or_with_gains_that_lie_apart(norm: LayerNorm) -> None:
    if norm.elementwise_affine:
        norm.weight = nn.Parameter(torch.randn(16)[::2])
    assert not rows.serves_norm(torch.randn(3, 8), norm.weight, norm.bias)
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias))


def test_what_torch_compiles_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows.serves(torch.randn(4))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not rows.serves(torch.randn(4))


def test_blocks_of_several_threads_may_end_in_any_order() -> None:
    with compiled():
        first, second = compiled("rows"), compiled("rows", "losses")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert functions("losses") is not None
        second.__exit__(None, None, None)
        assert functions("rows") is None
    assert functions("rows") is not None


def test_what_is_of_another_shape_is_left_to_torch() -> None:
    assert rows.serves(torch.randn(4, 8), torch.randn(4, 8))
    assert not rows.serves(torch.randn(4, 8), torch.randn(8))
    assert not rows.serves_norm(torch.randn(4, 8), torch.ones(8), torch.zeros(4))


def test_other_types_and_the_outside_are_torchs() -> None:
    x = torch.randn(3, 4)
    assert rows.serves(x)
    assert rows.serves(x, None)
    assert not rows.serves(x.double())
    assert not rows.serves(x, x.bfloat16())
    assert not rows.serves_norm(x, torch.ones(4).double(), None)
    with compiled():
        assert not rows.serves(x)
