"""A model whose every distribution can be looked up: searches are tested against plain Python over the same table."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from weft import observe
from weft.config import BOS, EOS, PAD, Specials
from weft.models.contract import Loss, Pairs

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class TableState:
    """Each row's source and what it has consumed, BOS first."""

    sources: tuple[Tokens, ...]
    pasts: tuple[Tokens, ...]

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(past) for past in self.pasts], dtype=torch.int64)

    def select(self, rows: Tensor) -> TableState:
        chosen = rows.tolist()
        return TableState(tuple(self.sources[r] for r in chosen), tuple(self.pasts[r] for r in chosen))

    def truncate(self, lengths: Tensor) -> TableState:
        pasts = (past[:n] for past, n in zip(self.pasts, lengths.tolist(), strict=True))
        return TableState(self.sources, tuple(pasts))

    @staticmethod
    def cat(states: Sequence[TableState]) -> TableState:
        return TableState(sum((s.sources for s in states), ()), sum((s.pasts for s in states), ()))


class Attention(nn.Module):
    """Shows weights that were looked up."""

    def forward(self, weights: Tensor) -> None:
        observe.see(self, "weights", lambda: {"weights": weights})


class TableModel(nn.Module):
    """logits = a fixed random function of the source and all target tokens before.

    Args:
        vocab_size: PAD, BOS, EOS, UNK among them.
        seed: another seed, another table.
        spread: of the logits; 0 makes all equal.
        end: added to EOS's logit.
        growth: the spread grows by this factor with every token: later choices are surer.
        levels: logits are rounded to so many steps a unit, for ties; 0: not.
        heads: of each of the two attentions to the source; 0: the model has none.
        max_len: as in the contract.
    """

    precision = torch.float32
    specials = Specials()

    def __init__(
        self,
        vocab_size: int = 7,
        seed: int = 0,
        spread: float = 1.0,
        end: float = 0.0,
        growth: float = 1.0,
        levels: int = 0,
        heads: int = 0,
        max_len: int | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.vocab_size, self.seed, self.spread, self.end = vocab_size, seed, spread, end
        self.growth, self.levels = growth, levels
        self.heads, self.max_len, self.dtype = heads, max_len, dtype
        self.attentions = nn.ModuleList(Attention() for _ in range(2 if heads else 0))
        self.cross_attentions = tuple(f"attentions.{i}" for i in range(2 if heads else 0))
        self.rows: list[int] = []  # how many rows each step had
        self._logits: dict[tuple[Tokens, Tokens], list[float]] = {}

    def table(self, source: Tokens, past: Tokens) -> list[float]:
        """The logits after ``past`` (BOS first)."""
        key = (source, past)
        if key not in self._logits:
            draw = random.Random(repr((self.seed, key)))
            spread = self.spread * self.growth ** (len(past) - 1)
            logits = [draw.gauss(0.0, spread) for _ in range(self.vocab_size)]
            logits[EOS] += self.end
            self._logits[key] = [round(x * self.levels) / self.levels for x in logits] if self.levels else logits
        return self._logits[key]

    def log_probs(self, source: Tokens, past: Tokens) -> list[float]:
        logits = self.table(source, past)
        whole = max(logits) + math.log(math.fsum(math.exp(x - max(logits)) for x in logits))
        return [x - whole for x in logits]

    def weights(self, source: Tokens, past: Tokens, layer: int, head: int) -> list[float]:
        """Where this head looks after ``past``: one weight a source token, which sum to 1."""
        draw = random.Random(repr((self.seed, layer, head, source, past)))
        parts = [draw.random() ** 4 for _ in source]
        return [part / sum(parts) for part in parts]

    def mean_weights(self, source: Tokens, past: Tokens) -> list[float]:
        each = [self.weights(source, past, i, h) for i in range(2) for h in range(self.heads)]
        return [sum(column) / len(each) for column in zip(*each, strict=True)]

    def start(self, inputs: Tensor) -> TableState:
        sources = tuple(tuple(t for t in row if t != PAD) for row in inputs.tolist())
        return TableState(sources, tuple(() for _ in sources))

    def first(self, inputs: Tensor) -> Tensor:
        return torch.full((len(inputs),), BOS)

    def room(self, inputs: Tensor) -> Tensor | None:
        return None if self.max_len is None else torch.full((len(inputs),), self.max_len - 1)

    def step(self, tokens: Tensor, state: TableState) -> tuple[Tensor, TableState]:
        assert not self.training
        assert not torch.is_grad_enabled()
        assert tokens.dim() == 2
        assert len(tokens) == len(state.pasts)
        self.rows.append(len(tokens))
        news = [tuple(row) for row in tokens.tolist()]
        each = [
            [past + new[: t + 1] for t in range(len(new))] for past, new in zip(state.pasts, news, strict=True)
        ]  # every position's past
        hidden = [[self.table(s, past) for past in pasts] for s, pasts in zip(state.sources, each, strict=True)]
        for layer, attention in enumerate(self.attentions):
            width = max(map(len, state.sources)) + 3  # a model may pad more than it was given
            weights = torch.zeros(len(news), self.heads, tokens.shape[1], width)
            for r, (source, pasts) in enumerate(zip(state.sources, each, strict=True)):
                for h, (t, past) in product(range(self.heads), enumerate(pasts)):
                    weights[r, h, t, : len(source)] = torch.tensor(self.weights(source, past, layer, h))
            attention(weights)
        return torch.tensor(hidden, dtype=self.dtype), TableState(state.sources, tuple(pasts[-1] for pasts in each))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def loss(self, batch: Pairs, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        raise NotImplementedError


def batch(sources: Sequence[Sequence[int]]) -> Tensor:
    """Sources with EOS, padded: [B, N]."""
    longest = max(map(len, sources), default=0) + 1
    rows = [[*s, EOS, *[PAD] * (longest - len(s) - 1)] for s in sources]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), longest)


def every_target(model: TableModel, source: Sequence[int], limit: int, skip: Tokens = ()) -> Iterator[dict[str, Any]]:
    """All targets of up to ``limit`` tokens that end with EOS: tokens, log_prob and coverage, by brute force."""
    whole = (*source, EOS)
    words = [t for t in range(model.vocab_size) if t not in (PAD, BOS, EOS, *skip)]
    for length in range(limit + 1):
        for tokens in product(words, repeat=length):
            pasts = [(BOS, *tokens[:t]) for t in range(length + 1)]
            said = zip(pasts, (*tokens, EOS), strict=True)
            parts = tuple(model.log_probs(whole, past)[token] for past, token in said)
            coverage = [0.0] * len(source)
            if model.heads:
                looks = [model.mean_weights(whole, past) for past in pasts]
                coverage = [sum(look[j] for look in looks) for j in range(len(source))]
            yield {"tokens": tokens, "parts": parts, "log_prob": sum(parts), "coverage": coverage}
