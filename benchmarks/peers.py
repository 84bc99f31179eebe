"""The models that benchmarks/training.py trains side by side: weft's and its peers', each of the sizes of a ``Case``.

A peer maps source [B, N] and target [B, T] to logits [B, T, V], as people write it with that library; a language model
has a source without tokens. Dropout stands in the same places everywhere: on embeddings, on each sub-layer's output,
and on attention's weights if the case says so. Where a library leaves the choice of an attention kernel, it has the
plain formula at short lengths, as there torch's fused one is the slower (docs/results.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config import EOS, PAD, GPTConfig, TransformerConfig
from weft.data.packing import TokenBatch
from weft.layers.attention import MultiHeadAttention
from weft.layers.blocks import DecoderBlock, EncoderBlock
from weft.layers.positions import Sinusoidal, positions
from weft.models.contract import Loss, Pairs
from weft.models.gpt import GPT
from weft.models.transformer import Transformer

_FUSED_FROM = 65  # the length from which a peer that has the choice attends with torch's fused kernel


@dataclass(frozen=True)
class Case:
    """The sizes of a model and of its batches, and what weft should reach with them.

    Attributes:
        name: of the case.
        encoder_layers: 0 for a language model, which is a causal stack alone.
        decoder_layers, dim, ffn_dim, num_heads: sizes.
        rows, length: of a batch; both sides of a translation have this length.
        vocab_size: at most; what the text gives replaces it.
        dropout: on embeddings and on each sub-layer's output.
        attention_dropout: on attention's weights.
        smoothing: of the labels.
        ratio: so many times the tokens per second of the best peer are wanted.
        mfu: so much of the machine's peak is wanted; 0: none is.
    """

    name: str
    encoder_layers: int
    decoder_layers: int
    dim: int
    ffn_dim: int
    num_heads: int
    rows: int
    length: int
    vocab_size: int
    dropout: float
    attention_dropout: float = 0.0
    smoothing: float = 0.0
    ratio: float = 1.0
    mfu: float = 0.0

    @property
    def translates(self) -> bool:
        """Whether there is a source."""
        return self.encoder_layers > 0

    @property
    def activation(self) -> Any:
        """Of the feed-forward: ReLU as in 2017, or GELU as in GPT."""
        return "relu" if self.translates else "gelu"


def weft_model(case: Case) -> nn.Module:
    """weft's model of a case."""
    if not case.translates:
        return Language(case)
    config = TransformerConfig(
        dim=case.dim,
        num_heads=case.num_heads,
        ffn_dim=case.ffn_dim,
        encoder_layers=case.encoder_layers,
        decoder_layers=case.decoder_layers,
        dropout=case.dropout,
        attention_dropout=case.attention_dropout,
    )
    return Transformer(config, case.vocab_size, case.vocab_size)


