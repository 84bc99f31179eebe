"""The Transformer's block: attention and feed-forward, each with a residual and a norm around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from weft import observe
from weft.kernels import rows, sublayers
from weft.kernels.dropout import dropout
from weft.kernels.mask import Mask
from weft.kernels.steady import gelu, gelu_tanh, silu
from weft.layers.attention import KeysValues, MultiHeadAttention, Rotation
from weft.layers.cache import KVCache
from weft.layers.linear import Linear, is_bare, parameters_of
from weft.layers.norms import LayerNorm, RMSNorm, plain_norm
from weft.layers.relative import ShawRelative

Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swiglu": silu,
}
_CAUSAL = Mask(causal=True)


@dataclass(frozen=True)
class BlockConfig:
    """How a block is built.

    Attributes:
        dim, num_heads, ffn_dim, num_kv_heads, head_dim: sizes, as in MultiHeadAttention.
        norm: LayerNorm, RMSNorm, or none (to see what a norm is for).
        norm_first: pre-norm, x + f(norm(x)); else post-norm as in 2017, norm(x + f(x)).
        residual: whether the input is added to each sub-layer's output (False: to see what it is for).
        activation: of the feed-forward; swiglu has a third matrix as a gate.
        bias: whether linear layers have biases; attention_bias: those of the attention, as ``bias`` if None.
        qk_norm: whether queries and keys are normalised per head.
        max_distance: give the self-attention Shaw's relative positions, clipped to this distance.
        dropout: on each sub-layer's output; attention_dropout and ffn_dropout: inside them.
    """

    dim: int
    num_heads: int
    ffn_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: Literal["layer", "rms", "none"] = "layer"
    norm_first: bool = True
    norm_eps: float = 1e-5
    residual: bool = True
    activation: Activation = "relu"
    bias: bool = True
    attention_bias: bool | None = None
    qk_norm: bool = False
    max_distance: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_activation(self.activation)
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be ≥ 1, not {self.num_heads}")
        if self.norm not in ("layer", "rms", "none"):
            raise ValueError(f"norm must be layer, rms or none, not {self.norm!r}")
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and less than 1, not {getattr(self, name)}")

    def attention(self, cross: bool = False) -> MultiHeadAttention:
        """The attention layer of this configuration, to itself or across to a memory."""
        head_dim = self.dim // self.num_heads if self.head_dim is None else self.head_dim
        relative = None if cross or self.max_distance is None else ShawRelative(head_dim, self.max_distance)
        return MultiHeadAttention(
            self.dim,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            bias=self.bias if self.attention_bias is None else self.attention_bias,
            qk_norm=self.qk_norm,
            dropout=self.attention_dropout,
            relative=relative,
        )

    def make_norm(self) -> nn.Module:
        """The norm of this configuration; a stack of pre-norm blocks ends with one more."""
        if self.norm == "layer":
            return LayerNorm(self.dim, eps=self.norm_eps, bias=self.bias)
        return RMSNorm(self.dim, eps=self.norm_eps) if self.norm == "rms" else nn.Identity()


def _check_activation(name: str) -> None:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, not {name!r}")


class FeedForward(nn.Module):
    """The same two-layer network at every position: max(0, x W₁ + b₁) W₂ + b₂, or with GELU.

    With ``swiglu`` (Shazeer 2020): (silu(x W₁) ⊗ x W₃) W₂.
    """

    def __init__(
        self, dim: int, ffn_dim: int, *, activation: Activation = "relu", bias: bool = True, dropout: float = 0.0
    ) -> None:
        """Make the matrices dim × ffn_dim and back."""
        super().__init__()
        _check_activation(activation)
        self.activation = activation
        self.activate = _ACTIVATIONS[activation]
        self.dropout = dropout
        self.inner = Linear(dim, ffn_dim, bias)
        self.gate = Linear(dim, ffn_dim, bias) if activation == "swiglu" else None
        self.outer = Linear(ffn_dim, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x[B, N, D] to [B, N, D]."""
        inner = self.inner(x)
        opened, by = (inner, None) if self.gate is None else (self.gate(x), inner)
        if rows.serves(opened, by):
            hidden = rows.activated(opened, by, self.activation)
        else:
            hidden = self.activate(opened) if by is None else self.activate(opened) * by
        output: Tensor = self.outer(dropout(hidden, self.dropout, self.training))
        return output


