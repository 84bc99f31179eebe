"""Same answer in any company: a mode in which a row's results do not depend on the other rows of its batch.

A sum of floating-point numbers depends on its order, and the order in which a CPU's matrix product sums depends on
the shape of the whole: a sentence translated beside others gets other bits than alone, and now and then
another word. Inside ``steady()`` a row's logits are bit-equal whichever rows stand beside it, in which order, and
however far the longest of them pads it: for the same weights, precision, thread count, machine and torch. For that,

    linear       products have 16 rows, or another height that gives the same bits on this machine (``by_rows``)
    attention    products have 32 keys, and 32 queries or one; what blocks of keys give is added in their order
    activations  sigmoid, silu and gelu are made of exp, tanh and erf, which treat the end of a tensor as its middle

What else a block does (norms, softmax over a padded length, sums, exp, tanh) has been found independent of company.
One query has other bits than the same query among several: to go step by step or at once is not a matter of company.

Measured with torch 2.13 and MKL in fp32: on an AVX2 CPU a row has bits of its own in a product of 1 to 3 rows (with 2
threads also of 5 to 7 and 9 to 11) and the same bits in all others; on an AVX-512 CPU in up to 8 rows, and at depth
2,048 in nearly any number. Scores of 16 keys and of 32 have different bits, and so has a sum over 192 keys with 64
zeros added to it. Where a vector starts in memory counts, too.

On that AVX2 CPU and one thread, a step of a Transformer with its logits takes 0.9 to 1.1 of its plain time for 5 to
320 rows and 1.35 for one, which is multiplied as four; to encode 64 short sentences 1.1 (dim 512) to 1.4 (dim 128).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.mask import Mask

ROWS = 16  # the height of a product, unless another is found to give the same bits
TALLEST = 512  # rows in one product; more at once are hardly faster
KEYS = 32  # positions are padded to a multiple of this; 64 would have twice the keys to read for short sentences
DEPTH = 16  # and vectors to a multiple of this, 64 bytes in fp32
ALIGNED = 64  # bytes, as torch allocates

_steady: ContextVar[bool] = ContextVar("weft_steady", default=False)


@contextmanager
def steady(on: bool = True) -> Iterator[None]:
    """Inside, a row's results do not depend on the other rows of its batch; with ``on=False``, inside that, they may.

    What torch.compile made runs eagerly in the block, since a compiled product has bits of its own.
    """
    token = _steady.set(on)
    try:
        # Importing the compiler takes seconds; where nobody has, nothing is compiled.
        compiled = on and "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        _steady.reset(token)


def is_steady() -> bool:
    """Whether this runs inside ``steady()``."""
    return not torch.compiler.is_compiling() and _steady.get()


def pad_length(n: int) -> int:
    """How long n positions are in steady mode: the next multiple of 32, and 32 at least."""
    return _multiple(max(n, 1), KEYS)


def padded(x: Tensor, dim: int) -> Tensor:
    """x with zeros behind the end of ``dim``, to ``pad_length`` of it."""
    return grown(x, dim, pad_length(x.shape[dim]))


def grown(x: Tensor, dim: int, length: int) -> Tensor:
    """x with zeros (False) behind the end of ``dim``, to this length."""
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, missing)) if missing else x


def _multiple(n: int, of: int) -> int:
    """n, or the next multiple."""
    return -(-n // of) * of


class Product(NamedTuple):
    """What the order of the sums in x Wᵀ may depend on, besides the number of x's rows."""

    shape: tuple[int, ...]  # of W [E, D]
    stride: tuple[int, ...]
    offset: int  # of W from an aligned address
    dtype: torch.dtype
    bias: bool
    threads: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Product:
        """The product with this weight."""
        offset = weight.data_ptr() % ALIGNED // weight.element_size()
        threads = torch.get_num_threads()
        return cls(weight.shape, weight.stride(), offset, weight.dtype, bias is not None, threads)


def by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, x [..., D] times weight [E, D] transposed plus bias [E], in which a row does not depend on the others.

    Each row has the bits that it has in a product of 16 rows. Where this machine gives the same bits in a product of
    another height, one that suits the number of rows is taken.
    """
    if not (x.numel() and weight.numel()) or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    weight = grown_depth(weight)
    n, product = x.numel() // x.shape[-1], Product.of(weight, bias)
    height = _height(min(n, TALLEST), product)
    if height == n and x.dim() > 1 and is_aligned(x):
        return F.linear(x, weight, bias)
    rows = aligned(x.reshape(n, -1))
    if n > TALLEST:
        y = torch.cat([by_rows(part, weight, bias) for part in rows.split(TALLEST)])
    elif n > height:
        tiles = grown(rows, 0, _multiple(n, height)).split(height)
        y = torch.cat([F.linear(tile, weight, bias) for tile in tiles])[:n]
    else:
        y = F.linear(grown(rows, 0, height), weight, bias)[:n]
    return y.view(*x.shape[:-1], -1)


def aligned(x: Tensor) -> Tensor:
    """x [..., D] with zeros behind its last dimension, to a multiple of 16, and contiguous from an aligned address.

    Products that load by fours sum a vector that starts between two loads in another order.
    """
    x = grown_depth(x)
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Whether all vectors of x [..., D] start at aligned addresses, one behind the other."""
    return x.is_contiguous() and not x.shape[-1] % DEPTH and not x.data_ptr() % ALIGNED


