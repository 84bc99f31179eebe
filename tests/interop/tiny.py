"""Tiny random Transformers with tokenizers, on which other programs are compared with weft."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from weft.config import BOS, EOS, PAD, TokenizerConfig, TransformerConfig
from weft.data.batching import Batch
from weft.data.tokenizers import TokenizerPair
from weft.data.vocabulary import train_tokenizer
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import Hypothesis, SearchOptions
from weft.models.transformer import Transformer

LIMIT = 25  # tokens that a translation may have
SOURCE = ["a man sleeps on a bench .", "two dogs run over the green grass , and a cat sits there .", "snow"]
TARGET = ["ein mann schläft auf einer bank .", "zwei hunde laufen über das grüne gras .", "schnee fällt"]


def tiny(**options: Any) -> TransformerConfig:
    sizes = {"dim": 12, "num_heads": 3, "ffn_dim": 21, "encoder_layers": 1, "decoder_layers": 3}
    return TransformerConfig(**{**sizes, **options})


@cache
def vocabularies(joint: bool = True, kind: str = "word") -> TokenizerPair:
    """Of the few words above: one for both sides, or two of different sizes."""
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 300})
    if joint:
        both = train_tokenizer([*SOURCE, *TARGET], config)
        return TokenizerPair(both, both)
    return TokenizerPair(train_tokenizer(SOURCE, config), train_tokenizer(TARGET, config))


@torch.no_grad()
def make(config: TransformerConfig, tokenizers: TokenizerPair | None = None) -> Transformer:
    """A model of larger random parameters than a new one has."""
    tokenizers = tokenizers or vocabularies()
    model = Transformer(config, tokenizers.source.vocab_size, tokenizers.target.vocab_size).eval()
    for name, parameter in model.named_parameters():
        size = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
        parameter.copy_(float(name.endswith("norm.weight")) + size * torch.randn_like(parameter))
    return model


def taught(config: TransformerConfig, tokenizers: TokenizerPair, steps: int = 150) -> Transformer:
    """A model that has begun to learn to copy, so that its translations end, and differ.

    PAD and BOS are very improbable, so that it changes nothing whether a distribution has them.
    """
    model = Transformer(config, tokenizers.source.vocab_size, tokenizers.target.vocab_size)
    parameters = dict(model.named_parameters())
    table = parameters.get("output_weight", parameters["target_embedding"])
    last = "decoder_norm" if config.norm_first else f"decoder.{config.decoder_layers - 1}.around_feed_forward.norm"
    with torch.no_grad():
        everywhere = nn.functional.normalize(torch.randn(config.dim), dim=0)  # a direction that all hidden vectors have
        parameters[f"{last}.bias"] += 6 * everywhere
        table[[PAD, BOS]] = -3 * everywhere
    optimizer = torch.optim.Adam(model.parameters(), 8e-3)
    words = tokenizers.target.vocab_size - EOS - 1
    for _ in range(steps):
        rows = sources(tokenizers, 32, longest=8)
        said = [[BOS, *(EOS + 1 + number % words for number in row)] for row in rows]
        loss = model.loss(Batch(batch(rows), batch(said)))
        (loss.total / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def sources(tokenizers: TokenizerPair, count: int = 8, longest: int = 15) -> list[list[int]]:
    """Sentences of unequal lengths."""
    lengths = torch.randint(1, longest + 1, (count,)).tolist()
    return [torch.randint(EOS + 1, tokenizers.source.vocab_size, (length,)).tolist() for length in lengths]


def batch(rows: list[list[int]]) -> Tensor:
    """Rows of tokens with EOS, padded."""
    return nn.utils.rnn.pad_sequence([torch.tensor([*row, EOS]) for row in rows], batch_first=True, padding_value=PAD)


def searched(model: Transformer, rows: list[list[int]], **options: Any) -> list[Hypothesis]:
    """The best that weft's own search finds for each row."""
    asked = SearchOptions(**{"beam": 1, "max_ratio": 0.0, "max_extra": LIMIT, **options})
    search = greedy if asked.beam == 1 else beam
    return [best[0] for best in search(model, batch(rows), asked)]
