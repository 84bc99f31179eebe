"""The named masks against pictures, torch's triangles and plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels.mask import Mask
from weft.layers import masks


def picture(text: str) -> Tensor:
    """A boolean matrix from rows of ■ and ·."""
    return torch.tensor([[mark == "■" for mark in row.split()] for row in text.strip().splitlines()])


def matrix(mask: Mask, n: int, m: int | None = None) -> Tensor:
    """The matrix of a mask that is the same for all rows and heads."""
    made = mask.dense(n, n if m is None else m)
    assert made.shape[:2] == (1, 1)
    return made[0, 0]


def test_padding_of_a_list_and_of_a_tensor() -> None:
    expected = torch.stack([picture("■ ■ ■ · ·\n" * 2), picture("· · · · ·\n" * 2), picture("■ ■ ■ ■ ■\n" * 2)])
    for lengths in ([3, 0, 5], torch.tensor([3, 0, 5])):
        assert torch.equal(masks.padding(lengths).dense(2, 5)[:, 0], expected)
    with pytest.raises(ValueError, match="lengths must be whole numbers, not float32"):
        masks.padding(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="not -2"):
        masks.padding([3, -2])


def test_padding_from_tokens() -> None:
    tokens = torch.tensor([[5, 6, 7, 9], [5, 9, 9, 9], [9, 9, 9, 9]])
    lengths = masks.padding_from_tokens(tokens, pad_id=9).lengths
    assert lengths is not None
    assert lengths.tolist() == [3, 1, 0]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[5, 6, 0, 0], [0, 5, 6, 0]], "row 1 has the padding token 0 at position 0"),
        ([[5, 0, 7, 0]], "row 0 has the padding token 0 at position 1"),
        ([5, 0], r"tokens must be whole numbers \[B, M\], not torch.int64 \[2\]"),
        ([[0.5, 0.0]], "tokens must be whole numbers"),
    ],
)
def test_padding_elsewhere_than_at_the_right_is_refused(tokens: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masks.padding_from_tokens(torch.tensor(tokens), pad_id=0)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 7), st.integers(1, 8), st.integers(0, 8))
def test_triangles(n: int, size: int, open_keys: int) -> None:
    ones = torch.ones(n, n, dtype=torch.bool)
    lower = ones.tril()
    assert torch.equal(matrix(masks.causal(), n), lower)
    assert torch.equal(matrix(masks.window(size), n), lower.triu(1 - size))
    assert torch.equal(matrix(masks.window(size, causal=False), n), ones.triu(1 - size).tril(size - 1))
    prefixed = lower.clone()
    prefixed[:, :open_keys] = True
    assert torch.equal(matrix(masks.prefix(open_keys), n), prefixed)


def test_prefix_per_row() -> None:
    made = masks.prefix(torch.tensor([2, 0])).dense(3, 3)[:, 0]
    assert torch.equal(made, torch.stack([picture("■ ■ ·\n■ ■ ·\n■ ■ ■"), picture("■ · ·\n■ ■ ·\n■ ■ ■")]))


@pytest.mark.parametrize(("length", "size"), [(5, 2), (6, 3), (4, 1), (3, 7), (0, 2)])
def test_blocks_are_those_of_block_diag(length: int, size: int) -> None:
    parts = torch.arange(length).split(size) if length else ()
    expected = torch.block_diag(*(torch.ones(len(part), len(part)) for part in parts)).bool().reshape(length, length)
    assert torch.equal(matrix(masks.block(length, size), length), expected)


@pytest.mark.parametrize(("length", "size"), [(5, 0), (-1, 2)])
def test_block_refuses(length: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"not length {length} and size {size}"):
        masks.block(length, size)


def test_packed() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 1]])
    causal = picture("■ · · · ·\n■ ■ · · ·\n· · ■ · ·\n· · ■ ■ ·\n· · ■ ■ ■")
    both_ways = picture("■ ■ · · ·\n■ ■ · · ·\n· · ■ ■ ■\n· · ■ ■ ■\n· · ■ ■ ■")
    assert torch.equal(matrix(masks.packed(segments), 5), causal)
    assert torch.equal(matrix(masks.packed(segments, causal=False), 5), both_ways)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=3), st.integers(0, 2), st.booleans())
def test_packed_from_lengths_gives_each_document_its_own_square(
    documents: list[list[int]], spare: int, causal: bool
) -> None:
    total = max(sum(row) for row in documents) + spare
    made = masks.packed_from_lengths(documents, total, causal).dense(total, total).expand(len(documents), 1, -1, -1)
    for row, allowed in zip(documents, made[:, 0], strict=True):
        expected = torch.zeros(total, total, dtype=torch.bool)  # padding attends nowhere and is attended by none
        start = 0
        for length in row:
            square = torch.ones(length, length, dtype=torch.bool)
            expected[start : start + length, start : start + length] = square.tril() if causal else square
            start += length
        assert torch.equal(allowed, expected)


@pytest.mark.parametrize("row", [[3, 2], [5, -1]])
def test_packed_from_lengths_refuses(row: list[int]) -> None:
    with pytest.raises(ValueError, match=r"row 1 has documents of length \[.*at most 4 together"):
        masks.packed_from_lengths([[4], row], total=4)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int64, torch.int32, torch.uint8]),
)
def test_edges(edges: list[tuple[int, int]], self_loops: bool, directed: bool, dtype: torch.dtype) -> None:
    expected = torch.zeros(5, 5, dtype=torch.bool)
    for node in range(5):
        expected[node, node] = self_loops
    for u, v in edges:
        expected[v, u] = True
        if not directed:
            expected[u, v] = True
    given_edges = torch.tensor(edges, dtype=dtype).reshape(-1, 2).T
    assert torch.equal(matrix(masks.from_edges(given_edges, 5, self_loops, directed), 5), expected)


def test_edges_of_a_path_by_default_go_both_ways() -> None:
    path = torch.tensor([[0, 1], [1, 2]])
    assert torch.equal(matrix(masks.from_edges(path, 3), 3), picture("■ ■ ·\n■ ■ ■\n· ■ ■"))
    assert torch.equal(matrix(masks.from_edges(path, 3, directed=True), 3), picture("■ · ·\n■ ■ ·\n· ■ ■"))


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[0, 1], [1, 7]], "names node 7, but the 3 nodes are 0 … 2"),
        ([[0, -1], [1, 2]], "names node -1"),
        ([[3], [0]], "names node 3, but"),
        ([[0, 1, 2]], r"edges must be whole numbers \[2, E\], not torch.int64 \[1, 3\]"),
        ([[0.0], [1.0]], "edges must be whole numbers"),
    ],
)
def test_bad_edges_are_refused(edges: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masks.from_edges(torch.tensor(edges), 3)


def test_combine_allows_what_all_allow() -> None:
    mask = masks.combine(masks.causal(), None, masks.padding([5, 3]), masks.window(2, causal=False), masks.block(5, 3))
    first = picture("■ · · · ·\n■ ■ · · ·\n· ■ ■ · ·\n· · · ■ ·\n· · · ■ ■")
    second = picture("■ · · · ·\n■ ■ · · ·\n· ■ ■ · ·\n· · · · ·\n· · · · ·")
    assert torch.equal(mask.dense(5, 5)[:, 0], torch.stack([first, second]))


def test_combine_of_nothing_is_open_and_of_one_keeps_its_offset() -> None:
    assert masks.combine().open
    assert masks.combine(None, None).open
    assert torch.equal(matrix(masks.combine(None, masks.causal().at(2)), 1, 4), picture("■ ■ ■ ·"))
