"""Blocks with their parameters at hand, for searches that go a token at a time.

A module looks up its parts in every call, checks what it is given and asks who listens. For one token of a short
sentence that takes longer than the arithmetic. A bound block has looked everything up once. It is what the block's
``step`` is for one token a row that sees all there is, to within rounding: it attends by torch's kernel, in one call.

It holds the parameters themselves: it sees them change, but not that others were put in their place, nor new hooks. So
it is made for one search.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.layers.attention import KeysValues, MultiHeadAttention
from weft.layers.blocks import DecoderBlock, EncoderBlock, FeedForward, SubLayer
from weft.layers.cache import KVCache
from weft.layers.linear import Linear, is_bare
from weft.layers.norms import LayerNorm

Function = Callable[[Tensor], Tensor]


class Bound:
    """A block in eval mode with its parameters at hand."""

    def __init__(self, block: EncoderBlock | DecoderBlock) -> None:
        """Look them up; see ``can_be_bound``."""
        own = block.attention
        self._around_past, self._past = _around(block.around_attention), _Attention(own)
        self._key, self._value = linear(own.key), linear(own.value)
        self._shape = (own.num_kv_heads, 1, own.head_dim)
        self._around_feed, self._feed = _around(block.around_feed_forward), _feed(block.feed_forward)
        if isinstance(block, DecoderBlock):
            self._around_memory, self._memory = _around(block.around_cross_attention), _Attention(block.cross_attention)

    def __call__(self, x: Tensor, cache: KVCache, memory: KeysValues | None = None) -> tuple[Tensor, KVCache]:
        """The block on one token a row.

        Args:
            x: [B, 1, D].
            cache: the past, of rows that are all alike.
            memory: keys and values [B, G, M, head_dim] of a source without padding, for a decoder's block.

        Returns:
            [B, 1, D] and the cache with the token in it.
        """

        def attend(y: Tensor) -> Tensor:
            nonlocal cache
            cache = cache.append(self._key(y).view(shape), self._value(y).view(shape))
            return self._past(y, *cache.entries)

        shape = (x.shape[0], *self._shape)
        x = self._around_past(x, attend)
        if memory is not None:
            x = self._around_memory(x, lambda y: self._memory(y, *memory))
        return self._around_feed(x, self._feed), cache


class _Attention:
    """Attention of one token a row to all keys there are."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        self._heads, self._width = attention.num_heads, attention.head_dim
        self._attend = partial(F.scaled_dot_product_attention, enable_gqa=attention.num_kv_heads != attention.num_heads)
        self._query, self._output = linear(attention.query), linear(attention.output)

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of x [B, 1, D] to keys and values [B, G, M, head_dim]."""
        batch = x.shape[0]
        heads = self._attend(self._query(x).view(batch, self._heads, 1, self._width), keys, values)
        return self._output(heads.view(batch, 1, self._heads * self._width))


def can_be_bound(block: nn.Module) -> bool:
    """Whether there is no more to a block than ``Bound`` knows: relative positions, norms of queries, hooks."""
    if not (is_bare(block, EncoderBlock) or is_bare(block, DecoderBlock)):
        return False
    around = [part for part in block.children() if isinstance(part, SubLayer)]
    attentions = [part for part in block.children() if isinstance(part, MultiHeadAttention)]
    return all(is_bare(part, SubLayer) for part in around) and all(map(_is_simple, attentions))


def linear(layer: nn.Module) -> Function:
    """A linear layer as a function; what is called Linear and is more than that, as it is."""
    if not is_bare(layer, Linear) or layer.weight.dtype != torch.float32:
        return layer
    return partial(F.linear, weight=layer.weight, bias=layer.bias)


def norm(layer: nn.Module) -> Function:
    """A LayerNorm as a function, any other norm as it is."""
    if not is_bare(layer, LayerNorm):
        return layer
    shape, weight, bias, eps = layer.normalized_shape, layer.weight, layer.bias, layer.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _is_simple(attention: MultiHeadAttention) -> bool:
    plain = attention.relative is None and type(attention.query_norm) is type(attention.key_norm) is nn.Identity
    return plain and is_bare(attention, MultiHeadAttention)


def _around(layer: SubLayer) -> Callable[[Tensor, Function], Tensor]:
    """The residual and the norm around a function."""
    around = norm(layer.norm)
    if layer.norm_first:
        return (lambda x, f: x + f(around(x))) if layer.residual else (lambda x, f: f(around(x)))
    return (lambda x, f: around(x + f(x))) if layer.residual else (lambda x, f: around(f(x)))


def _feed(layer: nn.Module) -> Function:
    if not is_bare(layer, FeedForward):
        return layer
    inner, outer, activate = linear(layer.inner), linear(layer.outer), layer.activate
    if layer.gate is None:
        return lambda x: outer(activate(inner(x)))
    gate = linear(layer.gate)
    return lambda x: outer(activate(gate(x)) * inner(x))