class Language(GPT):
    """weft's GPT, on the batches that every contestant gets."""

    def __init__(self, case: Case) -> None:
        """Make the model of a case."""
        config = GPTConfig(
            dim=case.dim,
            num_heads=case.num_heads,
            num_layers=case.decoder_layers,
            ffn_dim=case.ffn_dim,
            max_len=case.length,
            activation=case.activation,
            dropout=case.dropout,
            attention_dropout=case.attention_dropout,
        )
        super().__init__(config, case.vocab_size)

    def loss(self, batch: Pairs, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:  # type: ignore[override]
        """The cross entropy of each token after those before it."""
        return super().loss(TokenBatch(batch.target), smoothing, rdrop)


class Torch(nn.Module):
    """torch.nn.Transformer, or TransformerEncoder under a causal mask, between embeddings and a tied output layer."""

    package = "torch"

    def __init__(self, case: Case) -> None:
        """Make the model of a case."""
        super().__init__()
        self.translates = case.translates
        self.table = nn.Embedding(case.vocab_size, case.dim)
        self.dropout = nn.Dropout(case.dropout)
        sizes: dict[str, Any] = {
            "dim_feedforward": case.ffn_dim,
            "dropout": case.dropout,
            "activation": case.activation,
            "batch_first": True,
            "norm_first": True,
        }
        layer = nn.TransformerEncoderLayer(case.dim, case.num_heads, **sizes)
        layers = case.encoder_layers or case.decoder_layers
        self.stack: nn.Module = nn.TransformerEncoder(layer, layers, nn.LayerNorm(case.dim), enable_nested_tensor=False)
        if case.translates:
            self.scale = case.dim**0.5
            self.register_buffer("places", Sinusoidal(case.dim)(positions(case.length)))
            sizes |= {"num_decoder_layers": case.decoder_layers, "custom_encoder": self.stack}
            self.stack = nn.Transformer(case.dim, case.num_heads, **sizes)
            nn.init.normal_(self.table.weight, std=case.dim**-0.5)
        else:
            self.scale = 1.0
            self.places = nn.Parameter(torch.empty(case.length, case.dim))
            _start(self)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = case.attention_dropout
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = 0.0  # the one inside the feed-forward

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        closed = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        if self.translates:
            padding = source == PAD
            hidden = self.stack(
                self._place(source),
                self._place(target),
                tgt_mask=closed,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
                tgt_is_causal=True,
            )
        else:
            hidden = self.stack(self._place(target), mask=closed, is_causal=True)
        return F.linear(hidden, self.table.weight)

    def _place(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.table(tokens) * self.scale + self.places[: tokens.shape[1]])
        return x


class HuggingFace(nn.Module):
    """M2M100 of transformers, a pre-norm encoder-decoder with sinusoidal positions; or its GPT-2."""

    package = "transformers"

    def __init__(self, case: Case) -> None:
        """Make the model of a case."""
        super().__init__()
        library = import_module("transformers")
        self.translates = case.translates
        kernel = "sdpa" if case.length >= _FUSED_FROM else "eager"
        if case.translates:
            config = library.M2M100Config(
                vocab_size=case.vocab_size,
                d_model=case.dim,
                encoder_layers=case.encoder_layers,
                decoder_layers=case.decoder_layers,
                encoder_attention_heads=case.num_heads,
                decoder_attention_heads=case.num_heads,
                encoder_ffn_dim=case.ffn_dim,
                decoder_ffn_dim=case.ffn_dim,
                activation_function=case.activation,
                dropout=case.dropout,
                attention_dropout=case.attention_dropout,
                activation_dropout=0.0,
                encoder_layerdrop=0.0,
                decoder_layerdrop=0.0,
                scale_embedding=True,
                max_position_embeddings=case.length,
                pad_token_id=PAD,
                eos_token_id=EOS,
                attn_implementation=kernel,
            )
            self.model = library.M2M100ForConditionalGeneration(config)
        else:
            config = library.GPT2Config(
                vocab_size=case.vocab_size,
                n_embd=case.dim,
                n_layer=case.decoder_layers,
                n_head=case.num_heads,
                n_inner=case.ffn_dim,
                n_positions=case.length,
                activation_function=case.activation,
                embd_pdrop=case.dropout,
                resid_pdrop=case.dropout,
                attn_pdrop=case.attention_dropout,
                bos_token_id=EOS,
                eos_token_id=EOS,
                attn_implementation=kernel,
            )
            self.model = library.GPT2LMHeadModel(config)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        if self.translates:
            inputs = {"input_ids": source, "attention_mask": (source != PAD).long(), "decoder_input_ids": target}
        else:
            inputs = {"input_ids": target}
        logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits


class XTransformers(nn.Module):
    """An Encoder and a Decoder of x-transformers, or a Decoder alone; no biases in attention, learned positions."""

    package = "x_transformers"

    def __init__(self, case: Case) -> None:
        """Make the model of a case."""
        super().__init__()
        library = import_module("x_transformers")

        def wrapped(stack: Any, depth: int, **more: Any) -> Any:
            layers = stack(
                dim=case.dim,
                depth=depth,
                heads=case.num_heads,
                attn_dim_head=case.dim // case.num_heads,
                attn_dropout=case.attention_dropout,
                attn_sublayer_dropout=case.dropout,
                attn_flash=case.length >= _FUSED_FROM,
                ff_mult=case.ffn_dim / case.dim,
                ff_custom_activation=nn.ReLU() if case.translates else nn.GELU(),
                ff_sublayer_dropout=case.dropout,
                verbose=False,
                **more,
            )
            return library.TransformerWrapper(
                num_tokens=case.vocab_size,
                max_seq_len=case.length,
                attn_layers=layers,
                emb_dropout=case.dropout,
                tie_embedding=True,
            )

        self.encoder = wrapped(library.Encoder, case.encoder_layers) if case.translates else None
        self.decoder = wrapped(library.Decoder, case.decoder_layers, cross_attend=case.translates)
        if self.encoder is not None:
            self.encoder.token_emb = self.decoder.token_emb

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        context = {}
        if self.encoder is not None:
            real = source != PAD
            context = {"context": self.encoder(source, mask=real, return_embeddings=True), "context_mask": real}
        logits: Tensor = self.decoder(target, **context)
        return logits


PEERS: dict[str, type[Torch] | type[HuggingFace] | type[XTransformers]] = {
    "torch": Torch,
    "transformers": HuggingFace,
    "x-transformers": XTransformers,
}


def installed(peer: str) -> bool:
    """Whether the library of a peer is here."""
    return find_spec(PEERS[peer].package) is not None


def copy_weights(model: nn.Module, peer: Torch) -> None:
    """Give torch's model the parameters of weft's of the same case: then they are the same function."""
    with torch.no_grad():
        if isinstance(model, Language):
            assert model.positions is not None
            peer.table.weight.copy_(model.embedding)
            peer.places.copy_(model.positions.weight)
            norms = [(model.norm, peer.stack.norm)]
        else:
            assert isinstance(model, Transformer)
            assert model.target_embedding is not None
            peer.table.weight.copy_(model.target_embedding)
            stack: Any = peer.stack
            norms = [(model.encoder_norm, stack.encoder.norm), (model.decoder_norm, stack.decoder.norm)]
        blocks = [module for module in model.modules() if isinstance(module, (EncoderBlock, DecoderBlock))]
        kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        layers: list[Any] = [module for module in peer.modules() if isinstance(module, kinds)]
        pairs: list[tuple[Any, Any]] = list(norms)
        for block, layer in zip(blocks, layers, strict=True):
            feed_forward = block.feed_forward
            pairs += [(feed_forward.inner, layer.linear1), (feed_forward.outer, layer.linear2)]
            _copy_attention(block.attention, layer.self_attn)
            around = [block.around_attention, block.around_feed_forward]
            if isinstance(block, DecoderBlock):
                _copy_attention(block.cross_attention, layer.multihead_attn)
                around.insert(1, block.around_cross_attention)
            # torch numbers the norms in the order of the sub-layers
            pairs += [(part.norm, getattr(layer, f"norm{i}")) for i, part in enumerate(around, 1)]
        for ours, theirs in pairs:
            theirs.load_state_dict(ours.state_dict())


def _copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    parts = (ours.query, ours.key, ours.value)
    assert theirs.in_proj_weight is not None
    theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
    theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def _start(model: nn.Module) -> None:
    """Start matrices as GPT-2 does."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
