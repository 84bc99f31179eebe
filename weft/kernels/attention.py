"""Attention: softmax(scale · q kᵀ + bias) v, where the mask allows it.

Four ways with one signature:

    reference   the formula, in torch's differentiable operations
    sdpa        torch's scaled_dot_product_attention
    tiled       the formula on tiles of rows × queries × the keys these queries may see; the weights of a tile
                are kept for the backward pass while they are few, and made again when they are many
    compiled    the formula in C++, a head of a row at a time (heads.py), where training has chosen it

``attend`` takes the one that ``pick`` names. ``attention_weights`` and ``vectors`` are what observers see.

In steady mode (see steady.py) the tiled way is taken whatever the size, with tiles of one query or 32, on whole blocks
of 32 keys: all is padded to that, and a block's product has one shape in any company.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels import heads
from weft.kernels.dropout import draw_key, keep_mask, keep_rate, scaled_product
from weft.kernels.machine import bf16_products
from weft.kernels.mask import Mask, check_mask, part
from weft.kernels.plain import is_plain
from weft.kernels.steady import KEYS, is_steady, whole_blocks

_EVERYTHING, _CAUSAL = Mask(), Mask(causal=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of q [B, H, N, D] over keys k [B, G, M, D] and values v [B, G, M, E]: [B, H, N, E].

    Args:
        q: queries; H is a multiple of G, and H/G neighbouring query heads share a key head.
        k: keys.
        v: values.
        mask: who may attend to whom; everybody to everything if None.
        bias: added to the scores, broadcast to [B, H, N, M]; −∞ closes a key as a mask does.
        scale: of the scores; 1/√D if None.
        dropout: probability that a weight is dropped.

    Returns:
        The weighted values; zeros for a query that may attend nowhere.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    check(q, k, v, mask, bias)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
    if is_steady() and q.device.type == "cpu":
        n, e, scale = q.shape[2], v.shape[3], _scale(q, scale)
        return tiled(*whole_blocks(q, k, v, mask, bias), scale, dropout)[:, :, :n, :e]
    way = "reference" if is_plain() else pick(q, k, v, mask, bias, dropout)
    return WAYS[way](q, k, v, mask, bias, scale, dropout)


def attention_weights(
    q: Tensor, k: Tensor, mask: Mask | None = None, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The weights [B, H, N, M] = softmax over the allowed keys of scale · q kᵀ + bias: the reference.

    They are computed, and given, in fp32 at least. A query that may attend nowhere gets weights of zero.
    """
    check(q, k, k, mask, bias)
    if is_steady() and q.device.type == "cpu" and not torch.is_grad_enabled():
        return _steady_weights(q, k, mask, bias, _scale(q, scale))
    mask, bias = _closed_by_bias(mask, bias)
    q, k = _wide(q), _wide(k).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(-2, -1) * _scale(q, scale)  # [B, H, N, M]
    if bias is not None:
        scores = scores + bias
    if mask is None or mask.open:
        return scores.softmax(-1)
    allowed = mask.dense(q.shape[2], k.shape[2], q.device)
    empty = ~allowed.any(-1, keepdim=True)  # left open for the softmax, which of nothing would be NaN
    weights = scores.masked_fill(~(allowed | empty), float("-inf")).softmax(-1)
    return weights.masked_fill(empty, 0.0)


def vectors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    bias: Tensor | None = None,
    scale: float | None = None,
    real: int | None = None,
) -> dict[str, Tensor]:
    """What ``attend`` works on, for an observer: weights are the softmax, where allowed, of scale · q kᵀ + bias.

    Of the keys the first ``real``, or all; mask and bias are written out for every row, where there are any.
    """
    (batch, _, n, _), m = q.shape, k.shape[2]
    found = {"queries": q, "keys": k[:, :, :real], "values": v[:, :, :real]}
    if mask is not None and not mask.open:
        found["allowed"] = mask.dense(n, m, q.device).expand(batch, -1, -1, -1)[..., :real]
    if bias is not None:
        found["bias"] = bias.expand(batch, -1, -1, m)[..., :real]
    return {**found, "scale": torch.tensor(_scale(q, scale))}


