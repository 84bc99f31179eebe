"""Texts longer than a model's context: the model sees the last part of them, and goes on for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config import Specials
from weft.decoding.steps import choose
from weft.layers import masks
from weft.models.contract import Loss, Seq2Seq, State


@dataclass(frozen=True, eq=False)
class SlidingState:
    """A past of any length, of which the model holds the last part.

    Attributes:
        inner: the model's own state, of the tokens from ``begins`` on.
        tokens: [B, M] what each row has consumed, and anything behind it.
        lengths: [B] how much that is.
        begins: [B] where what the model sees of it begins.
    """

    inner: State
    tokens: Tensor
    lengths: Tensor
    begins: Tensor

    def select(self, rows: Tensor) -> SlidingState:
        """The rows with these numbers [R], in this order; a row may be taken twice."""
        return SlidingState(self.inner.select(rows), self.tokens[rows], self.lengths[rows], self.begins[rows])

    def truncate(self, lengths: Tensor) -> SlidingState:
        """Each row cut back to its first ``lengths[b]`` tokens.

        Raises:
            ValueError: if a length is negative or longer than its row.
        """
        if bool(((lengths < 0) | (lengths > self.lengths)).any()):
            raise ValueError(f"cannot cut rows of lengths {self.lengths.tolist()} to {lengths.tolist()}")
        # A row that is cut back to before what the model sees has nothing left of it: it starts again at the next step.
        return replace(self, inner=self.inner.truncate((lengths - self.begins).clamp(min=0)), lengths=lengths)

    @staticmethod
    def cat(states: Sequence[SlidingState]) -> SlidingState:
        """All rows of all states, one after the other.

        Raises:
            ValueError: if there are none.
        """
        if not states:
            raise ValueError("cat needs at least one state")
        inner = [state.inner for state in states]
        longest = max(state.tokens.shape[1] for state in states)
        return SlidingState(
            inner[0].cat(inner),
            torch.cat([F.pad(state.tokens, (0, longest - state.tokens.shape[1])) for state in states]),
            torch.cat([state.lengths for state in states]),
            torch.cat([state.begins for state in states]),
        )


class Sliding(nn.Module):
    """A language model with a limited context as one without a limit.

    When a row's context is full, the row starts again from the last half of it, the new token counted. What the model
    sees of a text follows from the text's length alone: a long prompt, and the same tokens in any portions, come to
    the same. As long as the context is not full, all is bit for bit as without this.

    Attributes:
        model: the one that is asked.
        cross_attentions: none.
        max_len: None.
    """

    cross_attentions: tuple[str, ...] = ()
    max_len: int | None = None

    def __init__(self, model: nn.Module) -> None:
        """Make it of a language model; one without a limit to its context is left as it is."""
        super().__init__()
        self.model = model

    @property
    def precision(self) -> torch.dtype:
        """The model's."""
        return self._model.precision

    @property
    def specials(self) -> Specials:
        """The model's."""
        return self._model.specials

    def loss(self, batch: Any, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        """The model's own."""
        return self._model.loss(batch, smoothing, rdrop)

    def start(self, inputs: Tensor) -> SlidingState:
        """The state after all but the last token of each prompt [B, N].

        Raises:
            ValueError: if the model is no language model, or does not take the prompts.
        """
        lengths = masks.padding_from_tokens(inputs, self.specials.pad).lengths
        assert lengths is not None
        begins = self._begins(lengths)
        inner = self._model.start(self._windows(inputs, begins, lengths))
        if not torch.equal(inner.lengths, lengths - begins - 1):
            raise ValueError("a context slides over a text: expected a language model, not one that reads a source")
        return SlidingState(inner, inputs, lengths - 1, begins)

    def first(self, inputs: Tensor) -> Tensor:
        """[B] the last token of each prompt."""
        return self._model.first(inputs)

    def room(self, inputs: Tensor) -> Tensor | None:
        """None: for any number of tokens."""
        return None

    def step(self, tokens: Tensor, state: SlidingState) -> tuple[Tensor, SlidingState]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, D] and the state after them."""
        parts = []
        while tokens.shape[1]:
            state = self._moved(tokens[:, :1], state)
            count = tokens.shape[1]
            if self._model.max_len is not None:  # up to where the first of the rows is full
                count = min(count, self._model.max_len - int((state.lengths - state.begins).max()))
            now, tokens = tokens[:, :count], tokens[:, count:]
            hidden, inner = self._model.step(now, state.inner)
            parts.append(hidden)
            state = SlidingState(inner, _behind(state, now), state.lengths + count, state.begins)
        return torch.cat(parts, 1), state

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token [..., V] of hidden [..., D]."""
        return self._model.logits(hidden)

    @property
    def _model(self) -> Seq2Seq:
        return cast(Seq2Seq, self.model)

    def _begins(self, lengths: Tensor) -> Tensor:
        """[B] where what the model sees of a text begins, of lengths [B] the last token counted.

        A context of L is full at L; one token more, and it is the last L // 2 that the model sees: the beginning moves
        by L + 1 − L // 2, each time.
        """
        context = self._model.max_len
        if context is None:
            return torch.zeros_like(lengths)
        stride = context + 1 - max(context // 2, 1)
        return (lengths - context + stride - 1).clamp(min=0) // stride * stride

    def _moved(self, following: Tensor, state: SlidingState) -> SlidingState:
        """The state in which the model sees what it should when it consumes one token more, following [B, 1]."""
        begins = self._begins(state.lengths + 1)
        moves = begins != state.begins
        if not bool(moves.any()):
            return state
        moved, others = moves.nonzero()[:, 0], (~moves).nonzero()[:, 0]
        tokens = _behind(state, following)[moved]
        fresh = self._model.start(self._windows(tokens, begins[moved], state.lengths[moved] + 1))
        inner = fresh.cat([state.inner.select(others), fresh]) if len(others) else fresh
        return replace(state, inner=choose(inner, torch.cat([others, moved]).argsort()), begins=begins)

    def _windows(self, tokens: Tensor, begins: Tensor, lengths: Tensor) -> Tensor:
        """What the model sees of tokens [B, M], of which lengths [B] are real: [B, W], padded at the right."""
        widest = int((lengths - begins).max()) if len(tokens) else 0
        places = begins[:, None] + torch.arange(widest, device=tokens.device)
        seen = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
        return seen.masked_fill(places >= lengths[:, None], self.specials.pad)


def _behind(state: SlidingState, tokens: Tensor) -> Tensor:
    """What each row has consumed and these tokens [B, T] behind it: [B, M + T]."""
    places = state.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    longest = int(places.max()) + 1 if places.numel() else 0
    return F.pad(state.tokens, (0, max(longest - state.tokens.shape[1], 0))).scatter(1, places, tokens)
