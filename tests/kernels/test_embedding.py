"""Compiled embeddings: torch's own, values to the bit and gradients, whatever the threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.test_steady import threads
from weft.kernels import embedding, native, plain
from weft.kernels.compiled import compiled
from weft.kernels.embedding import embedded

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which compiled functions were asked for."""
    found: list[str] = []
    library = embedding._library()

    class Watched:
        def __getattr__(self, name: str) -> object:
            found.append(name)
            return getattr(library, name)

    monkeypatch.setattr(embedding, "_library", Watched)
    return found


def by_torch(numbers: Tensor, table: Tensor, added: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = F.embedding(numbers, table)
    return (x if added is None else x + added).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize(("rows", "length", "dim"), [(1, 1, 1), (3, 7, 20), (12, 64, 128), (40, 5, 33), (0, 4, 8)])
def test_values_and_gradients_are_torchs(
    rows: int, length: int, dim: int, has_added: bool, dtype: torch.dtype, calls: list[str]
) -> None:
    torch.manual_seed(rows)
    table, numbers = torch.randn(11, dim, requires_grad=True), torch.randint(11, (rows, length))
    added = torch.randn(length, dim, requires_grad=True) if has_added else None
    wanted = [table] if added is None else [table, added]
    expected = by_torch(numbers, table, added, dtype)
    grad = torch.randn(rows, length, dim).to(dtype)
    slopes = torch.autograd.grad(expected, wanted, grad)
    found = []
    for count in (1, 2, 3):
        with threads(count), compiled("rows"):
            y = embedded(numbers, table, added, dtype)
            assert torch.equal(y, expected)
            found.append(torch.autograd.grad(y, wanted, grad))
    assert calls == ["weft_embed", "weft_embed_back"] * 3
    for mine in found:
        for a, b, slope in zip(mine, found[0], slopes, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, slope, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 0.05)
    if dtype == torch.bfloat16:  # gradients are summed in fp32
        exact = torch.autograd.grad(by_torch(numbers, table, added, torch.float32), wanted, grad.float())
        for a, slope in zip(found[0], exact, strict=True):
            torch.testing.assert_close(a, slope, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("wrong", [-1, 11, 2**40])
def test_a_number_that_is_not_in_the_table_is_told(wrong: int) -> None:
    numbers = torch.zeros(30, 4, dtype=torch.int64)
    numbers[17, 2] = wrong
    with compiled("rows"), pytest.raises(IndexError, match="table of 11"):
        embedded(numbers, torch.randn(11, 8), None, torch.float32)


def test_the_rest_is_torchs(calls: list[str]) -> None:
    numbers, table = torch.randint(11, (3, 7)), torch.randn(11, 8)
    added = torch.randn(3, 7, 8)  # rows that stand at places of their own
    with compiled("rows"):
        assert torch.equal(embedded(numbers, table, added, torch.float32), table[numbers] + added)
        assert embedded(numbers, table.double(), None, torch.float64).dtype == torch.float64
        embedded(numbers.int(), table, None, torch.float32)
        embedded(numbers, torch.randn(8, 11).t(), None, torch.float32)
        with plain.plain():
            embedded(numbers, table, None, torch.float32)
    embedded(numbers, table, None, torch.float32)
    assert calls == []
    with compiled("rows"):
        turned = numbers.t().contiguous().t()
        assert torch.equal(embedded(turned, table, added[0], torch.float32), table[turned] + added[0])
    assert calls == ["weft_embed"]
