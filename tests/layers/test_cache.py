"""The cache against plain lists of keys and values, one list a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.layers.cache import KVCache

Rows = list[list[float]]  # a row's entries, each a distinct number


def entries(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, 2, N, 3] and values [B, 2, N, 1] that carry the numbers [B, N]."""
    keys = numbers[:, None, :, None].expand(-1, 2, -1, 3) + torch.arange(2)[:, None, None] * 0.25
    return keys, -numbers[:, None, :, None].expand(-1, 2, -1, 1)


def check(cache: KVCache, rows: Rows) -> None:
    assert cache.lengths.tolist() == [len(row) for row in rows]
    assert cache.longest == max(map(len, rows), default=0)
    if not any(rows):
        return
    for b, row in enumerate(rows):
        keys, values = entries(torch.tensor([row], dtype=torch.float64))
        assert torch.equal(cache.keys[b, :, : len(row)], keys[0])
        assert torch.equal(cache.values[b, :, : len(row)], values[0])


@settings(max_examples=60)
@given(data=st.data())
def test_any_order_of_operations(data: st.DataObject) -> None:
    """Old caches are kept and used again: what happens to one must not be seen in another."""
    batch = data.draw(st.integers(1, 3))
    held: list[tuple[KVCache, Rows]] = [(KVCache.empty(batch), [[] for _ in range(batch)])]
    fresh = 0.0
    for _ in range(data.draw(st.integers(1, 8))):
        cache, rows = held[data.draw(st.integers(0, len(held) - 1))]
        operation = data.draw(st.sampled_from(["append", "append", "select", "truncate", "cat"]))
        if operation == "append":
            n = data.draw(st.integers(1, 70))
            numbers = torch.arange(len(rows) * n, dtype=torch.float64).view(len(rows), n) + fresh
            fresh += numbers.numel()
            counts = [data.draw(st.integers(0, n)) for _ in rows] if data.draw(st.booleans()) else [n] * len(rows)
            given_counts = None if counts == [n] * len(rows) else torch.tensor(counts)
            new = cache.append(*entries(numbers), given_counts)
            new_rows = [row + numbers[i, : counts[i]].tolist() for i, row in enumerate(rows)]
        elif operation == "select":
            chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
            new, new_rows = cache.select(torch.tensor(chosen)), [rows[i] for i in chosen]
        elif operation == "truncate":
            kept = [data.draw(st.integers(0, len(row))) for row in rows]
            new, new_rows = cache.truncate(torch.tensor(kept)), [row[:k] for row, k in zip(rows, kept, strict=True)]
        else:
            other, other_rows = held[data.draw(st.integers(0, len(held) - 1))]
            if (other._store is None) != (cache._store is None):
                with pytest.raises(ValueError, match="hold nothing"):
                    KVCache.cat([cache, other])
                continue
            new, new_rows = KVCache.cat([cache, other]), rows + other_rows
        held.append((new, new_rows))
        for each, its_rows in held:
            check(each, its_rows)


def test_room_is_made_ahead_and_not_copied_at_every_step() -> None:
    cache = KVCache.empty(2)
    places = set()
    for step in range(200):
        cache = cache.append(*entries(torch.full((2, 1), float(step), dtype=torch.float64)))
        places.add(cache.keys.data_ptr())
    assert len(places) <= 5
    chosen = cache.select(torch.tensor([1, 0, 1]))  # as a beam search does at every step
    there = chosen.keys.data_ptr()
    assert chosen.append(*entries(torch.zeros(3, 1, dtype=torch.float64))).keys.data_ptr() == there


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="0 rows or more, not -1"):
        KVCache.empty(-1)
    cache = KVCache.empty(2)
    with pytest.raises(ValueError, match="empty"):
        _ = cache.keys
    with pytest.raises(ValueError, match=r"keys of shape \[3, 2, 1, 3\] do not fit the cache: expected \[2, "):
        cache.append(*entries(torch.zeros(3, 1)))
    cache = cache.append(*entries(torch.zeros(2, 3)))
    with pytest.raises(ValueError, match=r"expected \[2, 2, 'N', 3\]"):
        cache.append(torch.zeros(2, 4, 1, 3), torch.zeros(2, 4, 1, 1))
    with pytest.raises(ValueError, match="same B, G and N"):
        cache.append(torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 2, 1))
    with pytest.raises(ValueError, match=r"counts must be \[B\] between 0 and 1, not \[2, 0\]"):
        cache.append(*entries(torch.zeros(2, 1)), torch.tensor([2, 0]))
    for lengths in ([4, 0], [-1, 0]):
        with pytest.raises(ValueError, match=r"cannot cut rows of lengths \[3, 3\]"):
            cache.truncate(torch.tensor(lengths))
    with pytest.raises(ValueError, match="at least one"):
        KVCache.cat([])
