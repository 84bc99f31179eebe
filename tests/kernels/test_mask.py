"""`Mask` against a loop over every pair, written from the definitions of its fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels.mask import Mask

BATCH, HEADS = 3, 2
DTYPES = st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])


@st.composite
def integers(draw: st.DrawFn, high: int, *shape: int) -> Tensor:
    """Whole numbers 0 … high; a first dimension of BATCH may also be 1."""
    if shape[0] == BATCH and draw(st.booleans()):
        shape = (1, *shape[1:])
    count = torch.Size(shape).numel()
    numbers = draw(st.lists(st.integers(0, high), min_size=count, max_size=count))
    return torch.tensor(numbers, dtype=draw(DTYPES)).reshape(shape)


@st.composite
def patterns(draw: st.DrawFn, n: int, m: int) -> Tensor:
    full = [draw(st.sampled_from(sizes)) for sizes in ((1, BATCH), (1, HEADS), (1, n), (1, m))]
    dims = draw(st.integers(2, 4))
    shape = full[-2:] if dims == 2 else [full[0], *full[-2:]] if dims == 3 else full
    count = torch.Size(shape).numel()
    return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool).reshape(shape)


@st.composite
def masks(draw: st.DrawFn, n: int, m: int, offset: int | Tensor) -> Mask:
    """Any mask of n queries and m keys: each field is there or not."""

    def maybe(strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | strategy)

    causal = draw(st.booleans())
    return Mask(
        causal=causal,
        window=maybe(st.integers(1, m + 1)),
        lengths=maybe(integers(m, BATCH)),
        segments=maybe(integers(2, BATCH, m)),
        prefix=maybe(st.integers(0, m + 1) | integers(m + 1, BATCH)) if causal else None,
        pattern=maybe(patterns(n, m)),
        offset=offset,
    )


def offsets(m: int) -> st.SearchStrategy[int | Tensor]:
    return st.integers(0, m) | integers(m, BATCH)


def by_loop(mask: Mask, n: int, m: int) -> Tensor:
    """[BATCH, HEADS, n, m], one pair at a time."""

    def row(value: Any, b: int) -> Any:
        return value if isinstance(value, int) else value[b % len(value)].tolist()

    def may_attend(b: int, h: int, i: int, j: int) -> bool:
        p = row(mask.offset, b) + i
        if mask.causal and j > p and (mask.prefix is None or j >= row(mask.prefix, b)):
            return False
        if mask.window is not None and abs(p - j) >= mask.window:
            return False
        if mask.lengths is not None and j >= row(mask.lengths, b):
            return False
        if mask.segments is not None:
            documents = row(mask.segments, b)
            if p >= m or documents[j] != documents[p]:
                return False
        if mask.pattern is not None:
            where = {2: (i, j), 3: (b, i, j), 4: (b, h, i, j)}[mask.pattern.dim()]
            index = tuple(0 if size == 1 else at for at, size in zip(where, mask.pattern.shape, strict=True))
            return bool(mask.pattern[index])
        return True

    rows = [
        [[[may_attend(b, h, i, j) for j in range(m)] for i in range(n)] for h in range(HEADS)] for b in range(BATCH)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(BATCH, HEADS, n, m)


def dense(mask: Mask, n: int, m: int) -> Tensor:
    return mask.dense(n, m).expand(BATCH, HEADS, n, m)


@settings(deadline=None, max_examples=400)
@given(st.data(), st.integers(0, 5), st.integers(0, 6))
def test_dense_is_what_the_definitions_say(data: st.DataObject, n: int, m: int) -> None:
    mask = data.draw(masks(n, m, data.draw(offsets(m))))
    mask.check(BATCH, HEADS, n, m)
    assert torch.equal(dense(mask, n, m), by_loop(mask, n, m))


@settings(deadline=None, max_examples=300)
@given(st.data(), st.integers(1, 5), st.integers(1, 6))
def test_and_allows_what_both_allow(data: st.DataObject, n: int, m: int) -> None:
    offset = data.draw(offsets(m))
    one, two = data.draw(masks(n, m, offset)), data.draw(masks(n, m, offset))
    if not (two.causal or two.window or two.segments is not None):  # its offset says nothing
        two = two.at(data.draw(offsets(m)))
    both = dense(one, n, m) & dense(two, n, m)
    assert torch.equal(dense(one & two, n, m), both)
    assert torch.equal(dense(two & one, n, m), both)


@settings(deadline=None, max_examples=50)
@given(st.data(), st.integers(1, 5))
def test_and_of_causal_masks_opens_the_shorter_prefix(data: st.DataObject, n: int) -> None:
    prefixes = st.none() | st.integers(0, n) | integers(n, BATCH)
    one, two = Mask(causal=True, prefix=data.draw(prefixes)), Mask(causal=True, prefix=data.draw(prefixes))
    assert torch.equal(dense(one & two, n, n), by_loop(one, n, n) & by_loop(two, n, n))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_and_of_segments_with_the_largest_numbers(dtype: torch.dtype) -> None:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    one = Mask(segments=torch.tensor([[least, least, most, most]], dtype=dtype))
    two = Mask(segments=torch.tensor([[least, most, most, least]], dtype=dtype))
    assert torch.equal((one & two).dense(4, 4)[0, 0], torch.eye(4, dtype=torch.bool))


def test_and_of_other_offsets_is_refused() -> None:
    with pytest.raises(ValueError, match="different offsets, 1 and 2"):
        Mask(causal=True, offset=1) & Mask(window=3, offset=2)
    with pytest.raises(ValueError, match="offset"):
        Mask(causal=True, offset=torch.tensor([1, 2])) & Mask(causal=True, offset=torch.tensor([1, 2, 3]))


def test_and_of_fields_that_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths \[2\] and \[3\]"):
        Mask(lengths=torch.tensor([1, 2])) & Mask(lengths=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"one count of rows.*'lengths': 2.*'pattern': 3"):
        Mask(lengths=torch.tensor([1, 2])) & Mask(pattern=torch.ones(3, 4, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": True},
        {"causal": True, "prefix": 0},
        {"window": 10**9},
        {"lengths": torch.tensor([0])},
        {"lengths": torch.tensor([3, 4])},
        {"segments": torch.zeros(1, 4, dtype=torch.long)},
        {"pattern": torch.ones(1, 1, dtype=torch.bool)},
    ],
)
def test_open_only_if_nothing_is_given(fields: dict[str, Any]) -> None:
    assert not Mask(**fields).open
    assert Mask().open
    assert Mask(offset=torch.tensor([3, 4])).open


def test_at_moves_the_queries() -> None:
    whole = Mask(causal=True, window=3).dense(6, 6)
    assert torch.equal(Mask(causal=True, window=3).at(4).dense(2, 6), whole[..., 4:, :])


def test_batch_is_the_number_of_rows_told_apart() -> None:
    assert Mask(causal=True, offset=7).batch == 1
    assert Mask(lengths=torch.tensor([1, 2, 3]), segments=torch.zeros(1, 4, dtype=torch.long)).batch == 3
    assert Mask(pattern=torch.ones(4, 4, dtype=torch.bool)).batch == 1
    assert Mask(pattern=torch.ones(2, 4, 4, dtype=torch.bool)).batch == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": torch.tensor([3, -1])}, "lengths must be ≥ 0, not -1"),
        ({"lengths": torch.tensor([3.0, 1.0])}, "lengths must be whole numbers, not float32"),
        ({"lengths": torch.tensor([True])}, "lengths must be whole numbers, not bool"),
        ({"lengths": 3}, "lengths must be a tensor"),
        ({"lengths": [3, 2]}, r"lengths must be a torch tensor of whole numbers, not list \[3, 2\]"),
        ({"pattern": np.ones((2, 2), dtype=bool)}, "pattern must be a torch tensor, not ndarray"),
        ({"lengths": torch.tensor([[3]])}, r"lengths must have 1 dimension, not shape \[1, 1\]"),
        ({"segments": torch.tensor([1, 2])}, r"segments must have 2 dimensions, not shape \[2\]"),
        ({"pattern": torch.ones(2, 2)}, "pattern must be boolean.*not float32"),
        ({"pattern": torch.ones(2, dtype=torch.bool)}, r"pattern must be .*not \[2\]"),
        ({"prefix": 2}, "prefix opens keys that causal=True closes"),
        ({"prefix": -2, "causal": True}, "prefix must be ≥ 0, not -2"),
        ({"offset": -1}, "offset must be ≥ 0, not -1"),
        ({"offset": 1.5}, "offset must be a torch tensor of whole numbers, not float 1.5"),
        ({"window": 0}, "window must be a whole number ≥ 1, not 0"),
        ({"window": True}, "window must be a whole number ≥ 1, not True"),
        ({"window": 2.5}, "window must be a whole number ≥ 1, not 2.5"),
        (
            {"lengths": torch.tensor([1, 2]), "segments": torch.zeros(3, 4, dtype=torch.long)},
            "one count of rows, not .*'lengths': 2, 'segments': 3",
        ),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mask(**fields)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask(lengths=torch.tensor([1, 2, 3])), "lengths has 3 rows, but the batch has 2"),
        (Mask(lengths=torch.tensor([1, 9])), "lengths go up to 9, but there are 5 keys"),
        (Mask(causal=True, offset=torch.tensor([1, 2, 3])), "offset has 3 rows, but the batch has 2"),
        (Mask(segments=torch.zeros(2, 6, dtype=torch.long)), "segments cover 6 positions, but there are 5 keys"),
        (Mask(pattern=torch.ones(4, 6, dtype=torch.bool)), r"pattern \[4, 6\] does not fit.*queries 4, keys 5"),
        (Mask(pattern=torch.ones(3, 4, 5, dtype=torch.bool)), r"pattern \[3, 4, 5\] does not fit.*batch 2"),
        (Mask(pattern=torch.ones(2, 2, 4, 5, dtype=torch.bool)), r"pattern \[2, 2, 4, 5\] does not fit.*heads 3"),
    ],
)
def test_check_names_what_does_not_fit(mask: Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask.check(batch=2, num_heads=3, n=4, m=5)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask(segments=torch.zeros(2, 6, dtype=torch.long)), "segments cover 6 positions, but there are 5 keys"),
        (Mask(pattern=torch.ones(4, 6, dtype=torch.bool)), r"pattern \[4, 6\] does not fit.*queries 4, keys 5"),
    ],
)
def test_dense_refuses_what_does_not_fit(mask: Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask.dense(4, 5)
    with pytest.raises(ValueError, match="-1"):
        Mask().dense(-1, 2)


@st.composite
def slices(draw: st.DrawFn, size: int) -> slice:
    start = draw(st.integers(0, size))
    return slice(start, draw(st.integers(start, size)))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 5), st.integers(1, 6))
def test_a_tile_is_a_part_of_the_matrix_and_nothing_lies_outside_the_span(data: st.DataObject, n: int, m: int) -> None:
    mask = data.draw(masks(n, m, data.draw(offsets(m))))
    whole = by_loop(mask, n, m)
    rows, queries, keys = data.draw(slices(BATCH)), data.draw(slices(n)), data.draw(slices(m))
    expected = whole[rows, :, queries, keys]
    assert torch.equal(mask.tile(rows, queries, keys).expand_as(expected), expected)
    seen = mask.span(queries, m)
    assert 0 <= seen.start <= seen.stop <= m
    outside = torch.ones(m, dtype=torch.bool)
    outside[seen] = False
    assert not whole[:, :, queries, outside].any()


def test_a_mask_is_a_value() -> None:
    lengths = torch.tensor([3, 3])
    mask = Mask(lengths=lengths)
    before = mask.dense(1, 3).clone()
    lengths[1] = 1
    assert torch.equal(mask.dense(1, 3), before)


@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        Mask(lengths=torch.tensor([3, 5])),
        Mask(lengths=torch.tensor([5, 5])),
        Mask(lengths=torch.tensor([5])),
        Mask(causal=True, offset=4),
        Mask(window=2),
        Mask(lengths=torch.tensor([5]), pattern=torch.zeros(1, 5, dtype=torch.bool)),
    ],
    ids=str,
)
def test_a_mask_that_shows_all_hides_nothing(mask: Mask) -> None:
    assert not mask.shows(5) or bool(mask.dense(1, 5).all())
    only_lengths = mask.positional or mask.pattern is not None
    assert only_lengths or mask.shows(5) == bool(mask.dense(1, 5).all())