class SubLayer(nn.Module):
    """The residual, norm and dropout around one function f of a block.

    Pre-norm: x + dropout(f(norm(x))). Post-norm: norm(x + dropout(f(x))).
    """

    def __init__(self, config: BlockConfig) -> None:
        """Make the norm; the function is passed when called."""
        super().__init__()
        self.norm = config.make_norm()
        self.norm_first = config.norm_first
        self.residual = config.residual
        self.dropout = config.dropout

    def whole(
        self, f: FeedForward | MultiHeadAttention, inside: sublayers.Heads | str | None
    ) -> sublayers.SubLayer | None:
        """Itself around f, as kernels/sublayers.py has it; None if it is more than that, or somebody watches."""
        plain = self.norm_first and self.residual and is_bare(self, SubLayer) and not observe.listening()
        norm = plain_norm(self.norm) if plain else None
        if norm is None or inside is None:
            return None
        if isinstance(f, MultiHeadAttention):
            first, last = parameters_of(f.query, f.key, f.value), parameters_of(f.output)
        else:
            first, last = parameters_of(f.inner, *([] if f.gate is None else [f.gate])), parameters_of(f.outer)
        p = self.dropout if self.training else 0.0
        return sublayers.SubLayer(norm, first, last[0], inside, p) if first and last else None

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply f to x[B, N, D] with what belongs around it.

        Observers see what f added, before dropout, and the stream [B, N, D] that goes on.
        """
        added = f(self.norm(x) if self.norm_first else x)
        y = dropout(added, self.dropout, self.training, onto=x if self.residual else None)
        stream: Tensor = y if self.norm_first else self.norm(y)
        observe.see(self, "added", lambda: {"added": added, "stream": stream})
        return stream


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward. With a causal mask it is the block of a GPT."""

    def __init__(self, config: BlockConfig) -> None:
        """Build from sizes and choices."""
        super().__init__()
        self.attention = config.attention()
        self.feed_forward = FeedForward(
            config.dim, config.ffn_dim, activation=config.activation, bias=config.bias, dropout=config.ffn_dropout
        )
        self.around_attention = SubLayer(config)
        self.around_feed_forward = SubLayer(config)

    def forward(
        self, x: Tensor, mask: Mask | None = None, bias: Tensor | None = None, rotary: Rotation | None = None
    ) -> Tensor:
        """Map x[B, N, D] to [B, N, D]; mask, bias and rotary as in MultiHeadAttention."""
        whole = _wholes(self, mask, bias, rotary)
        if len(whole) == 2 and sublayers.serves(x, whole):
            return sublayers.through(x, whole)
        return _through_feed(self, _through_attention(self, x, mask, bias, rotary))

    def step(
        self,
        x: Tensor,
        cache: KVCache,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        rotary: Rotation | None = None,
    ) -> tuple[Tensor, KVCache]:
        """The causal block on the T newest positions x[B, T, D], and the cache with them in it."""
        x, cache = _step_attention(self.around_attention, self.attention, x, cache, mask, bias, rotary)
        return _through_feed(self, x), cache


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's output (the memory), then feed-forward."""

    def __init__(self, config: BlockConfig) -> None:
        """Build from sizes and choices."""
        super().__init__()
        self.attention = config.attention()
        self.cross_attention = config.attention(cross=True)
        self.feed_forward = FeedForward(
            config.dim, config.ffn_dim, activation=config.activation, bias=config.bias, dropout=config.ffn_dropout
        )
        self.around_attention = SubLayer(config)
        self.around_cross_attention = SubLayer(config)
        self.around_feed_forward = SubLayer(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | KeysValues,
        mask: Mask | None = None,
        memory_mask: Mask | None = None,
        bias: Tensor | None = None,
        rotary: Rotation | None = None,
    ) -> Tensor:
        """Map x[B, N, D] to [B, N, D].

        Args:
            x: the target side.
            memory: [B, M, D] the encoder's output, or ``cross_attention.keys_values`` of it.
            mask: of the self-attention; causal if None.
            memory_mask: which of the memory is padding.
            bias: added to the self-attention's scores.
            rotary: positions of the self-attention.
        """
        mask = _CAUSAL if mask is None else mask
        x = _through_attention(self, x, mask, bias, rotary)
        return self._attend_and_feed(x, memory, memory_mask)

    def step(
        self,
        x: Tensor,
        memory: Tensor | KeysValues,
        cache: KVCache,
        memory_mask: Mask | None = None,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        rotary: Rotation | None = None,
    ) -> tuple[Tensor, KVCache]:
        """The block on the T newest positions x[B, T, D], and the cache with them in it."""
        x, cache = _step_attention(self.around_attention, self.attention, x, cache, mask, bias, rotary)
        return self._attend_and_feed(x, memory, memory_mask), cache

    def _attend_and_feed(self, x: Tensor, memory: Tensor | KeysValues, memory_mask: Mask | None) -> Tensor:
        x = self.around_cross_attention(x, lambda y: self.cross_attention(y, memory, mask=memory_mask))
        return _through_feed(self, x)


