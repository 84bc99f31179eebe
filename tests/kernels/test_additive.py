"""Compiled additive attention: the formula and its gradients, over many steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.test_steady import threads
from weft.kernels import additive, native
from weft.kernels.compiled import compiled
from weft.kernels.mask import Mask
from weft.kernels.plain import plain
from weft.kernels.steady import steady
from weft.layers.recurrent import RecurrentDecoder
from weft.layers.scores import AdditiveAttention, HardAttention

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with compiled("attention"):
        yield


def formula(q: Tensor, keys: Tensor, values: Tensor, energy: Tensor, lengths: Tensor | None) -> Tensor:
    """The context [B, V] of queries [B, D] in torch's operations; zeros where a row has no key."""
    scores = (q[:, None] + keys).tanh() @ energy
    if lengths is not None:
        closed = torch.arange(keys.shape[1]) >= lengths[:, None]
        scores = scores.masked_fill(closed, float("-inf")).softmax(1).masked_fill(closed, 0.0)  # without keys: no NaN
    else:
        scores = scores.softmax(1)
    return (scores[:, None] @ values)[:, 0]


def tensors(batch: int, keys: int, dim: int, width: int, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (batch, keys, dim), (batch, keys, width), (dim,), *[(batch, dim)] * steps
    return [torch.randn(size, requires_grad=True) for size in sizes]


def contexts(given: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
    keys, values, energy, *queries = given
    memory = additive.Memory(keys, values, energy, None if lengths is None else Mask(lengths=lengths))
    return [memory.look(query) for query in queries]


def gradients(found: list[Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum in which each step has another weight."""
    return torch.autograd.grad(sum((out * (i + 1)).square().sum() for i, out in enumerate(found)), given)


# Widths that fill vectors and that do not, more rows than are summed together, a row without keys.
@pytest.mark.parametrize(
    ("batch", "keys", "dim", "width"), [(1, 1, 1, 1), (3, 5, 16, 32), (5, 7, 20, 13), (70, 4, 9, 50)]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_values_and_gradients_are_the_formulas(
    batch: int, keys: int, dim: int, width: int, padded: bool, steps: int
) -> None:
    given = tensors(batch, keys, dim, width, steps)
    lengths = torch.arange(batch) % (keys + 1) if padded else None
    found = contexts(given, lengths)
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = [formula(query, *exact[:3], lengths) for query in exact[3:]]
    for mine, true in zip((*found, *gradients(found, given)), (*wanted, *gradients(wanted, exact)), strict=True):
        far, size = (mine - true).detach().abs().max(), true.detach().abs().max()
        assert float(far) <= 4e-6 * float(size) + 1e-7


def test_scores_far_from_zero_are_no_problem() -> None:
    given = [x.detach() * 200 for x in tensors(4, 6, 8, 8, 1)]
    found, wanted = contexts(given, None)[0], formula(given[3], *given[:3], None)
    assert found.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_bits_do_not_depend_on_threads_nor_on_company() -> None:
    lengths = torch.arange(100) % 9
    results = []
    for count in (1, 2, 3):
        with threads(count):
            given = tensors(100, 8, 24, 40, 3)
            found = contexts(given, lengths)
            results.append([*found, *gradients(found, given)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    given = tensors(100, 8, 24, 40, 3)
    alone = contexts([given[0][7:8], given[1][7:8], given[2], *(q[7:8] for q in given[3:])], lengths[7:8])
    assert all(torch.equal(a[0], b[7]) for a, b in zip(alone, results[0][:3], strict=True))


def test_a_second_backward_pass_gives_the_same() -> None:
    given = tensors(4, 5, 16, 16, 3)
    total = sum(out.square().sum() for out in contexts(given, None))
    assert isinstance(total, Tensor)
    once, again = (torch.autograd.grad(total, given, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_serves_padding_alone_and_training_alone() -> None:
    keys, values, energy = (x.detach() for x in tensors(2, 3, 4, 5, 1)[:3])
    assert additive.serves(keys, values, energy, Mask(lengths=torch.tensor([3, 1])))
    for mask in (Mask(causal=True), Mask(pattern=torch.ones(1, 3, dtype=torch.bool)), Mask(window=1)):
        assert not additive.serves(keys, values, energy, mask)
    assert not additive.serves(keys.bfloat16(), values, energy, None)
    with plain():
        assert not additive.serves(keys, values, energy, None)
    with steady():
        assert not additive.serves(keys, values, energy, None)


@pytest.mark.parametrize("kind", ["lengths", "pattern", "open"])
def test_a_decoder_learns_the_same_with_it_and_without(kind: str) -> None:
    torch.manual_seed(1)
    decoder = RecurrentDecoder("gru", 6, 16, 2, AdditiveAttention(16, 12, 10), 12)
    x, memory = torch.randn(3, 5, 6, requires_grad=True), torch.randn(3, 4, 12, requires_grad=True)
    mask = {
        "lengths": Mask(lengths=torch.tensor([4, 2, 1])),
        "pattern": Mask(pattern=torch.rand(3, 5, 4) > 0.4),
        "open": None,
    }[kind]

    def learn() -> tuple[Tensor, ...]:
        out = decoder(x, memory, mask)[0]
        return out, *torch.autograd.grad(out.square().sum(), [x, memory, *decoder.parameters()])

    found = learn()
    with compiled():  # nothing is
        wanted = learn()
    for mine, torchs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)


def test_a_hard_look_stays_hard() -> None:
    torch.manual_seed(2)
    attention = AdditiveAttention(8, 6, 4)
    hard = HardAttention(attention.score)
    query, memory = torch.randn(2, 8), torch.randn(2, 5, 6)
    projected = hard.score.project(memory)
    found = hard.looks(projected, memory, [None])[0](query)
    assert all(any(torch.equal(row, key) for key in keys) for row, keys in zip(found, memory, strict=True))