def pick(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, dropout: float) -> str:
    """The rule: which way is fastest here. Measured by ``python -m benchmarks.kernels`` (docs/results.md).

    torch's kernel needs the mask as a matrix unless it is plain causality, and under dropout or another width of
    values it is the plain formula: then tiles. Otherwise it has a high cost per head, which long sequences
    repay: tiles take half its time at length 16 (19.6 and 39.9 ms for 1024×8 heads) and about the same from 1,024 on
    (76 and 69 ms for 8), where it keeps no weights. Where there are too many to keep, tiles would have to make
    them twice, and it is ahead from 256 on. Compiled attention is ahead of both in bf16 up to length 1,024, and in fp32
    from length 24 on; at 16 it is even with tiles, but spares the copies before and after them (docs/performance.md).
    """
    if q.device.type != "cpu":
        return "sdpa"
    n, m = q.shape[2], k.shape[2]
    if n == 1:  # a step, which may come with a mask or without: its bits shall not depend on that
        return "tiled"
    if bias is None and heads.serves(q, k, v, mask):
        return "compiled"
    easy = mask is None or mask.open or _only_causal(mask, n, m)
    if not easy or bias is not None or dropout > 0.0 or q.shape[-1] != v.shape[-1]:
        return "tiled"
    return "sdpa" if n * m >= (SDPA_FROM if _few(q, k) else SDPA_FROM_MANY) else "tiled"


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None) -> None:
    """Raise ValueError, saying what was given and what was expected, unless the shapes fit together."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k and v must be [batch, heads, length, dim], not {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    (b, h, n, d), (_, g, m, _) = q.shape, k.shape
    if k.shape != (b, g, m, d):
        raise ValueError(f"k {list(k.shape)} does not fit q {list(q.shape)}: expected [{b}, heads, length, {d}]")
    if v.shape[:3] != (b, g, m):
        raise ValueError(f"v {list(v.shape)} does not fit k {list(k.shape)}: expected [{b}, {g}, {m}, dim]")
    if g == 0 or h % g:
        raise ValueError(f"{h} query heads cannot share {g} key heads evenly")
    check_mask(mask, b, h, n, m)
    if bias is not None:
        if not bias.dtype.is_floating_point:
            raise ValueError(f"bias is added to the scores and must be floating point, not {bias.dtype}")
        if bias.dim() != 4 or any(x not in (1, y) for x, y in zip(bias.shape, (b, h, n, m), strict=True)):
            raise ValueError(f"bias {list(bias.shape)} does not broadcast to [{b}, {h}, {n}, {m}]")


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """The formula as it stands. With dropout it draws as ``tiled`` does for one tile."""
    weights = attention_weights(q, k, mask, bias, scale)
    if dropout > 0.0:
        mask_of_kept = keep_mask(tuple(weights.shape), dropout, draw_key(), dtype=weights.dtype)
        weights = weights * mask_of_kept.to(q.device) / keep_rate(dropout)
    return (weights @ _wide(v).repeat_interleave(q.shape[1] // v.shape[1], dim=1)).to(q.dtype)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """What torch offers, with the mask made dense unless it is plain causality.

    On a CPU without bf16 products its bf16 kernel takes several times as long as its fp32 one, which is used instead.
    """
    n, m = q.shape[2], k.shape[2]
    dtype = q.dtype
    if q.device.type == "cpu" and not bf16_products():
        q, k, v = _wide(q), _wide(k), _wide(v)
    causal = mask is not None and bias is None and _only_causal(mask, n, m)
    extra = None if bias is None else bias.to(q.dtype)
    if mask is not None and not causal and not mask.open:
        allowed = mask.dense(n, m, q.device)
        extra = allowed if extra is None else torch.where(allowed, extra, float("-inf"))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, extra, dropout, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.to(dtype)


def tiled(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """The formula tile by tile, with a backward pass of its own; bf16 is computed in fp32 and rounded once."""
    mask, bias = _closed_by_bias(mask, bias)
    if mask is not None and _only_causal(mask, q.shape[2], k.shape[2]):
        mask = _CAUSAL  # the one that remembers
    key = draw_key() if dropout else 0
    grad = torch.is_grad_enabled()
    plan = _Plan(mask or _EVERYTHING, _scale(q, scale), dropout, key, grad, is_steady())
    if not grad:
        return _forward(q, k, v, bias, plan)[0]
    out: Tensor = _Tiled.apply(q, k, v, bias, plan)  # type: ignore[no-untyped-call]
    return out


def compiled(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """The formula in C++, for what ``heads.serves``."""
    assert bias is None
    return heads.attend(q, k, v, mask, _scale(q, scale), dropout)


WAYS: dict[str, Callable[..., Tensor]] = {"reference": reference, "sdpa": sdpa, "tiled": tiled, "compiled": compiled}

SDPA_FROM, SDPA_FROM_MANY = 1024 * 1024, 256 * 256  # scores a head, where the weights are few and where they are many
_KEPT = 1 << 25  # so many weights are kept for the backward pass (128 MiB in fp32); making them again costs 20 to 40%
_TILE = 1 << 22  # so many scores make a tile (16 MiB in fp32); smaller ones pay for more calls
_QUERIES = 128  # so many queries make a tile where that spares keys or memory


@dataclass(frozen=True)
class _Tile:
    """A part of the work: some rows, some queries, and the keys outside of which these see nothing.

    Inside a tile, batch and key heads are one dimension, and the query heads that share a key head are one
    longer list of queries: q [b·G, R·n, D], k [b·G, m, D], scores [b·G, R·n, m].
    """

    rows: slice
    queries: slice
    keys: slice
    num_heads: int  # H
    groups: int  # G
    num_keys: int  # M
    whole: bool  # whether these are all rows and all queries

    @property
    def all_keys(self) -> bool:
        """Whether the queries see keys from the first to the last."""
        return (self.keys.start, self.keys.stop) == (0, self.num_keys)

    def queries_of(self, x: Tensor) -> Tensor:
        """[B, H, N, D] -> [b·G, R·n, D]."""
        x = x if self.whole else x[self.rows, :, self.queries]
        return x.reshape(x.shape[0] * self.groups, self.num_heads // self.groups * x.shape[2], x.shape[3])

    def keys_of(self, x: Tensor) -> Tensor:
        """[B, G, M, D] -> [b·G, m, D]."""
        x = x if self.whole and self.all_keys else x[self.rows, :, self.keys]
        return x.flatten(0, 1)

    def by_head(self, x: Tensor) -> Tensor:
        """[b·G, R·n, D or m] -> [b, H, n, D or m]."""
        queries = self.queries.stop - self.queries.start
        return x.view(self.rows.stop - self.rows.start, self.num_heads, queries, x.shape[2])

    def write_queries(self, target: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Write x [b·G, R·n, D] to its place in target [B, H, N, D]."""
        if self.whole:
            return self.by_head(x)
        target = x.new_empty(shape) if target is None else target
        target[self.rows, :, self.queries] = self.by_head(x)
        return target

    def add_keys(self, target: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Add x [b·G, m, D] to its place in target [B, G, M, D]: other queries saw these keys too."""
        x = x.view(self.rows.stop - self.rows.start, self.groups, *x.shape[1:])
        if self.whole and self.all_keys:
            return x
        target = x.new_zeros(shape) if target is None else target
        target[self.rows, :, self.keys] += x
        return target


class _Plan(NamedTuple):
    """What a run of tiles needs besides its tensors."""

    mask: Mask
    scale: float
    dropout: float
    key: int  # of the dropout
    train: bool  # whether there may be a backward pass
    blocks: bool  # whether products are of blocks of keys

    def drop(self, weights: Tensor, number: int) -> Tensor:
        """The weights of tile ``number``, or their gradients, with the same ones dropped whenever it is asked."""
        mask = keep_mask(tuple(weights.shape), self.dropout, self.key, start=number << 32, dtype=weights.dtype)
        return scaled_product(weights, mask, 1.0 / keep_rate(self.dropout))


def _tiles(q: Tensor, k: Tensor, mask: Mask, blocks: bool) -> list[_Tile]:
    (b, h, n, _), (_, groups, m, _) = q.shape, k.shape
    narrow = mask.causal or mask.window is not None or mask.segments is not None
    step = _QUERIES if n > _QUERIES and (narrow or not _few(q, k)) else n
    if blocks:
        step = min(n, KEYS)
    rows = min(b, max(1, _TILE // max(1, h * step * m)))
    whole = rows == b and step == n

    def seen(queries: slice) -> slice:
        return slice(0, m) if blocks or mask.open else mask.span(queries, m)

    return [
        _Tile(slice(row, min(row + rows, b)), queries, seen(queries), h, groups, m, whole)
        for queries in (slice(low, min(low + step, n)) for low in range(0, n, step or 1))
        for row in range(0, b, rows or 1)
    ]


def _few(q: Tensor, k: Tensor) -> bool:
    """Whether the weights are few enough to be kept for the backward pass."""
    return q.shape[:3].numel() * k.shape[2] <= _KEPT


def _tile_weights(tile: _Tile, q: Tensor, k: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
    """softmax(scale · q kᵀ + bias) where allowed, of one tile: [b·G, R·n, m]."""
    scores = _scores(tile.queries_of(q), tile.keys_of(k), plan)
    by_head = tile.by_head(scores)
    if bias is not None:
        by_head.add_(part(bias, tile.rows, tile.queries, tile.keys))
    if plan.mask.open:
        return torch.softmax(scores, -1, out=scores)
    barrier, empty = _barrier(plan.mask, tile, scores.dtype)
    by_head.add_(barrier)
    torch.softmax(scores, -1, out=scores)
    if empty is not None:
        by_head.masked_fill_(empty, 0.0)
    return scores


def _barrier(mask: Mask, tile: _Tile, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """0 where a query of the tile may attend and as good as −∞ where not, and which queries may attend nowhere, if any.

    To add it is vectorised and broadcast: masked_fill_ on the scores takes several times as long. It is finite, since
    the softmax of nothing but −∞ is NaN. All layers of a model ask the same mask the same question, so the last
    answer is remembered where it is small.
    """
    question = (*map(_ends, (tile.rows, tile.queries, tile.keys)), dtype)
    remembered: tuple[Tensor, Tensor | None] | None = mask.memory.get(question)
    if remembered is not None:
        return remembered
    allowed = mask.tile(tile.rows, tile.queries, tile.keys)
    empty = None
    if not mask.all_see(tile.queries, tile.num_keys):
        empty = ~allowed.any(-1, keepdim=True)
        empty = empty if bool(empty.any()) else None
    barrier = allowed.view(torch.uint8).to(dtype).sub_(1).mul_(torch.finfo(dtype).max)  # faster than masked_fill
    answer = barrier, empty
    if tile.whole:
        mask.memory.clear()
        mask.memory[question] = answer
    return answer


def _closed_by_bias(mask: Mask | None, bias: Tensor | None) -> tuple[Mask | None, Tensor | None]:
    """The mask and a finite bias: where the bias is −∞ the mask is closed instead."""
    if bias is None or not bool((closed := bias == float("-inf")).any()):
        return mask, bias
    return (mask or _EVERYTHING) & Mask(pattern=~closed), bias.masked_fill(closed, 0.0)


def _ends(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, plan: _Plan
) -> tuple[Tensor, list[_Tile], list[Tensor]]:
    """The output, the tiles it was made in, and their weights if they are to be kept for the backward pass."""
    wide_q, wide_k, wide_v = _wide(q), _wide(k), _wide(v)
    tiles = _tiles(q, k, plan.mask, plan.blocks)
    shape = (*q.shape[:3], v.shape[3])
    out = None if tiles else wide_q.new_zeros(shape)
    keep, kept = plan.train and _few(q, k), []
    for number, tile in enumerate(tiles):
        weights = _tile_weights(tile, wide_q, wide_k, bias, plan)
        if keep:
            kept.append(weights)
        if plan.dropout:
            weights = plan.drop(weights, number)
        out = tile.write_queries(out, _mix(weights, tile.keys_of(wide_v), plan), shape)
    assert out is not None
    return out if out.dtype == q.dtype else out.to(q.dtype), tiles, kept


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, plan: _Plan) -> Tensor:
        out, tiles, kept = _forward(q, k, v, bias, plan)
        ctx.save_for_backward(q, k, v, bias, *kept)
        ctx.plan, ctx.tiles = plan, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, *kept = ctx.saved_tensors
        plan = ctx.plan
        wide_q, wide_k, wide_v, grad = (_wide(x) for x in (q, k, v, grad))
        dq, dk, dv = (None, None, None) if ctx.tiles else (torch.zeros_like(x) for x in (wide_q, wide_k, wide_v))
        dbias = torch.zeros_like(bias, dtype=wide_q.dtype) if ctx.needs_input_grad[3] else None
        for number, tile in enumerate(ctx.tiles):
            weights = kept[number] if kept else _tile_weights(tile, wide_q, wide_k, bias, plan)
            dout = tile.queries_of(grad)
            dweights = torch.bmm(dout, tile.keys_of(wide_v).transpose(1, 2))
            used = weights
            if plan.dropout:
                used, dweights = plan.drop(weights, number), plan.drop(dweights, number)
            dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
            if dbias is not None:
                target = part(dbias, tile.rows, tile.queries, tile.keys)
                target += tile.by_head(dscores).sum_to_size(target.shape)
            dq = tile.write_queries(dq, _product(dscores, tile.keys_of(wide_k), plan.scale), wide_q.shape)
            queries = tile.queries_of(wide_q)
            dk = tile.add_keys(dk, _product(dscores.transpose(1, 2), queries, plan.scale), wide_k.shape)
            dv = tile.add_keys(dv, torch.bmm(used.transpose(1, 2), dout), wide_v.shape)
        grads = (None if g is None else g.to(x.dtype) for g, x in ((dq, q), (dk, k), (dv, v), (dbias, bias)))
        return *grads, None


def _steady_weights(q: Tensor, k: Tensor, mask: Mask | None, bias: Tensor | None, scale: float) -> Tensor:
    """``attention_weights`` tile by tile."""
    n, m = q.shape[2], k.shape[2]
    q, k, _, mask, bias = whole_blocks(_wide(q), _wide(k), k, *_closed_by_bias(mask, bias))
    plan = _Plan(mask or _EVERYTHING, scale, 0.0, 0, train=False, blocks=True)
    shape, weights = (*q.shape[:3], k.shape[2]), None
    for tile in _tiles(q, k, plan.mask, plan.blocks):
        weights = tile.write_queries(weights, _tile_weights(tile, q, k, bias, plan), shape)
    return (q.new_zeros(shape) if weights is None else weights)[:, :, :n, :m]


def _scores(q: Tensor, k: Tensor, plan: _Plan) -> Tensor:
    """scale · q kᵀ, for q [b·G, R·n, D] and k [b·G, m, D]: [b·G, R·n, m]."""
    blocks = k.split(KEYS, 1) if plan.blocks else (k,)
    parts = [_product(q, block.transpose(1, 2), plan.scale) for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _mix(weights: Tensor, v: Tensor, plan: _Plan) -> Tensor:
    """weights [b·G, R·n, m] times v [b·G, m, E]; what blocks of keys give is added in their order."""
    if not plan.blocks:
        return torch.bmm(weights, v)
    blocks = zip(weights.split(KEYS, 2), v.split(KEYS, 1), strict=True)
    return reduce(torch.add, (torch.bmm(part.contiguous(), block) for part, block in blocks))


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a @ b without a pass for the scale."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _only_causal(mask: Mask, n: int, m: int) -> bool:
    """Whether the mask says nothing but j ≤ i, as torch's is_causal does."""
    others = (mask.window, mask.lengths, mask.segments, mask.prefix, mask.pattern)
    return (
        mask.causal and n == m and isinstance(mask.offset, int) and mask.offset == 0 and all(o is None for o in others)
    )
