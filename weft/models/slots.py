"""The state of a compiled decoder: for each row its source, and for each of its tokens the slot of keys and values.

A slot is written once. Rows that go on from one another share the slots of their past, so to choose rows is to choose
lists of numbers; keys and values stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Memory:
    """What was made of sources, one behind the other: keys and values [layers, tokens, 2 · kv]; where each begins."""

    entries: Tensor
    starts: Tensor  # [S + 1]


class Slots:
    """Keys and values of target tokens, [layers, slots, 2 · kv], each written once; ``used`` of the slots are."""

    def __init__(self, layers: int, count: int, width: int) -> None:
        self.entries, self.count, self.used = torch.empty(layers, count, width), count, 0

    def take(self, count: int) -> Tensor | None:
        """The numbers of so many new slots; None if there are not as many."""
        if self.used + count > self.count:
            return None
        self.used += count
        return torch.arange(self.used - count, self.used, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class CompiledState:
    """A decoder's past, as weft.models.contract.State says: for each row its source and the slots of its tokens.

    Attributes:
        memory: of all sources.
        sentence: [B] which of them a row belongs to.
        slots: what the table's numbers mean.
        table: [B, T] the slots of each row's tokens.
        lengths: [B] how many of them count.
    """

    memory: Memory
    sentence: Tensor
    slots: Slots
    table: Tensor
    lengths: Tensor

    def select(self, rows: Tensor) -> CompiledState:
        """The rows with these numbers [R], in this order; a row may be taken twice."""
        return replace(self, sentence=self.sentence[rows], table=self.table[rows], lengths=self.lengths[rows])

    def truncate(self, lengths: Tensor) -> CompiledState:
        """Each row cut back to its first ``lengths[b]`` tokens.

        Raises:
            ValueError: if a length is negative or longer than its row.
        """
        if bool(((lengths < 0) | (lengths > self.lengths)).any()):
            raise ValueError(f"rows of {self.lengths.tolist()} tokens cannot be cut back to {lengths.tolist()}")
        return replace(self, lengths=lengths)

    @staticmethod
    def cat(states: Sequence[CompiledState]) -> CompiledState:
        """All rows of all states, one after the other.

        Raises:
            ValueError: if there are none.
        """
        if not states:
            raise ValueError("cat needs at least one state")
        sources, begun, sentences, tables = 0, 0, [], []
        layers, _, size = states[0].slots.entries.shape
        slots = Slots(layers, sum(state.slots.used for state in states), size)
        width = max(state.table.shape[1] for state in states)
        starts = [torch.zeros(1, dtype=torch.int64)]
        for state in states:
            sentences.append(state.sentence + sources)
            sources += len(state.memory.starts) - 1
            starts.append(state.memory.starts[1:] + starts[-1][-1])
            slots.entries[:, begun : begun + state.slots.used] = state.slots.entries[:, : state.slots.used]
            tables.append(F.pad(state.table + begun, (0, width - state.table.shape[1])))
            begun += state.slots.used
        slots.used = begun
        memory = Memory(torch.cat([state.memory.entries for state in states], 1), torch.cat(starts))
        return CompiledState(
            memory, torch.cat(sentences), slots, torch.cat(tables), torch.cat([state.lengths for state in states])
        )

    def grown(self, count: int) -> CompiledState:
        """The state with ``count`` more tokens in each row, whose slots nobody has written yet."""
        rows, width = len(self.lengths), int(self.lengths.max()) if len(self.lengths) else 0
        state, new = self, self.slots.take(rows * count)
        if new is None:  # what no row of this state goes back to is left behind
            state = self._moved(rows * count)
            new = state.slots.take(rows * count)
        assert new is not None
        table = torch.zeros(rows, width + count, dtype=torch.int32)
        table[:, :width] = state.table[:, :width]
        places = state.lengths[:, None] + torch.arange(count)
        return replace(state, table=table.scatter_(1, places, new.view(rows, count)), lengths=self.lengths + count)

    def _moved(self, more: int) -> CompiledState:
        counts = torch.arange(self.table.shape[1]) < self.lengths[:, None]
        live, place = self.table[counts].unique(return_inverse=True)
        layers, _, size = self.slots.entries.shape
        slots = Slots(layers, 2 * (len(live) + more), size)
        slots.entries[:, : len(live)] = self.slots.entries[:, live]
        slots.used = len(live)
        table = torch.zeros_like(self.table)
        table[counts] = place.to(torch.int32)
        return replace(self, slots=slots, table=table)
