"""Compiled attention: the formula, its gradients, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.test_steady import threads
from weft.kernels import attention, heads, native
from weft.kernels.compiled import compiled
from weft.kernels.mask import Mask
from weft.layers.blocks import BlockConfig, EncoderBlock

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with compiled("attention"):
        yield


def projected(batch: int, num_heads: int, length: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Heads as a projection leaves them: [B, H, N, D], whose tokens stand H · D apart."""
    x = torch.randn(batch, length, num_heads, dim).to(dtype)
    return x.transpose(1, 2).requires_grad_()


def gradients(way: str, inputs: list[Tensor], mask: Mask | None, by: Tensor) -> list[Tensor]:
    """The output of a way and the gradients of its inputs, in fp32."""
    out = attention.WAYS[way](*inputs, mask, None, None, 0.0)
    return [x.float() for x in (out, *torch.autograd.grad((out * by).sum(), inputs))]


# Lengths around a block of 32 queries and a vector of keys, widths that fill vectors and that do not.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "m", "dim"), [(1, 1, 4), (7, 7, 32), (16, 16, 20), (33, 33, 64), (70, 70, 8), (5, 40, 16)]
)
@pytest.mark.parametrize("kind", ["open", "causal", "lengths", "both"])
@pytest.mark.parametrize(("num_heads", "groups"), [(2, 2), (4, 2), (3, 1)])
def test_values_and_gradients_are_the_formulas(
    dtype: torch.dtype, n: int, m: int, dim: int, kind: str, num_heads: int, groups: int
) -> None:
    batch = 4
    q = projected(batch, num_heads, n, dim, dtype)
    k, v = (projected(batch, groups, m, dim, dtype) for _ in range(2))
    lengths = (
        torch.tensor([m, max(1, m // 2), 0, 1]) if kind in ("lengths", "both") else None
    )  # one sees nothing at all
    mask = None if kind == "open" else Mask(causal=kind in ("causal", "both"), lengths=lengths)
    by = torch.randn(batch, num_heads, n, dim).to(dtype)
    assert heads.serves(q, k, v, mask)
    found, wanted = (gradients(way, [q, k, v], mask, by) for way in ("compiled", "reference"))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for mine, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, plain, **tolerance)


# Lengths at which a row's decisions begin inside a word, and sizes with more words than are drawn at a time.
@pytest.mark.parametrize(("batch", "n", "m"), [(2, 5, 5), (3, 33, 35), (2, 40, 64), (150, 64, 61)])
@pytest.mark.parametrize("causal", [True, False])
def test_dropout_is_the_references(batch: int, n: int, m: int, causal: bool) -> None:
    q = projected(batch, 2, n, 8, torch.float32)
    k, v = (projected(batch, 2, m, 8, torch.float32) for _ in range(2))
    by, found = torch.randn(batch, 2, n, 8), []
    for way in ("compiled", "reference"):
        torch.manual_seed(3)
        out = attention.WAYS[way](q, k, v, Mask(causal=causal), None, None, 0.3)
        found.append([out, *torch.autograd.grad((out * by).sum(), [q, k, v])])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "dim"), [(16, 32), (100, 20), (256, 64)])
def test_bf16_is_as_near_to_the_truth_as_torchs(length: int, dim: int) -> None:
    inputs = [projected(3, 2, length, dim, torch.bfloat16) for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    by = torch.randn(3, 2, length, dim).bfloat16()

    def torchs(*inputs: Tensor) -> list[Tensor]:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return [out, *torch.autograd.grad(out, inputs, by.to(out.dtype))]

    found, peer, truth = gradients("compiled", inputs, Mask(causal=True), by), torchs(*inputs), torchs(*wide)
    for mine, other, exact in zip(found, peer, truth, strict=True):
        far, others_far = ((x.double() - exact).norm() / exact.norm() for x in (mine, other))
        assert far <= max(1.5 * others_far, 3e-3)


def test_threads_and_company_change_no_bit() -> None:
    inputs = [projected(6, 2, 19, 24, torch.float32) for _ in range(3)]
    by, lengths = torch.randn(6, 2, 19, 24), torch.tensor([19, 3, 7, 19, 1, 12])
    found = []
    for count in (1, 2):
        with threads(count):
            found.append(gradients("compiled", inputs, Mask(lengths=lengths), by))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    alone = gradients("compiled", [x[2:3] for x in inputs], Mask(lengths=lengths[2:3]), by[2:3])
    for whole, part in zip(found[0], alone, strict=True):
        assert torch.equal(whole[2:3], part)


def test_what_comes_out_stands_as_the_output_layer_reads_it() -> None:
    q, k, v = (projected(2, 3, 5, 8, torch.float32) for _ in range(3))
    out = attention.attend(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert all(grad.transpose(1, 2).is_contiguous() for grad in torch.autograd.grad(out.sum(), [q, k, v]))


def test_the_rule_takes_it_where_it_serves_and_only_where_it_was_chosen() -> None:
    x = torch.randn(2, 2, 16, 8)
    for mask in (None, Mask(causal=True), Mask(lengths=torch.tensor([3, 16]))):
        assert attention.pick(x, x, x, mask, None, 0.0) == "compiled"
    for mask in (
        Mask(causal=True, window=3),
        Mask(pattern=torch.ones(16, 16, dtype=torch.bool)),
        Mask(causal=True, offset=1),
    ):
        assert attention.pick(x, x, x, mask, None, 0.0) == "tiled"
    assert attention.pick(x, x, x, None, torch.zeros(1, 1, 16, 16), 0.0) == "tiled"
    assert attention.pick(x, x, x, None, None, 0.1) == "compiled"
    assert attention.pick(x.double(), x.double(), x.double(), None, None, 0.0) == "tiled"
    assert attention.pick(x, x, x.transpose(2, 3).contiguous().transpose(2, 3), None, None, 0.0) == "tiled"
    with compiled():
        assert attention.pick(x, x, x, None, None, 0.0) == "tiled"


def test_a_block_trains_as_with_torch() -> None:
    block, x = EncoderBlock(BlockConfig(dim=32, num_heads=4, ffn_dim=64)), torch.randn(3, 11, 32)
    mask, found = Mask(causal=True), []
    for kinds in (("attention",), ()):
        with compiled(*kinds):
            block.zero_grad()
            block(x, mask).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None])
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-4)


WITHOUT_MEMORY = """
import resource, torch
from weft.kernels import heads, native
from weft.kernels.compiled import compiled
assert native.library() is not None
torch.set_num_threads(2)
keys = torch.zeros(2, 1, 1, 64).expand(2, 1, 500_000, 64)
with compiled("attention"):
    heads.attend(*[torch.ones(2, 1, 2, 64)] * 3, None, 1.0)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
    try:
        heads.attend(torch.ones(2, 1, 2, 64), keys, keys, None, 1.0)
    except MemoryError as error:
        print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells how much is in use")
def test_a_lack_of_memory_is_an_error_and_not_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "out of memory in a compiled operation\n"), done.stderr
