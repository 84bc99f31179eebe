"""GPT: the decoder of the Transformer alone, which reads a text and says how it goes on.

    tokens ─ embedding (+ position) ─▶ causal blocks ─▶ norm ─▶ hidden ─▶ logits of the next token

One model, by configuration:

- GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each sub-layer and at the end, GELU by its tanh
  approximation ("gelu_tanh"), biases everywhere, the output layer tied to the embeddings.
- Llama (Touvron et al. 2023): rotary positions, RMSNorm, SwiGLU, no biases, groups of query heads that share keys;
  for long contexts the rotary angles are slowed down (``rope_scaling``).
- alibi (Press et al. 2022) and none, besides.

Differs from both in that it takes several documents in one row: with their numbers (segments) no token sees or is
predicted from another document, and positions start again in each.

Weights start normal with a deviation of 0.02, those of the two layers that write into the residual stream with
0.02 / √(2 · num_layers), as in GPT-2; biases at 0. Dropout is where nanoGPT has it: on the embeddings, on each
sub-layer's output and on the attention weights.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import observe
from weft.config import GPTConfig, Specials
from weft.kernels.cross_entropy import linear_cross_entropy, linear_rdrop
from weft.kernels.dropout import dropout
from weft.kernels.embedding import embedded
from weft.kernels.linear import linear
from weft.kernels.mask import Mask
from weft.layers import masks
from weft.layers.attention import Rotation
from weft.layers.blocks import BlockConfig, EncoderBlock, through
from weft.layers.cache import KVCache
from weft.layers.positions import Learned, check_positions, positions
from weft.layers.relative import ALiBi, Rotary, slowed, slowed_where_low
from weft.models.contract import Loss
from weft.models.state import DecoderState, new_caches

_CAUSAL = Mask(causal=True)
_IGNORED = -100  # the target of a position that predicts nothing
_STD = 0.02


class Texts(Protocol):
    """A batch of text, in rows of N + 1 tokens: a model reads the first N and should say the last N."""

    @property
    def tokens(self) -> Tensor:
        """[B, N + 1]. No token is padding by its number: segments or ``counted`` say what is."""

    @property
    def segments(self) -> Tensor | None:
        """[B, N + 1] the number of the document that each token is of, negative for padding; None: one document."""

    @property
    def counted(self) -> Tensor | None:
        """[B, N] whether each of the last N is to be predicted, if the segments leave it; None: all are."""


class GPT(nn.Module):
    """The decoder-only Transformer.

    Its prompts are the inputs of ``start``, which leaves the last token of each to the first ``step``.

    Attributes:
        precision: of the activations, fp32 or bf16; parameters stay fp32.
        specials: which token numbers mean padding, begin and end.
        max_len: the longest text that it can take, the prompt counted; None (alibi, none) for any. Rotary positions
            go on beyond it, but the model has not learned to.
        cross_attentions: none, since there is no source.

    Example:
        >>> model = GPT(GPTConfig(dim=64), vocab_size=100)
        >>> hidden, state = model.step(torch.tensor([[9]]), model.start(torch.tensor([[1, 7, 8, 9]])))
        >>> model.logits(hidden).shape
        torch.Size([1, 1, 100])
    """

    cross_attentions: tuple[str, ...] = ()

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        """Make the model of this configuration for a vocabulary of this size.

        Raises:
            ValueError: if the vocabulary has no words.
        """
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"a vocabulary needs words, not {vocab_size}")
        block = _block(config)
        self.precision = torch.float32
        self.specials = Specials()
        self.max_len = config.max_len if config.positions in ("learned", "rotary") else None
        self.dropout = config.dropout
        self.embedding = nn.Parameter(torch.empty(vocab_size, config.dim))
        self.output_weight = None if config.tie else nn.Parameter(torch.empty(vocab_size, config.dim))
        self.positions = Learned(config.dim, config.max_len) if config.positions == "learned" else None
        self.alibi = ALiBi(config.num_heads) if config.positions == "alibi" else None
        self.rotary = _rotary(config) if config.positions == "rotary" else None
        self.blocks = nn.ModuleList(EncoderBlock(block) for _ in range(config.num_layers))
        self.norm = block.make_norm()
        self._initialise()

    def forward(self, tokens: Tensor, mask: Mask | None = None, places: Tensor | None = None) -> Tensor:
        """What the output layer takes [B, N, D] after each token of [B, N], all positions at once.

        Args:
            tokens: [B, N].
            mask: more than causality, if there is more: the segments of packed documents.
            places: [N] or [B, N] where each token stands; 0 … N − 1 if None.

        Raises:
            ValueError: if there are more tokens than learned positions, or shapes do not fit.
        """
        x = self._embed(tokens, places)
        places = positions(tokens.shape[1], device=tokens.device) if places is None else places
        if mask is None or not mask.causal:
            mask = _CAUSAL if mask is None else mask & _CAUSAL
        bias, rotary = self._between(places, places, x.dtype)
        x = through(self.blocks, x, mask, bias, rotary)
        return self._shown(self.norm(x))

    def loss(self, batch: Texts, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        """The cross entropy of each token given those before it in its document, summed over the predicted tokens.

        The first token of a document is not predicted: nothing of its document stands before it. With rdrop > 0 every
        row runs twice, under two drops, and rdrop times the divergence of the two is added to the mean of their
        cross entropies (R-Drop, Wu et al. 2021).

        Raises:
            ValueError: if rdrop is negative, or tokens and segments do not fit.
        """
        if rdrop < 0.0:
            raise ValueError(f"rdrop must be at least 0, not {rdrop}")
        inputs, wanted = batch.tokens[:, :-1], _wanted(batch)
        mask, places = self._documents(batch)
        weight = self._output
        if not rdrop:
            entropy = linear_cross_entropy(
                self(inputs, mask, places), weight, wanted, smoothing=smoothing, ignore=_IGNORED
            )
            return Loss(entropy.total, entropy.count, {"nll": entropy.nll})
        first, second = self(inputs, mask, places), self(inputs, mask, places)
        both = linear_rdrop(first, second, weight, wanted, smoothing=smoothing, ignore=_IGNORED, apart=rdrop)
        return Loss(both.total, both.count, {"nll": both.nll, "rdrop": both.divergence})

    def start(self, inputs: Tensor) -> DecoderState:
        """The state after all but the last token of each prompt [B, N], padded at the right; ``first`` is that one.

        Raises:
            ValueError: if a prompt has no token, is too long, or has padding before its end.
        """
        lengths = self._lengths(inputs)
        state = DecoderState.of((), lengths, self._new_caches(len(inputs)))
        ahead = int(lengths.max()) - 1 if len(lengths) else 0
        if ahead:  # what a shorter prompt has behind its end is cut off again
            _, state = self.step(inputs[:, :ahead].clamp(min=0), state)
        return state.truncate(lengths - 1)

    def first(self, inputs: Tensor) -> Tensor:
        """[B] the last token of each prompt."""
        return inputs.gather(1, self._lengths(inputs)[:, None] - 1)[:, 0]

    def room(self, inputs: Tensor) -> Tensor | None:
        """[B] how many tokens can follow each prompt before the context is full; None for any number."""
        return None if self.max_len is None else (self.max_len - self._lengths(inputs)).clamp(min=0)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, D] and the state after them."""
        size = state.size  # where all rows are alike, positions are made once and not for every row
        places = positions(tokens.shape[1], size.longest if size.alike else size.tensor, tokens.device)
        x = self._embed(tokens, places)
        keys = positions(size.longest + tokens.shape[1], device=tokens.device)
        bias, rotary = self._between(places, keys, x.dtype)
        caches = []
        for block, cache in zip(self._blocks, state.caches, strict=True):
            x, cache = block.step(x, cache, bias=bias, rotary=rotary)
            caches.append(cache)
        return self._shown(self.norm(x)), state.with_caches(caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token [..., V] of hidden [..., D], in the parameters' precision, fp32."""
        return linear(hidden.to(self._output.dtype), self._output)

    def picture(self, count: int) -> dict[str, Tensor]:
        """What the first ``count`` places of a text have, to be drawn, as a Transformer's positions; maybe nothing."""
        places = positions(count)
        if self.positions is not None:
            return {"table": self.positions(places)}
        if self.rotary is not None:
            return {"angles": self.rotary.table(places)}
        return {} if self.alibi is None else {"bias": self.alibi(places, places, torch.float32)[0]}

    def _embed(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        """The embeddings [B, N, D] of tokens at these places, 0 … N − 1 if None, ready for the first block."""
        if places is not None:
            check_positions(places, *tokens.shape)
        learned = None
        if self.positions is not None:
            learned = self.positions.first(tokens.shape[1]) if places is None else self.positions(places)
        # with a precision of fp32 they keep the parameters' dtype, which is fp64 after .double()
        dtype = self.embedding.dtype if self.precision == torch.float32 else self.precision
        x = dropout(embedded(tokens, self.embedding, learned, dtype), self.dropout, self.training)

        def added() -> dict[str, Tensor]:
            parts = {} if learned is None else {"positions": learned}
            return {"tokens": F.embedding(tokens, self.embedding), **parts, "stream": x}

        observe.see(self, "added", added)
        return x

    def _between(self, places: Tensor, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Rotation | None]:
        """The bias [B or 1, H, N, M] of queries that stand at places on keys that stand at keys, and the rotation."""
        bias = None if self.alibi is None else self.alibi(places, keys, torch.promote_types(dtype, torch.float32))
        return bias, None if self.rotary is None else self.rotary.turning(places, dtype)

    def _documents(self, batch: Texts) -> tuple[Mask, Tensor | None]:
        """Who sees whom among the inputs of a batch, and where they stand."""
        if batch.segments is None:
            return _CAUSAL, None
        segments = batch.segments[:, :-1]
        if bool((segments == segments[:, :1]).all()):  # one document a row: plain causality, which is faster
            return _CAUSAL, None
        # ALiBi counts distances, which starting again leaves as they are: one bias then serves all rows.
        return Mask(causal=True, segments=segments), None if self.alibi is not None else places_of(segments)

    def _lengths(self, prompts: Tensor) -> Tensor:
        """[B] how many tokens each prompt [B, N] has."""
        lengths = masks.padding_from_tokens(prompts, self.specials.pad).lengths
        assert lengths is not None
        if len(empty := (lengths < 1).nonzero()):
            raise ValueError(
                f"a prompt needs a token, but row {int(empty[0, 0])} has none: an empty text begins with BOS"
            )
        return lengths

    def _new_caches(self, rows: int) -> tuple[KVCache, ...]:
        attention = self._blocks[0].attention
        dtype = self.embedding.dtype if self.precision == torch.float32 else self.precision
        nothing = self.embedding.new_zeros(rows, attention.num_kv_heads, 0, attention.head_dim, dtype=dtype)
        return new_caches(*[(nothing, nothing)] * len(self.blocks))

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("attention.output.weight", "feed_forward.outer.weight")):
                nn.init.normal_(parameter, std=_STD * (2 * len(self.blocks)) ** -0.5)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=_STD)

    def _shown(self, hidden: Tensor) -> Tensor:
        """What the output layer takes [B, N, D], shown to observers."""
        observe.see(self, "hidden", lambda: {"hidden": hidden})
        return hidden

    @property
    def _blocks(self) -> list[EncoderBlock]:
        return [block for block in self.blocks if isinstance(block, EncoderBlock)]

    @property
    def _output(self) -> Tensor:
        """The output layer's weight [V, D]."""
        return self.embedding if self.output_weight is None else self.output_weight


