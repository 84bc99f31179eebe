"""Whole sub-layers of training, compiled: x + dropout(f(norm(x))), as many as follow each other in one call.

f is a feed-forward or self-attention. Piece by piece (linear.py, heads.py, rows.py) each of them is some ten calls of
torch and as many functions of autograd, which take as long as the work itself where models are small; and all that
goes from one piece to the next goes through memory. Here some sequences at a time pass through all of it, products
too, while they are in the cache of the core that they began on.

For sub-layers with the norm in front. Sums are in fp32; what one piece hands to the next is rounded as the pieces do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.compiled import enough_memory, functions, multiplies
from weft.kernels.dropout import draw_key, keep_bound, keep_rate
from weft.kernels.heads import MOST, described, is_simple, lengths_of
from weft.kernels.mask import Mask, check_mask
from weft.kernels.native.structures import Drop, Joined, Norming, Sublayer
from weft.kernels.plain import is_plain
from weft.kernels.rows import ACTIVATIONS
from weft.kernels.steady import is_steady

_WHOLE = 16  # all widths are multiples of this: of the numbers of the widest vector
_LARGEST = 1 << 24  # entries of a sub-layer's matrices, at most: up to half as many it was faster than the pieces

Layer = tuple[Tensor, Tensor | None]  # weight [E, D], bias [E]


class Norm(NamedTuple):
    """LayerNorm, or RMSNorm if not ``centred``."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


class Heads(NamedTuple):
    """Self-attention between queries, keys and values, which stand side by side.

    Attributes:
        heads, groups, dim: of queries, of keys and values, and of one of them.
        mask: causality and padding, or nothing.
        dropout: of the weights.
        turns: cos and sin [N, dim / 2] by which queries and keys are turned; None: they are not.
        pairs: whether neighbours are turned together, and not halves.
    """

    heads: int
    groups: int
    dim: int
    mask: Mask
    dropout: float
    turns: tuple[Tensor, Tensor] | None = None
    pairs: bool = False


class SubLayer(NamedTuple):
    """x + dropout(last(f(first(norm(x))))).

    Attributes:
        norm: in front.
        first: layers of the normed x: of queries, keys and values; or one; or two, of which f of the second opens what
            the first gives.
        last: the layer back to the width of x.
        inside: f: attention, or one of ``ACTIVATIONS``.
        dropout: of what is added.
    """

    norm: Norm
    first: Sequence[Layer]
    last: Layer
    inside: Heads | str
    dropout: float

    def parameters(self) -> tuple[Tensor | None, ...]:
        """Of the norm; the weights and then the biases of the first layers; of the last."""
        return *self.norm[:2], *(weight for weight, _ in self.first), *(bias for _, bias in self.first), *self.last


def wanted() -> bool:
    """Whether there are compiled sub-layers here at all."""
    return functions("sublayers") is not None and not (is_plain() or is_steady() or torch.is_autocast_enabled("cpu"))


def serves(x: Tensor, sublayers: Sequence[SubLayer]) -> bool:
    """Whether these sub-layers of x [B, N, D] are compiled ones here.

    Raises:
        ValueError: if a mask does not fit.
    """
    if not wanted() or x.dim() != 3 or not x.numel():
        return False
    return multiplies(x.dtype) and x.device.type == "cpu" and all(_fits(one, x) for one in sublayers)