def grown_depth(x: Tensor) -> Tensor:
    """x [..., D] with zeros behind its last dimension, to a multiple of 16."""
    return grown(x, -1, _multiple(x.shape[-1], DEPTH))


@cache
def _height(n: int, product: Product) -> int:
    """How high the products are in which n rows are multiplied."""
    if n <= ROWS:
        heights = [n, _multiple(n, 4)]
    else:
        heights = [_multiple(n, 1 << (n - 1).bit_length() - 3)]  # an eighth more at most; few heights are to be tried
    return next((height for height in heights if _agrees(height, product)), ROWS)


@cache
def _agrees(height: int, product: Product) -> bool:
    """Whether this machine gives each row of a product of this height the bits that it has in one of 16 rows.

    It is tried on random numbers of which pairs cancel. All that is left is what was rounded off on the way, which
    shows any other order of the sums, in bf16 too; a bias is as small as that, or it would hide it. A row with few
    numbers is tried several times.
    """
    random = torch.Generator().manual_seed(0)
    return height == ROWS or all(_agrees_once(height, product, random) for _ in range(-(-64 // product.shape[0])))


@torch.no_grad()
def _agrees_once(height: int, product: Product, random: torch.Generator) -> bool:
    (e, d), dtype = product.shape, product.dtype
    wide = torch.promote_types(dtype, torch.float32)
    x, rows = (torch.randn(n, d, generator=random, dtype=wide) for n in (height, min(e, 256)))
    one, other = torch.randperm(d, generator=random)[: d // 2 * 2].chunk(2)
    x[:, other], rows[:, other] = x[:, one], -rows[:, one]
    last = sum((n - 1) * step for n, step in zip(product.shape, product.stride, strict=True))
    memory = torch.zeros(product.offset + last + 1, dtype=dtype)
    weight = memory.as_strided(product.shape, product.stride, product.offset)
    weight.copy_(rows.repeat(-(-e // len(rows)), 1)[:e])
    bias = (8 * torch.finfo(wide).eps * torch.randn(e, generator=random)).to(dtype) if product.bias else None
    x = x.to(dtype)
    tiles = grown(x, 0, _multiple(height, ROWS)).split(ROWS)
    expected = torch.cat([F.linear(tile, weight, bias) for tile in tiles])[:height]
    return torch.equal(F.linear(x, weight, bias), expected)


def whole_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Mask | None, Tensor | None]:
    """What attention takes, with zeros behind the queries, unless there is only one, and behind the keys.

    The mask closes the keys that were not there. All layers of a model bring the same mask: it remembers the answer.
    """
    n, m = q.shape[2], k.shape[2]
    rows, keys = n if n <= 1 else pad_length(n), pad_length(m)
    if (rows, keys) != (n, m):
        q, k, v, mask = grown(q, 2, rows), grown(k, 2, keys), grown(v, 2, keys), mask or Mask()
        remembered = mask.memory.get((n, m))
        if remembered is None:
            allowed = F.pad(mask.dense(n, m, q.device), (0, keys - m))
            remembered = Mask(pattern=F.pad(allowed, (0, 0, 0, rows - n), value=True))
            mask.memory.clear()
            mask.memory[n, m] = remembered
        mask = remembered
        if bias is not None:
            for dim, length in ((2, rows), (3, keys)):
                bias = bias if bias.shape[dim] == 1 else grown(bias, dim, length)
    return grown_depth(q), grown_depth(k), grown_depth(v), mask, bias


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(−x)), as torch.sigmoid."""
    return _composed(x, torch.sigmoid, lambda x: (1.0 + (-x).exp()).reciprocal())


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), as F.silu."""
    return _composed(x, F.silu, lambda x: x / (1.0 + (-x).exp()))


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x), as F.gelu."""
    return _composed(x, F.gelu, lambda x: 0.5 * x * (1.0 + (x * 0.5**0.5).erf()))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh, as F.gelu(x, approximate="tanh")."""
    inner = (2.0 / torch.pi) ** 0.5
    return _composed(
        x,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1.0 + (inner * (x + 0.044715 * x * x * x)).tanh()),
    )


def _composed(x: Tensor, fused: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor]) -> Tensor:
    """The fused function, or in steady mode the formula, in fp32 at least.

    torch's fused functions take the numbers at the end of a tensor one by one, by other instructions than those in its
    middle: where a row ends up depends on how many rows there are.
    """
    if not is_steady():
        return fused(x)
    return formula(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
