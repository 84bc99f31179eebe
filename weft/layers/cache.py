"""The keys and values of a decoder's past, a length per row.

A step appends what is new and attends to all there is; a search selects rows, cuts them back and
joins batches. A cache behaves as a value: what one holder appends, no other holder sees.

In steady mode (kernels/steady.py) what is read is as wide as whole blocks of keys, which spares attention the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels.steady import is_steady, pad_length
from weft.layers.lengths import Lengths


@dataclass(eq=False)
class _Store:
    """The memory behind one or more caches, and how far each row of it has been written."""

    keys: Tensor  # [B, G, capacity, D]
    values: Tensor  # [B, G, capacity, E]
    written: Lengths


class KVCache:
    """Keys [B, G, M, D] and values [B, G, M, E] with ``lengths`` [B] of them real in each row.

    ``longest`` is the length of the longest row; ``size`` says the same and more without a tensor.
    """

    def __init__(self, store: _Store | None, size: Lengths) -> None:
        """Use ``KVCache.empty`` to make one."""
        self._store = store
        self.size = size
        self.longest = size.longest

    @classmethod
    def empty(cls, batch: int, device: torch.device | str | None = None) -> KVCache:
        """A cache of ``batch`` rows with nothing in it.

        Raises:
            ValueError: if batch is negative.
        """
        if batch < 0:
            raise ValueError(f"a cache needs a batch of 0 rows or more, not {batch}")
        return cls(None, Lengths.same(batch, 0, torch.empty(0, device=device).device))

    @property
    def lengths(self) -> Tensor:
        """[B] how many keys and values each row has."""
        return self.size.tensor

    @property
    def width(self) -> int:
        """How many keys and values there are to read: ``longest``, in steady mode a padded length."""
        return pad_length(self.longest) if is_steady() else self.longest

    @property
    def hides(self) -> bool:
        """Whether there is something to read that is no key of its row: behind a shorter one's end, or padding."""
        return not self.size.alike or self.width > self.longest

    @property
    def keys(self) -> Tensor:
        """[B, G, width, D]; what lies behind a row's length is undefined, but finite."""
        return self.entries[0]

    @property
    def values(self) -> Tensor:
        """[B, G, width, E]; what lies behind a row's length is undefined, but finite."""
        return self.entries[1]

    @property
    def entries(self) -> tuple[Tensor, Tensor]:
        """``keys`` and ``values``."""
        store, width = self._filled(), self.width
        return store.keys[:, :, :width], store.values[:, :, :width]

    def append(self, keys: Tensor, values: Tensor, counts: Tensor | None = None) -> KVCache:
        """The cache with N more keys and values in each row.

        Args:
            keys: [B, G, N, D].
            values: [B, G, N, E].
            counts: [B] how many of the N are real in each row (the first ones); all if None.

        Raises:
            ValueError: if the shapes do not fit the cache.
        """
        self._check(keys, values, counts)
        n = keys.shape[2]
        size = self.size.plus(n) if counts is None else Lengths.of(self.lengths + counts)
        store = self._writable(keys, values, self.longest + n)
        if self.size.alike:
            store.keys.narrow(2, self.longest, n).copy_(keys)
            store.values.narrow(2, self.longest, n).copy_(values)
        else:
            rows = torch.arange(self.size.rows, device=keys.device)[:, None]
            places = self.lengths[:, None] + torch.arange(n, device=keys.device)  # [B, N]
            store.keys[rows, :, places] = keys.transpose(1, 2)
            store.values[rows, :, places] = values.transpose(1, 2)
        store.written = size
        return KVCache(store, size)

    def select(self, rows: Tensor) -> KVCache:
        """The rows with these numbers, in this order; a row may be taken twice."""
        chosen = KVCache(None, self.size.select(rows))
        if self._store is not None:
            room = pad_length(chosen.longest + 1)
            # In one pass, with what lies behind the ends of rows: a beam search does this at each step.
            parts = (part[:, :, :room].index_select(0, rows) for part in (self._store.keys, self._store.values))
            keys, values = (_with_room(part, room) for part in parts)
            chosen._store = _Store(keys, values, chosen.size)
        return chosen

    def truncate(self, lengths: Tensor) -> KVCache:
        """The cache with each row cut back to its first ``lengths[b]`` entries.

        Raises:
            ValueError: if a length is negative or longer than its row.
        """
        if lengths.shape != self.lengths.shape or bool(((lengths < 0) | (lengths > self.lengths)).any()):
            raise ValueError(f"cannot cut rows of lengths {self.lengths.tolist()} to {lengths.tolist()}")
        return KVCache(self._store, Lengths.of(lengths))

    @staticmethod
    def cat(caches: Sequence[KVCache]) -> KVCache:
        """All rows of all caches, one after the other.

        Raises:
            ValueError: if there are none, or some are empty and some are not.
        """
        if not caches:
            raise ValueError("cat needs at least one cache")
        size = Lengths.of(torch.cat([cache.lengths for cache in caches]))
        stores = [cache._store for cache in caches if cache._store is not None]
        if not stores:
            return KVCache(None, size)
        if len(stores) != len(caches):
            raise ValueError("cannot join caches that hold something with caches that hold nothing")
        room = pad_length(max(cache.longest for cache in caches))

        def join(parts: list[Tensor]) -> Tensor:
            whole = parts[0].new_zeros(size.rows, parts[0].shape[1], room, parts[0].shape[3])
            row = 0
            for part in parts:
                width = min(room, part.shape[2])
                whole[row : row + part.shape[0], :, :width] = part[:, :, :width]
                row += part.shape[0]
            return whole

        store = _Store(join([s.keys for s in stores]), join([s.values for s in stores]), size)
        return KVCache(store, size)

    def _filled(self) -> _Store:
        if self._store is None:
            raise ValueError("the cache is empty: append before reading keys and values")
        return self._store

    def _check(self, keys: Tensor, values: Tensor, counts: Tensor | None) -> None:
        held = (None, None) if self._store is None else (self._store.keys, self._store.values)
        if counts is None and held[0] is not None and held[1] is not None and keys.dim() == 4:
            (b, g, _, d), n = held[0].shape, keys.shape[2]
            if keys.shape == (b, g, n, d) and values.shape == (b, g, n, held[1].shape[3]):
                return
        for name, new, old in (("keys", keys, held[0]), ("values", values, held[1])):
            expected: list[int | str] = [self.size.rows, "G", "N", "D"]
            if old is not None:
                expected[1], expected[3] = old.shape[1], old.shape[3]
            if new.dim() != 4 or any(isinstance(e, int) and e != g for e, g in zip(expected, new.shape, strict=True)):
                raise ValueError(f"{name} of shape {list(new.shape)} do not fit the cache: expected {expected}")
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} must have the same B, G and N")
        if counts is not None and (
            counts.shape != self.lengths.shape or bool(((counts < 0) | (counts > keys.shape[2])).any())
        ):
            raise ValueError(f"counts must be [B] between 0 and {keys.shape[2]}, not {counts.tolist()}")

    def _writable(self, keys: Tensor, values: Tensor, needed: int) -> _Store:
        """A store with room for ``needed``, in which nobody else has written past this cache's rows."""
        store = self._store
        tracked = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)  # autograd keeps the old
        fits = store is not None and store.keys.shape[2] >= needed and store.written.equal(self.size)
        if store is not None and fits and not tracked and not store.keys.requires_grad:
            return store
        room = max(needed, self.longest * 3 // 2)
        grown = _Store(_with_room(keys[:, :, :0], room), _with_room(values[:, :, :0], room), self.size)
        if store is not None:
            grown.keys[:, :, : self.longest] = store.keys[:, :, : self.longest]
            grown.values[:, :, : self.longest] = store.values[:, :, : self.longest]
        return grown


def _with_room(entries: Tensor, room: int) -> Tensor:
    """The entries [B, G, n, D] if n is room enough, or at the start of a store that has as much, padded."""
    n = entries.shape[2]
    if n >= room:
        return entries
    store = entries.new_zeros(*entries.shape[:2], pad_length(room), entries.shape[3])
    store[:, :, :n] = entries
    return store