def _fits(one: SubLayer, x: Tensor) -> bool:
    inside, (b, n, dim) = one.inside, x.shape
    outs, (back, inner) = [weight.shape[0] for weight, _ in one.first], one.last[0].shape
    if isinstance(inside, Heads):
        check_mask(inside.mask, b, inside.heads, n, n)
        expected = [inside.heads * inside.dim, *[inside.groups * inside.dim] * 2]
        turned = inside.turns is None or all(turn.shape == (n, inside.dim // 2) for turn in inside.turns)
        if n * n > MOST or not is_simple(inside.mask) or not turned or inside.dropout >= 1.0:
            return False
    else:
        expected = [inner] * (2 if inside == "swiglu" else 1)
    if outs != expected or inner != outs[0] or one.dropout >= 1.0:
        return False
    for p in one.parameters():
        if p is not None and not (p.dtype is torch.float32 and p.is_cpu and p.is_contiguous()):
            return False
    fits = one.norm.weight.shape == (dim,) and back == dim and all(weight.shape[1] == dim for weight, _ in one.first)
    fits = fits and len({bias is None for _, bias in one.first}) == 1
    return fits and all(n % _WHOLE == 0 for n in (dim, inner, *outs)) and dim * (sum(outs) + inner) <= _LARGEST


def through(x: Tensor, sublayers: Sequence[SubLayer]) -> Tensor:
    """x [B, N, D] through one after the other. Only for what this ``serves``."""
    if len(sublayers) > 1 and not torch.is_grad_enabled():  # then none needs to leave anything for the way back
        for one in sublayers:
            x = through(x, [one])
        return x
    plans = [_Plan.of(one) for one in sublayers]
    parameters = chain.from_iterable(one.parameters() for one in sublayers)
    y: Tensor = _Through.apply(x.contiguous(), plans, *parameters)  # type: ignore[no-untyped-call]
    return y


class _Plan(NamedTuple):
    """What is to be done in a sub-layer besides its parameters."""

    inside: Heads | str
    outs: list[int]  # of the first layers
    inner: int  # of what the last takes
    eps: float
    centred: bool
    dropout: float
    keys: tuple[int, int]  # of what is dropped: of attention's weights, of what is added

    @classmethod
    def of(cls, one: SubLayer) -> _Plan:
        """Draws the keys, in the order in which the pieces do."""
        weights = draw_key() if isinstance(one.inside, Heads) and one.inside.dropout else 0
        keys = weights, draw_key() if one.dropout else 0
        outs = [weight.shape[0] for weight, _ in one.first]
        return cls(one.inside, outs, one.last[0].shape[1], one.norm.eps, one.norm.centred, one.dropout, keys)

    def sizes(self, dim: int) -> list[int]:
        """Of the gradients, as they stand one behind the other: whether there are biases or not."""
        return [*(out * dim for out in self.outs), *self.outs, dim * self.inner, dim, dim, dim]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plans: list[_Plan], *parameters: Tensor | None) -> Tensor:
        rows, dim = x.shape[0] * x.shape[1], x.shape[2]
        spreads = x.new_empty(len(plans), rows, 2, dtype=torch.float32)
        kept = x.new_empty(rows * sum(dim + sum(plan.outs) + plan.inner for plan in plans) - rows * dim)
        y = torch.empty_like(x)
        told, alive = _told(x, plans, parameters, spreads, kept)
        told[-1].y = y.data_ptr()
        _library().weft_sublayers(told, len(plans), False, torch.get_num_threads())
        ctx.save_for_backward(x, spreads, kept, *parameters)
        ctx.plans, ctx.shapes = plans, [_shape(p) for p in parameters]
        ctx.told, ctx.places = (told, alive), _places(x, spreads, kept, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # whoever differentiates twice shall be told, though nothing before this depended on anything
        grad = grad.detach().requires_grad_() if torch.is_grad_enabled() and not grad.requires_grad else grad
        found: tuple[Tensor | None, ...] = _Through._back(ctx, grad)
        return found

    @staticmethod
    @once_differentiable
    def _back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, spreads, kept, *parameters = ctx.saved_tensors
        if [_shape(p) for p in parameters] != ctx.shapes:  # `.data` of another shape, which autograd does not see
            raise RuntimeError("a parameter has another shape than in the forward pass")
        plans, dim = ctx.plans, x.shape[2]
        told, alive = ctx.told
        if _places(x, spreads, kept, *parameters) != ctx.places:  # moved, by hooks for what is saved, or by hand
            told, alive = _told(x, plans, parameters, spreads, kept)
        sizes = [size for plan in plans for size in plan.sizes(dim)]
        gradients, dx = spreads.new_empty(sum(sizes)), torch.empty_like(x)
        between = x.new_empty(2 if len(plans) > 1 else 0, x.numel())  # gradients on the way, in turn
        given, at = grad.contiguous(), gradients.data_ptr()
        ends = list(accumulate(sum(plan.sizes(dim)) for plan in plans))
        for i, one in enumerate(told):
            one.grad = given.data_ptr() if i + 1 == len(plans) else between[(i + 1) % 2].data_ptr()
            one.dx = between[i % 2].data_ptr() if i else dx.data_ptr()
            one.gradients = at + 4 * (ends[i - 1] if i else 0)
        _library().weft_sublayers(told, len(plans), True, torch.get_num_threads())
        del alive
        parts, found = iter(gradients.split(sizes)), []
        for plan in plans:
            weights, biases = ([next(parts) for _ in plan.outs] for _ in range(2))
            last, last_bias, gain, bias = (next(parts) for _ in range(4))
            found += [gain, bias, *(weight.view(-1, dim) for weight in weights), *biases]
            found += [last.view(dim, plan.inner), last_bias]
        return dx, None, *(None if p is None else g for p, g in zip(parameters, found, strict=True))


def _places(*tensors: Tensor | None) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


def _told(
    x: Tensor,
    plans: Sequence[_Plan],
    parameters: Sequence[Tensor | None],
    spreads: Tensor,
    kept: Tensor,
) -> tuple[ctypes.Array[Sublayer], list[Tensor]]:
    """What the library is told of each sub-layer, and what must live until it has done it.

    ``kept`` has what each leaves for the way back: what the first layers gave, what the last took, and, but for the
    last sub-layer, what came out, for which nobody asks on the way back.
    """
    (b, n, dim), narrow, given = x.shape, x.dtype == torch.bfloat16, iter(parameters)
    rows, size = b * n, x.element_size()
    told, alive = (Sublayer * len(plans))(), list[Tensor]()
    at, begin, stats = kept.data_ptr(), x.data_ptr(), spreads.data_ptr()
    for i, (one, plan) in enumerate(zip(told, plans, strict=True)):
        count, wide = len(plan.outs), sum(plan.outs)
        gain, bias = next(given), next(given)
        weights, biases = ([next(given) for _ in range(count)] for _ in range(2))
        one.norm = Norming(begin, _at(gain), _at(bias), stats + 8 * rows * i, rows, dim, plan.eps, plan.centred, narrow)
        one.first = _joined(weights, biases, plan.outs, dim)
        one.last = _joined([next(given)], [next(given)], [dim], plan.inner)
        one.length, one.between, one.inside = n, at, at + size * rows * wide
        at = one.inside + size * rows * plan.inner
        begin = one.y = at
        at += size * rows * dim
        if plan.dropout:
            bound, rate = keep_bound(plan.dropout), keep_rate(plan.dropout)
            one.drop = Drop(plan.keys[1] % 2**64, rows * dim, bound, 1.0 / rate)
        if not isinstance(heads := plan.inside, Heads):
            one.activation = ACTIVATIONS.index(heads)
            continue
        sizes, mask = (b, heads.heads, heads.groups, n, n, heads.dim), heads.mask
        one.attention = described(sizes, narrow, heads.dim**-0.5, mask, heads.dropout, plan.keys[0])
        if (lengths := lengths_of(mask, b)) is not None:
            alive.append(lengths)
            one.attention.lengths = lengths.data_ptr()
        if heads.turns is not None:
            turns = [turn.float().contiguous() for turn in heads.turns]
            alive += turns
            one.cos, one.sin, one.pairs = turns[0].data_ptr(), turns[1].data_ptr(), heads.pairs
    return told, alive


def _joined(
    weights: Sequence[Tensor | None], biases: Sequence[Tensor | None], outs: Sequence[int], inputs: int
) -> Joined:
    return Joined(tuple(map(_at, weights)), tuple(map(_at, biases)), tuple(outs), inputs)


def _shape(x: Tensor | None) -> torch.Size | None:
    return None if x is None else x.shape


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@cache
def _library() -> ctypes.CDLL:
    found = functions("sublayers")
    assert found is not None
    found.weft_sublayers.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 3]
    found.weft_sublayers.restype, found.weft_sublayers.errcheck = ctypes.c_int32, enough_memory
    return found