def through(
    blocks: nn.ModuleList,
    x: Tensor,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    rotary: Rotation | None = None,
) -> Tensor:
    """x [B, N, D] through these blocks, one after the other: in one compiled call where all of them are plain."""
    bare = [block for block in blocks if is_bare(block, EncoderBlock)] if sublayers.wanted() else []
    whole = [one for block in bare for one in _wholes(block, mask, bias, rotary)]
    if whole and len(whole) == 2 * len(blocks) and sublayers.serves(x, whole):
        return sublayers.through(x, whole)
    for block in blocks:
        x = block(x, mask, bias, rotary)
    return x


def _through_attention(
    block: EncoderBlock | DecoderBlock, x: Tensor, mask: Mask | None, bias: Tensor | None, rotary: Rotation | None
) -> Tensor:
    """x through a block's self-attention and what is around it."""
    whole = _whole_attention(block, mask, bias, rotary)
    if whole and sublayers.serves(x, whole):
        return sublayers.through(x, whole)
    y: Tensor = block.around_attention(x, lambda y: block.attention(y, mask=mask, bias=bias, rotary=rotary))
    return y


def _through_feed(block: EncoderBlock | DecoderBlock, x: Tensor) -> Tensor:
    """x through a block's feed-forward and what is around it."""
    whole = _whole_feed(block)
    if whole and sublayers.serves(x, whole):
        return sublayers.through(x, whole)
    y: Tensor = block.around_feed_forward(x, block.feed_forward)
    return y


def _wholes(
    block: EncoderBlock, mask: Mask | None, bias: Tensor | None, rotary: Rotation | None
) -> list[sublayers.SubLayer]:
    return _whole_attention(block, mask, bias, rotary) + _whole_feed(block)


def _whole_attention(
    block: EncoderBlock | DecoderBlock, mask: Mask | None, bias: Tensor | None, rotary: Rotation | None
) -> list[sublayers.SubLayer]:
    """A block's self-attention with what is around it, if it is plain and to be compiled; else nothing."""
    if not sublayers.wanted():
        return []
    attention = block.attention
    heads = attention.plain_heads(mask, rotary) if bias is None and is_bare(attention, MultiHeadAttention) else None
    found = block.around_attention.whole(attention, heads)
    return [] if found is None else [found]


def _whole_feed(block: EncoderBlock | DecoderBlock) -> list[sublayers.SubLayer]:
    """A block's feed-forward with what is around it, if it is plain and to be compiled; else nothing."""
    if not sublayers.wanted():
        return []
    feed = block.feed_forward
    drops = feed.training and feed.dropout
    found = block.around_feed_forward.whole(feed, feed.activation if is_bare(feed, FeedForward) and not drops else None)
    return [] if found is None else [found]


def _step_attention(
    around: SubLayer,
    attention: MultiHeadAttention,
    x: Tensor,
    cache: KVCache,
    mask: Mask | None,
    bias: Tensor | None,
    rotary: Rotation | None,
) -> tuple[Tensor, KVCache]:
    def attend(y: Tensor) -> Tensor:
        nonlocal cache
        out, cache = attention.step(y, cache, mask=mask, bias=bias, rotary=rotary)
        return out

    return around(x, attend), cache
