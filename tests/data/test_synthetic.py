"""The tasks are what they say, follow from the seed, and keep what is held out apart."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.data.synthetic import BOS, EOS, FIRST, PAD, TASKS, Batch, Task, is_held_out

ANSWERS = {"copy": list, "reverse": lambda symbols: symbols[::-1], "sort": sorted}


def words(rows: Tensor) -> list[list[int]]:
    """Each row without its padding, which must be at the right."""
    found = []
    for row in rows.tolist():
        length = row.index(PAD) if PAD in row else len(row)
        assert set(row[length:]) <= {PAD}
        found.append(row[:length])
    return found


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=25)
@given(symbols=st.integers(5, 30), shortest=st.integers(3, 5), more=st.integers(0, 6), seed=st.integers(0, 2**31))
def test_pairs_are_right(name: str, symbols: int, shortest: int, more: int, seed: int) -> None:
    task = Task(name, symbols, shortest, shortest + more)
    for held_out in (False, True):
        source, target = next(task.batches(16, seed, held_out))
        assert source.dtype == target.dtype == torch.int64
        assert len(source) == len(target) == 16
        longest = 0
        for read, said in zip(words(source), words(target), strict=True):
            assert read[-1] == EOS
            assert said[0] == BOS
            assert said[-1] == EOS
            read, said = read[:-1], said[1:-1]
            assert shortest <= len(read) <= shortest + more
            assert all(FIRST <= token < task.vocab_size for token in read)
            assert said == ANSWERS[name](read)
            longest = max(longest, len(read))
        assert source.shape[1] == longest + 1  # no more padding than needed
        assert target.shape[1] == longest + 2


def test_a_seed_gives_the_same_batches_and_leaves_torch_alone() -> None:
    task = Task("reverse")
    before = torch.get_rng_state()

    def first(seed: int) -> list[Batch]:
        return list(islice(task.batches(8, seed), 3))

    for one, two in zip(first(1), first(1), strict=True):
        assert torch.equal(one.source, two.source)
        assert torch.equal(one.target, two.target)
    assert not torch.equal(first(1)[0].source, first(2)[0].source)
    assert not torch.equal(first(1)[0].source, first(1)[1].source)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_symbol_and_length_comes_up() -> None:
    task = Task("copy", num_symbols=4, min_len=2, max_len=5)
    seen = words(next(task.batches(2000, 0)).source)
    lengths = [len(word) - 1 for word in seen]
    assert {length: 400 < lengths.count(length) < 600 for length in set(lengths)} == dict.fromkeys(range(2, 6), True)
    assert {token for word in seen for token in word[:-1]} == set(range(FIRST, FIRST + 4))


def test_what_is_held_out_is_never_trained_on() -> None:
    task = Task("sort", num_symbols=3, min_len=1, max_len=5)  # 363 sequences: all of them come up
    sides = []
    for held_out in (False, True):
        batches = islice(task.batches(500, 0, held_out), 20)
        sides.append({tuple(word) for batch in batches for word in words(batch.source)})
    assert sides[0] & sides[1] == set()
    assert len(sides[0] | sides[1]) == 3 + 9 + 27 + 81 + 243
    assert 0.05 < len(sides[1]) / 363 < 0.25
    rows = torch.tensor([list(word[:-1]) + [PAD] * (6 - len(word)) for word in sorted(sides[1])])
    assert is_held_out(rows).all()
    assert is_held_out(torch.nn.functional.pad(rows, (0, 3))).all()  # padding makes no difference


def test_bad_tasks_are_named() -> None:
    with pytest.raises(ValueError, match="copy, reverse, sort, not 'revers'"):
        Task("revers")
    for wrong in ({"num_symbols": 0}, {"min_len": 0}, {"min_len": 5, "max_len": 4}):
        with pytest.raises(ValueError, match="expected num_symbols ≥ 1 and 1 ≤ min_len ≤ max_len"):
            Task("copy", **wrong)
    one_word = Task("copy", num_symbols=1, min_len=1, max_len=1)
    word = torch.tensor([[FIRST]])
    with pytest.raises(ValueError, match="too few sequences"):
        next(one_word.batches(4, 0, held_out=not is_held_out(word).item()))
