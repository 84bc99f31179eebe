"""Multi-head attention: self, cross, grouped; the module over kernels.attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from weft import observe
from weft.kernels.attention import attend, attention_weights, vectors
from weft.kernels.dropout import dropout
from weft.kernels.heads import is_simple
from weft.kernels.linear import widened
from weft.kernels.mask import Mask
from weft.kernels.steady import grown, is_steady
from weft.kernels.sublayers import Heads
from weft.layers.cache import KVCache
from weft.layers.linear import Linear, is_bare, together
from weft.layers.norms import RMSNorm
from weft.layers.relative import ShawRelative, Turning

KeysValues = tuple[Tensor, Tensor]
Rotation = Callable[[Tensor, Tensor], Tensor]


class MultiHeadAttention(nn.Module):
    """H heads attend independently; their outputs are concatenated and mapped back (Vaswani et al. 2017).

        head_h = softmax(Q_h K_hᵀ / √head_dim) V_h,    output = [head_1; …; head_H] W_O

    With ``num_kv_heads`` < ``num_heads``, groups of query heads share one key and value head
    (Ainslie et al. 2023; 1 is multi-query attention, Shazeer 2019). With ``qk_norm``, queries and
    keys are RMS-normalised per head before the scores (Henry et al. 2020).

    Example:
        >>> attention = MultiHeadAttention(dim=64, num_heads=4)
        >>> attention(torch.randn(2, 5, 64), mask=Mask(causal=True)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        memory_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
        relative: ShawRelative | None = None,
    ) -> None:
        """Make the four projections.

        Args:
            dim: width D of the queries' side and of the output.
            num_heads: H.
            num_kv_heads: key and value heads, a divisor of H; H if None.
            head_dim: width of a head; dim / num_heads if None.
            memory_dim: width of what keys and values are made from; dim if None.
            bias: whether the projections have biases.
            qk_norm: whether queries and keys are normalised per head.
            dropout: probability that an attention weight is dropped in training.
            relative: learned vectors for the distance of query and key (self-attention only).

        Raises:
            ValueError: if the head counts do not divide, or the vectors of relative are not head_dim wide.
        """
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or kv_heads < 1:
            raise ValueError(f"head counts must be ≥ 1, not num_heads={num_heads}, num_kv_heads={kv_heads}")
        if head_dim is None and dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, but {dim} is not one of {num_heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
        if num_heads % kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, but {num_heads} is not one of {kv_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.dropout = dropout
        if relative is not None and relative.head_dim != self.head_dim:
            raise ValueError(f"relative has vectors of {relative.head_dim}, but a head is {self.head_dim} wide")
        self.relative = relative
        width = dim if memory_dim is None else memory_dim
        self.query = Linear(dim, num_heads * self.head_dim, bias)
        self.key = Linear(width, kv_heads * self.head_dim, bias)
        self.value = Linear(width, kv_heads * self.head_dim, bias)
        self.output = Linear(num_heads * self.head_dim, dim, bias)
        self.query_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.head_dim) if qk_norm else nn.Identity()

    def keys_values(self, memory: Tensor) -> KeysValues:
        """Keys and values [B, G, M, head_dim] of memory [B, M, D]: made once, attended to at every step."""
        return self._split(*together(memory, self.key, self.value))

    def forward(
        self,
        x: Tensor,
        memory: Tensor | KeysValues | None = None,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        rotary: Rotation | None = None,
    ) -> Tensor:
        """Attend from x to memory, or to x itself.

        Args:
            x: [B, N, D] what the queries are made from.
            memory: [B, M, D_memory], or its ``keys_values``; x if None.
            mask: who may attend to whom.
            bias: [B or 1, H or 1, N, M] added to the scores (relative positions).
            rotary: rotates queries and keys by their positions (self-attention only).

        Returns:
            [B, N, D].
        """
        if memory is not None and (rotary is not None or self.relative is not None):
            raise ValueError("rotary and relative positions are for self-attention: memory has positions of its own")
        if memory is None:
            q, k, v = self._projected(x)
        else:
            q = self._queries(self.query(x))
            k, v = memory if isinstance(memory, tuple) else self.keys_values(memory)
        positions = None
        if rotary is not None or self.relative is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            q, k = (q, k) if rotary is None else (rotary(q, positions), rotary(k, positions))
        return self._attend(q, k, v, mask, bias, positions, _real_keys(mask))

    def step(
        self,
        x: Tensor,
        cache: KVCache,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        rotary: Rotation | None = None,
    ) -> tuple[Tensor, KVCache]:
        """Causal self-attention of the T newest positions x [B, T, D] to themselves and all in the cache.

        Args:
            x: [B, T, D], T ≥ 1; row b's first stands at position cache.lengths[b].
            cache: the past.
            mask: more than causality, if there is more: a window; segments [B, M] of the keys so far.
            bias: [B or 1, H or 1, T, M] added to the scores; M is the new longest row.
            rotary: rotates queries and keys by their positions.

        Returns:
            [B, T, D] and the cache with the new keys and values.
        """
        if mask is not None and mask.prefix is not None:
            raise ValueError("a step sees nothing after its own positions: a prefix must be run as a whole")
        q, k, v = self._projected(x)
        positions = None
        if rotary is not None or self.relative is not None:
            positions = cache.lengths[:, None] + torch.arange(x.shape[1], device=x.device)  # [B, T]
            q, k = (q, k) if rotary is None else (rotary(q, positions), rotary(k, positions))
        before, cache = cache, cache.append(k, v)
        visible = None  # one token sees all there is; what hides nothing is left out, unless somebody is to be shown it
        if mask is not None or x.shape[1] > 1 or cache.hides or observe.listening():
            visible = before.size.causal if mask is None else before.size.causal & mask.at(before.lengths)
            if cache.width > cache.longest:
                visible, bias = _widened(visible, bias, cache.longest, cache.width)
        return self._attend(q, *cache.entries, visible, bias, positions, cache.longest), cache

    def plain_heads(self, mask: Mask | None, rotary: Rotation | None) -> Heads | None:
        """What happens between the projections in self-attention; None if it is more than a compiled sub-layer can."""
        p = self.dropout if self.training else 0.0
        norms = is_bare(self.query_norm, nn.Identity) and is_bare(self.key_norm, nn.Identity)
        plain = norms and self.relative is None and is_simple(mask)
        if not plain:
            return None
        sizes = self.num_heads, self.num_kv_heads, self.head_dim, Mask() if mask is None else mask, p
        if rotary is None:
            return Heads(*sizes)
        if not isinstance(rotary, Turning) or len(rotary.cos) > 1:  # rows that stand at places of their own
            return None
        return Heads(*sizes, (rotary.cos[0, 0], rotary.sin[0, 0]), rotary.rotary.interleaved)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same x."""
        queries, keys, values = together(x, self.query, self.key, self.value)
        return self._queries(queries), *self._split(keys, values)

    def _queries(self, queries: Tensor) -> Tensor:
        normed: Tensor = self.query_norm(self._heads(queries, self.num_heads))
        return normed

    def _split(self, keys: Tensor, values: Tensor) -> KeysValues:
        return self.key_norm(self._heads(keys, self.num_kv_heads)), self._heads(values, self.num_kv_heads)

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.view(*x.shape[:2], num_heads, self.head_dim).transpose(1, 2)  # [B, H, N, head_dim]

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        bias: Tensor | None,
        positions: Tensor | None,
        real: int | None = None,
    ) -> Tensor:
        """Attend and map back; positions [N] or [B, N] are the queries', for relative ones; keys stand at 0 … M − 1.

        Observers see the first ``real`` keys, or all, and at the output layer what each head adds.
        """
        p = self.dropout if self.training else 0.0
        if self.relative is not None and positions is not None:
            key_positions = torch.arange(k.shape[2], device=k.device)
            distance = self.relative(q, positions, key_positions) * self.head_dim**-0.5
            bias = distance if bias is None else distance + bias
        observe.see(
            self,
            "weights",
            lambda: {"weights": attention_weights(q, k, mask, bias)[..., :real]},
            {"vectors": lambda: vectors(q, k, v, mask, bias, real=real)},
        )
        if self.relative is not None and positions is not None and self.relative.value_vectors is not None:
            weights = dropout(attention_weights(q, k, mask, bias), p)  # the values' vectors need them all
            wide = [part.to(weights.dtype) for part in (q, k, v)]
            if is_steady() and p == 0.0:
                heads = attend(wide[0], wide[1], wide[2], mask, bias)
            else:
                heads = weights @ wide[2].repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
            heads = (heads + self.relative.values(weights, positions, key_positions)).to(v.dtype)
        else:
            heads = attend(q, k, v, mask, bias, dropout=p)
        observe.see(self.output, "added", lambda: self._added(heads))
        output: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return output

    def _added(self, heads: Tensor) -> dict[str, Tensor]:
        """What each head [B, H, N, head_dim] adds through its columns of W_O, [B, H, N, D], and the bias [D] apart.

        In fp32 at least: their sum is the output but for its rounding.
        """
        wide = torch.promote_types(heads.dtype, torch.float32)
        columns = (
            widened(self.output.weight, self.output.weight_scale, heads.dtype)
            .to(wide)
            .unflatten(1, (self.num_heads, self.head_dim))
        )
        added = {"heads": torch.einsum("bhnd,ehd->bhne", heads.to(wide), columns)}
        return added if self.output.bias is None else {**added, "bias": self.output.bias.clone()}


def _real_keys(mask: Mask | None) -> int | None:
    """Of keys that steady mode has padded, how many there are to see; all of them else, which None says."""
    if not is_steady() or not observe.listening() or mask is None or mask.lengths is None or not len(mask.lengths):
        return None
    return int(mask.lengths.max())


def _widened(mask: Mask, bias: Tensor | None, m: int, width: int) -> tuple[Mask, Tensor | None]:
    """The causal mask and the bias of m keys for so many more behind them, which causality closes."""
    if mask.segments is not None:
        mask = replace(mask, segments=grown(mask.segments, -1, width))
    if mask.pattern is not None and mask.pattern.shape[-1] == m:
        mask = replace(mask, pattern=grown(mask.pattern, -1, width))
    return mask, bias if bias is None or bias.shape[-1] != m else grown(bias, -1, width)
