"""The output layer and its losses in one: those of torch on the same numbers, and the bits whatever the threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.test_steady import threads
from weft.kernels import cross_entropy, native, output
from weft.kernels.compiled import compiled, multiplies
from weft.kernels.cross_entropy import linear_cross_entropy, linear_rdrop

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with compiled("losses"):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many passes each compiled call had."""
    found: list[int] = []
    losses = output.losses

    def counted(weight: Tensor, passes: list[Tensor], *rest: float) -> output.Found:
        found.append(len(passes))
        return losses(weight, passes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(output, "losses", counted)
    return found


Told = tuple[list[Tensor], tuple[Tensor, ...]]


def one(hidden: list[Tensor], weight: Tensor, targets: Tensor, loss: Callable[..., cross_entropy.CrossEntropy]) -> Told:
    found = loss(hidden[0], weight, targets, smoothing=0.1)
    return [found.total.detach(), found.nll], torch.autograd.grad(found.total * 0.5, (hidden[0], weight))


def two(hidden: list[Tensor], weight: Tensor, targets: Tensor, loss: Callable[..., cross_entropy.RDrop]) -> Told:
    found = loss(*hidden, weight, targets, smoothing=0.1, apart=1.7)
    return [found.total.detach(), found.nll, found.divergence], torch.autograd.grad(
        found.total * 0.5, (*hidden, weight)
    )


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, *([torch.bfloat16] if multiplies(torch.bfloat16) else [])], ids=str
)


@DTYPES
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("rows", "dim", "words"),
    [(1, 128, 5), (40, 32, 65), (33, 48, 16), (333, 80, 77), (1500, 128, 1003), (300, 64, 9000), (70, 32, 33000)],
)
def test_losses_and_gradients_are_torchs(
    rows: int, dim: int, words: int, passes: int, dtype: torch.dtype, calls: list[int]
) -> None:
    """Of the same factors in fp32: in bf16 logits, and their gradients, are rounded once."""
    narrow = dtype == torch.bfloat16
    torch.manual_seed(rows)
    hidden = [torch.randn(rows, dim).to(dtype).requires_grad_() for _ in range(2)]
    weight, targets = (0.3 * torch.randn(words, dim)).requires_grad_(), torch.randint(words, (rows,))
    targets[1::5] = -100
    found = []
    for count in (1, 2, 3):
        with threads(count):
            given = hidden, weight, targets
            found.append(two(*given, linear_rdrop) if passes == 2 else one(*given, linear_cross_entropy))
    assert calls == [passes] * 3
    for other in found[1:]:
        assert all(torch.equal(a, b) for x, y in zip(found[0], other, strict=True) for a, b in zip(x, y, strict=True))
    wide = [x.detach().float().requires_grad_() for x in hidden]
    plain = wide, weight.detach().to(dtype).float().requires_grad_(), targets
    expected = two(*plain, cross_entropy.rdrop_reference) if passes == 2 else one(*plain, cross_entropy.reference)
    torch.testing.assert_close(found[0][0], expected[0], rtol=1e-5, atol=0.03 * math.sqrt(rows) if narrow else 1e-3)
    for mine, reference in zip(found[0][1], expected[1], strict=True):
        assert (mine.float() - reference).norm() < (0.03 if narrow else 1e-5) * reference.norm()


@DTYPES
def test_no_row_no_gradient_no_number_and_a_mistake_in_one_row_alone(dtype: torch.dtype, calls: list[int]) -> None:
    weight = torch.randn(50, 32, requires_grad=True)
    nobody = linear_cross_entropy(torch.randn(4, 32).to(dtype), weight, torch.full((4,), -100))
    assert nobody.total == 0
    assert torch.equal(torch.autograd.grad(nobody.total, weight)[0], torch.zeros(50, 32))
    hidden, targets = torch.randn(70, 32).to(dtype), torch.arange(70) % 50
    with torch.no_grad():
        untrained = linear_cross_entropy(hidden, weight, targets)
    assert not untrained.total.requires_grad
    trained = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    assert torch.equal(untrained.total, trained.total.detach())
    broken = hidden.detach().clone()
    broken[3, 1] = torch.nan
    found = linear_cross_entropy(broken.requires_grad_(), weight, targets)
    assert found.total.isnan()
    found.total.backward()
    expected = torch.autograd.grad(trained.total, hidden)[0]
    others = torch.arange(70) != 3
    assert broken.grad is not None
    assert torch.equal(broken.grad[others], expected[others])
    assert calls == [1] * 4


def test_other_layers_go_chunk_by_chunk(calls: list[int]) -> None:
    hidden, weight = torch.randn(9, 32), torch.randn(50, 32)
    targets, bias = torch.arange(9), torch.randn(50)
    for given in (
        (hidden, weight, targets, bias),
        (hidden.double(), weight.double(), targets),
        (hidden, torch.randn(32, 50).t(), targets),
        (torch.randn(9, 20), torch.randn(50, 20), targets),
    ):
        linear_cross_entropy(*given)
    with compiled():
        linear_cross_entropy(hidden, weight, targets)
    assert calls == []