def places_of(segments: Tensor) -> Tensor:
    """Where each token stands in its document: [B, N] of segments [B, N]; each run of one number is a document."""
    order = torch.arange(segments.shape[1], device=segments.device)
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    return order - torch.where(begins, order, 0).cummax(1).values


def _wanted(batch: Texts) -> Tensor:
    """The token [B, N] that each position should predict, or −100 if none."""
    tokens, segments, counted = batch.tokens, batch.segments, batch.counted
    wanted = tokens[:, 1:]
    if segments is not None:
        if segments.shape != tokens.shape:
            raise ValueError(f"segments must be {list(tokens.shape)} as the tokens, not {list(segments.shape)}")
        alone = (segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] < 0)
        wanted = wanted.masked_fill(alone, _IGNORED)
    if counted is not None:
        if counted.shape != wanted.shape or counted.dtype != torch.bool:
            given = f"{list(counted.shape)} of {counted.dtype}"
            raise ValueError(f"counted must be {list(wanted.shape)} of bool, one less than the tokens, not {given}")
        wanted = wanted.masked_fill(~counted, _IGNORED)
    return wanted


def _block(config: GPTConfig) -> BlockConfig:
    return BlockConfig(
        dim=config.dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_dim=config.ffn_dim,
        norm=config.norm,
        norm_eps=config.norm_eps,
        activation=config.activation,
        bias=config.bias,
        attention_bias=config.attention_bias,
        dropout=config.dropout,
        attention_dropout=config.dropout if config.attention_dropout is None else config.attention_dropout,
        ffn_dropout=config.ffn_dropout,
    )


def _rotary(config: GPTConfig) -> Rotary:
    scaling, given = None, config.rope_scaling
    if given is not None and given.kind == "linear":
        scaling = partial(slowed, factor=given.factor)
    elif given is not None:
        scaling = partial(
            slowed_where_low,
            factor=given.factor,
            low=given.low_freq_factor,
            high=given.high_freq_factor,
            length=given.original_max_len,
        )
    return Rotary(config.head_width, config.rope_base, scaling=scaling)
