"""The state of every decoder: what was made of the source once, and what was kept of the target so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.mask import Mask
from weft.kernels.steady import is_steady, padded
from weft.layers.cache import KVCache
from weft.layers.lengths import Lengths


@dataclass(frozen=True, eq=False)
class DecoderState:
    """A decoder's past, as weft.models.contract.State says. Each family says what it puts in.

    Attributes:
        source: what was made of the source, each [B, …, M, D].
        source_lengths: [B] how many of the M source positions are real.
        caches: an entry for each target token in each of them, so that any earlier length can be gone back to.
        mask: of the source's padding; kept, since a mask remembers what kernels made of it.
        alone: whether all rows go on from one source, as the beam of a single sentence does. What was made of it is
            then there once, and the mask serves any number of rows.
    """

    source: tuple[Tensor, ...]
    source_lengths: Tensor
    caches: tuple[KVCache, ...]
    mask: Mask
    alone: bool = False

    @classmethod
    def of(cls, source: tuple[Tensor, ...], source_lengths: Tensor, caches: tuple[KVCache, ...]) -> DecoderState:
        """The state with the mask that these lengths make."""
        return cls(source, source_lengths, caches, Mask(lengths=source_lengths), len(source_lengths) == 1)

    @property
    def size(self) -> Lengths:
        """How many tokens each row has consumed."""
        return self.caches[0].size

    @property
    def lengths(self) -> Tensor:
        """[B] the same as a tensor."""
        return self.size.tensor

    def with_caches(self, caches: Sequence[KVCache]) -> DecoderState:
        """The same source, another target."""
        return DecoderState(self.source, self.source_lengths, tuple(caches), self.mask, self.alone)

    def select(self, rows: Tensor) -> DecoderState:
        """The rows with these numbers [R], in this order; a row may be taken twice."""
        caches, parts = tuple(cache.select(rows) for cache in self.caches), (self.source_lengths, *self.source)
        if not self.alone:
            lengths, *source = (part.index_select(0, rows) for part in parts)
            return self.of(tuple(source), lengths, caches)
        if len(rows) != self.size.rows:
            parts = tuple(part[:1].expand(len(rows), *part.shape[1:]) for part in parts)
        return DecoderState(parts[1:], parts[0], caches, self.mask, alone=True)

    def truncate(self, lengths: Tensor) -> DecoderState:
        """Each row cut back to its first ``lengths[b]`` tokens.

        Raises:
            ValueError: if a length is negative or longer than its row.
        """
        return self.with_caches([cache.truncate(lengths) for cache in self.caches])

    @staticmethod
    def cat(states: Sequence[DecoderState]) -> DecoderState:
        """All rows of all states, one after the other; what is made of shorter sources is padded with zeros.

        Raises:
            ValueError: if there are none.
        """
        if not states:
            raise ValueError("cat needs at least one state")
        parts = zip(*(state.source for state in states), strict=True)
        caches = zip(*(state.caches for state in states), strict=True)
        return DecoderState.of(
            tuple(map(_join, parts)),
            torch.cat([state.source_lengths for state in states]),
            tuple(map(KVCache.cat, caches)),
        )


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Parts [Bᵢ, …, Mᵢ, D] padded to the widest, one after the other: [ΣB, …, max M, D]."""
    widest = max(part.shape[-2] for part in parts)
    return torch.cat([F.pad(part, (0, 0, 0, widest - part.shape[-2])) for part in parts])


def kept(memory: Tensor) -> Tensor:
    """A memory [B, …, M, D] for many steps to attend to: in steady mode it is padded here, and not at each step."""
    return padded(memory, -2) if is_steady() else memory


def new_caches(*like: tuple[Tensor, Tensor]) -> tuple[KVCache, ...]:
    """A cache for keys and values like each of these [B, G, ·, D], with nothing in it.

    They know the shapes, so that a state that has not begun can be joined to one that has; and they grow alike, so
    that what one remembers of its lengths serves the others.
    """
    keys, _ = like[0]
    nothing = KVCache.empty(len(keys), keys.device)
    return tuple(nothing.append(keys[:, :, :0], values[:, :, :0]) for keys, values in like)


def last_entries(cache: KVCache, n: int) -> tuple[Tensor, Tensor]:
    """The last n keys [B, G, n, D] and values [B, G, n, E] of each row; zeros for what was before its first."""
    places = cache.lengths[:, None] - n + torch.arange(n, device=cache.lengths.device)  # [B, n]
    rows = torch.arange(len(places), device=places.device)[:, None]
    before = (places < 0)[:, None, :, None]

    def take(entries: Tensor) -> Tensor:
        if entries.shape[2] == 0:
            return entries.new_zeros(*entries.shape[:2], n, entries.shape[3])
        return entries[rows, :, places.clamp(min=0)].transpose(1, 2).masked_fill(before, 0.0)

    return take(cache.keys), take(cache.values)
