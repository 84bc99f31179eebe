"""Compiled losses of training: those of torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.test_steady import threads
from weft.kernels import cross_entropy, losses, native
from weft.kernels.compiled import compiled, fastest
from weft.kernels.cross_entropy import linear_cross_entropy, linear_rdrop

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with compiled("losses"):
        yield


@pytest.mark.parametrize("vocab_size", [5, 16, 1003])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compiled_losses_are_the_plain_ones(vocab_size: int, smoothing: float) -> None:
    first, second = (torch.randn(40, 12, requires_grad=True) for _ in range(2))
    weight, bias = torch.randn(vocab_size, 12, requires_grad=True), torch.randn(vocab_size, requires_grad=True)
    targets = torch.randint(vocab_size, (40,))
    targets[::7] = -100
    inputs = [first, second, weight, bias]
    found = []
    for count in (1, 2):
        with threads(count):
            one = linear_cross_entropy(first, weight, targets, bias, smoothing)
            two = linear_rdrop(first, second, weight, targets, bias, smoothing, apart=1.7)
            found.append((one.total, one.nll, two.total, two.nll, two.divergence))
    assert found[0] == found[1]
    assert [x.requires_grad for x in found[0]] == [True, False, True, False, False]
    plain_one = cross_entropy.reference(first, weight, targets, bias, smoothing)
    plain_two = cross_entropy.rdrop_reference(first, second, weight, targets, bias, smoothing, apart=1.7)
    torch.testing.assert_close([one.total, one.nll], [plain_one.total, plain_one.nll], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        [two.total, two.nll, two.divergence],
        [plain_two.total, plain_two.nll, plain_two.divergence],
        rtol=1e-5,
        atol=1e-4,
    )
    for mine, plain, used in ((one, plain_one, [first, weight, bias]), (two, plain_two, inputs)):
        for a, b in zip(torch.autograd.grad(mine.total, used), torch.autograd.grad(plain.total, used), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_targets_may_lie_apart_in_memory() -> None:
    hidden, weight = torch.randn(6, 1, 4), torch.randn(9, 4)
    tokens = torch.randint(9, (6, 2))
    apart = tokens[:, 1:]  # its flattened form is a view of every other number
    found = linear_cross_entropy(hidden, weight, apart, None)
    assert found == linear_cross_entropy(hidden, weight, apart.contiguous(), None)
    torch.testing.assert_close(found.total, F.cross_entropy(hidden[:, 0] @ weight.T, apart[:, 0], reduction="sum"))
    with pytest.raises(ValueError, match=r"targets are torch\.int32 on cpu: expected torch\.int64 on cpu"):
        linear_cross_entropy(hidden, weight, apart.int(), None)
    with pytest.raises(ValueError, match=r"targets are torch\.int64 on meta: expected torch\.int64 on cpu"):
        linear_cross_entropy(hidden, weight, apart.to("meta"), None)


@pytest.mark.parametrize("vocab_size", [5, 16, 1003])
def test_logits_in_bf16_are_taken_as_they_are_and_gradients_rounded_once(vocab_size: int) -> None:
    first, second = (3 * torch.randn(40, vocab_size, dtype=torch.bfloat16) for _ in range(2))
    targets = torch.randint(vocab_size, (40,))
    wide = first.float(), second.float()
    narrow, full = first.clone(), wide[0].clone()
    assert torch.equal(*(losses.cross_entropy(z, targets, 0.1, True) for z in (narrow, full)))
    assert torch.equal(narrow, full.bfloat16())
    costs, apart = losses.rdrop(first, second, targets, 0.1, 1.7, True)
    expected, expected_apart = losses.rdrop(*wide, targets, 0.1, 1.7, True)
    assert torch.equal(costs, expected)
    assert torch.equal(apart, expected_apart)
    assert torch.equal(first, wide[0].bfloat16())
    assert torch.equal(second, wide[1].bfloat16())


def test_rounding_is_torchs() -> None:
    """Through a loss of two words, whose gradient is p − 1: every way to round, and no number."""
    logits = torch.stack([torch.linspace(-9, 9, 4001), torch.zeros(4001)], 1).bfloat16()
    full, targets = logits.float(), torch.zeros(4001, dtype=torch.int64)
    for z in (logits, full):
        losses.cross_entropy(z, targets, 0.0, True)
    assert torch.equal(logits, full.bfloat16())
    broken = torch.full((20, 40), torch.nan, dtype=torch.bfloat16)
    losses.cross_entropy(broken, torch.zeros(20, dtype=torch.int64), 0.0, True)
    assert broken.isnan().all()


def test_no_number_stays_none_and_a_banned_word_costs_nothing() -> None:
    hidden, weight, targets = torch.randn(20, 4), torch.randn(30, 4), torch.arange(20)
    bias = torch.zeros(30)
    bias[25] = -torch.inf
    expected = F.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, bias).total, expected)
    hidden[3, 1] = torch.nan
    assert linear_cross_entropy(hidden, weight, targets).total.isnan()
    assert linear_rdrop(hidden, hidden, weight, targets).total.isnan()


def test_training_takes_them_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastest() == "compiled"
    monkeypatch.setenv("WEFT_NATIVE", "0")
    assert fastest() == "torch"
    with compiled("losses"):
        assert not losses.is_compiled(torch.randn(3, 4))


def test_what_is_compiled_has_a_name() -> None:
    every = "expected some of losses, attention, rows, sublayers, updates, not lossse"
    with pytest.raises(ValueError, match=every), compiled("lossse"):
        pass


def test_other_types_and_the_outside_are_torchs() -> None:
    logits = torch.randn(3, 4)
    assert losses.is_compiled(logits)
    assert not losses.is_compiled(logits, logits.double())
    with compiled():
        assert not losses.is_compiled(logits)
