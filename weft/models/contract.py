"""What every model promises to training and to the searches.

Training calls ``loss``. A search calls ``start`` once, ``step`` as often as it likes and ``logits`` where it wants to
know the next token::

    state = model.start(source)                          # source [B, N], padded at the right
    tokens = model.first(source)[:, None]                # BOS, or the last token of a prompt
    hidden, state = model.step(tokens, state)            # tokens [B, T ≥ 1] -> hidden [B, T, D]
    scores = model.logits(hidden[:, -1]).log_softmax(-1) # [B, V]

To a language model the source is a prompt, and the target goes on from it. Stepping in any portions gives the hidden
states of the whole at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from weft.config import Specials


@dataclass(frozen=True)
class Loss:
    """Sums and a count apart, so that accumulated batches and ranks are weighted by tokens exactly.

    Attributes:
        total: what is differentiated: a sum over target tokens.
        count: how many target tokens there were.
        parts: other sums over the same tokens, without gradient: "nll" (without label smoothing), "rdrop", …
    """

    total: Tensor
    count: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)


class Pairs(Protocol):
    """A batch of pairs, each side padded with PAD at the right."""

    @property
    def source(self) -> Tensor:
        """[B, N] tokens, EOS, padding."""

    @property
    def target(self) -> Tensor:
        """[B, T + 1] BOS, tokens, EOS, padding: a decoder reads all but the last and should say all but the first."""


class State(Protocol):
    """A decoder's past. It is a value: what one holder does, no other holder sees. Each row has its own length."""

    @property
    def lengths(self) -> Tensor:
        """[B] how many tokens each row has consumed."""

    def select(self, rows: Tensor) -> Self:
        """The rows with these numbers [R], in this order; a row may be taken twice."""

    def truncate(self, lengths: Tensor) -> Self:
        """Each row cut back to its first ``lengths[b]`` tokens."""

    @staticmethod
    def cat(states: Sequence[Any]) -> Any:
        """All rows of all states, one after the other."""


class Steps(Protocol):
    """What a search calls: a model, or the same model compiled.

    Attributes:
        specials: the token numbers of its vocabulary that mean something to a search; whoever loads the model sets
            them where they are not weft's own.
        cross_attentions: the names, in named_modules(), of the attentions from target to source; none if it has none.
        max_len: the longest source or target that it can take; None for any.
    """

    specials: Specials
    cross_attentions: tuple[str, ...]
    max_len: int | None

    def start(self, inputs: Tensor) -> State:
        """The state before the first target token, from source tokens [B, N]."""

    def first(self, inputs: Tensor) -> Tensor:
        """[B] the token that the first step after ``start(inputs)`` consumes."""

    def room(self, inputs: Tensor) -> Tensor | None:
        """[B] how many target tokens there is room for, the end not counted; None for any number."""

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, D] and the state after them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token [..., V] in fp32, of hidden [..., D]."""


class Seq2Seq(Steps, Protocol):
    """A model from source tokens to target tokens. It is an nn.Module too.

    Attributes:
        precision: of the activations, fp32 or bf16; parameters stay fp32. Whoever trains or loads the model sets it.
    """

    precision: torch.dtype

    def loss(self, batch: Pairs, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        """The loss of the targets given the sources; rdrop > 0 adds that times the divergence of two passes."""
