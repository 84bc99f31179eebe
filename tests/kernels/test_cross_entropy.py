"""Output layer and cross entropy in chunks against torch's own in float64; R-Drop's divergence likewise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.kernels import cross_entropy as kernel
from weft.kernels.cross_entropy import linear_cross_entropy, linear_rdrop


@given(
    rows=st.integers(0, 9),
    dim=st.integers(1, 6),
    vocab_size=st.integers(1, 12),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    ignored=st.floats(0, 1),
    chunk=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_values_and_gradients_are_those_of_torch(
    rows: int, dim: int, vocab_size: int, bias: bool, smoothing: float, ignored: float, chunk: int, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(rows, dim, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab_size, dim, dtype=torch.float64, requires_grad=True)
    b = torch.randn(vocab_size, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(0, vocab_size, (rows,)).masked_fill_(torch.rand(rows) < ignored, -100)
    logits = F.linear(hidden, weight, b)
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
    plain = F.cross_entropy(logits, targets, reduction="sum")
    inputs = [t for t in (hidden, weight, b) if t is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_CHUNK", 1)
        patch.setattr(kernel, "_ROWS", chunk)
        loss = linear_cross_entropy(hidden, weight, targets, b, smoothing)
    assert loss.count == int((targets != -100).sum())
    torch.testing.assert_close(loss.total, expected, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(loss.nll, plain, atol=1e-11, rtol=1e-11)
    assert not loss.nll.requires_grad
    for mine, theirs in zip(
        torch.autograd.grad(loss.total * 3, inputs), torch.autograd.grad(expected * 3, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_CHUNK", 1)
    monkeypatch.setattr(kernel, "_ROWS", 2)
    hidden, weight = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 4))
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, -100, 1, 2])

    def loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, targets, b, 0.1).total

    def twice(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_rdrop(h, h.flip(0) * 0.5, w, targets, b, 0.1, apart=0.7).total

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
    assert torch.autograd.gradcheck(twice, (hidden, weight, bias))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2)])
def test_lower_precision_stays_near_float64(
    dtype: torch.dtype, tolerance: float, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.kernels import linear

    monkeypatch.setattr(linear, "bf16_products", lambda: native)
    hidden = torch.randn(2, 70, 32).to(dtype).requires_grad_()
    weight = (torch.randn(300, 32) / 4).requires_grad_()
    targets = torch.randint(0, 300, (2, 70))
    loss = linear_cross_entropy(hidden, weight, targets, smoothing=0.1)
    grads = torch.autograd.grad(loss.total, (hidden, weight))
    assert [g.dtype for g in grads] == [dtype, torch.float32]
    wide = hidden.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    expected = F.cross_entropy(
        (wide[0] @ wide[1].T).flatten(0, 1), targets.flatten(), label_smoothing=0.1, reduction="sum"
    )
    assert loss.total.item() == pytest.approx(expected.item(), rel=tolerance / 10)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, wide), strict=True):
        assert (mine - theirs).abs().max() < tolerance * theirs.abs().max()


def test_logits_far_from_zero_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[5000.0], [-5000.0], [4000.0]])
    for target, expected in ((0, 0.0), (1, 10000.0), (2, 1000.0)):
        assert float(linear_cross_entropy(hidden, weight, torch.tensor([target])).total) == pytest.approx(expected)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_words_that_a_bias_of_minus_infinity_bans() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    bias, targets = torch.tensor([0.0, 0.0, float("-inf"), 0.0, 0.0]), torch.tensor([0, 1, 4])
    expected = F.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, bias).total, expected)


@pytest.mark.parametrize("what", ["cross entropy", "R-Drop"])
def test_nothing_of_the_size_of_all_logits_is_made(what: str) -> None:
    rows, vocab_size = 4096, 50_000
    hidden = torch.randn(rows, 4, requires_grad=True)
    weight = torch.randn(vocab_size, 4, requires_grad=True)
    with Largest() as largest:
        if what == "R-Drop":
            wanted = torch.randint(0, vocab_size, (512,))
            linear_rdrop(hidden[:512], hidden[:512] * 2, weight, wanted).total.backward()
        else:
            linear_cross_entropy(hidden, weight, torch.randint(0, vocab_size, (rows,))).total.backward()
    assert 0 < largest.elements <= 128 * vocab_size


def test_without_gradients_none_are_made() -> None:
    hidden, weight = torch.randn(6, 3), torch.randn(5, 3, requires_grad=True)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 3, 4, 0]))
    assert not loss.total.requires_grad
    torch.testing.assert_close(
        loss.total, F.cross_entropy(hidden @ weight.T, torch.tensor([0, 1, 2, 3, 4, 0]), reduction="sum")
    )


@given(
    rows=st.integers(1, 7),
    vocab_size=st.integers(1, 9),
    bias=st.booleans(),
    masked=st.booleans(),
    chunk=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_rdrop_is_both_cross_entropies_and_torchs_symmetric_kl(
    rows: int, vocab_size: int, bias: bool, masked: bool, chunk: int, seed: int
) -> None:
    torch.manual_seed(seed)
    first, second = (torch.randn(rows, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(vocab_size, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(vocab_size, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(vocab_size, (rows,))
    if masked:
        targets[torch.rand(rows) < 0.4] = -100
    smoothing, apart = float(torch.rand(())) * 0.5 * (seed % 2), float(torch.rand(())) * 5
    inputs = [t for t in (first, second, weight, b) if t is not None]
    kept = targets != -100
    logits = [F.linear(h[kept], weight, b) for h in (first, second)]
    p, q = (z.softmax(-1) for z in logits)
    divergence = ((p * (p.log() - q.log())).sum() + (q * (q.log() - p.log())).sum()) / 2
    entropies = (F.cross_entropy(z, targets[kept], label_smoothing=smoothing, reduction="sum") / 2 for z in logits)
    expected = sum(entropies) + apart * divergence
    nll = sum(F.cross_entropy(z, targets[kept], reduction="sum") / 2 for z in logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_CHUNK", 1)
        patch.setattr(kernel, "_ROWS", chunk)
        mine = linear_rdrop(first, second, weight, targets, b, smoothing, apart=apart)
    plain = kernel.rdrop_reference(first, second, weight, targets, b, smoothing, apart=apart)
    for found in (mine, plain):
        assert found.count == int(kept.sum())
        assert not found.divergence.requires_grad
        for value, wanted in ((found.total, expected), (found.nll, nll), (found.divergence, divergence)):
            torch.testing.assert_close(value, wanted, atol=1e-10, rtol=1e-10)
    for mine_grad, grad in zip(
        torch.autograd.grad(mine.total, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(mine_grad, grad, atol=1e-10, rtol=1e-10)


def test_the_plain_form_agrees() -> None:
    hidden, weight, bias = torch.randn(3, 4, 8), torch.randn(11, 8), torch.randn(11)
    targets = torch.randint(0, 11, (3, 4))
    targets[0, 0] = -100
    mine = linear_cross_entropy(hidden, weight, targets, bias, 0.2)
    plain = kernel.reference(hidden, weight, targets, bias, 0.2)
    assert mine.count == plain.count == 11
    torch.testing.assert_close(mine.total, plain.total)
    torch.testing.assert_close(mine.nll, plain.nll)


def test_bad_input_is_named() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"target 5 is not a word: expected 0 … 4, or -100 to ignore"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="smoothing must be at least 0 and less than 1"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2]), smoothing=1.5)
    with pytest.raises(ValueError, match="differ in shape"):
        linear_rdrop(hidden, hidden[:2], weight, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="do not fit"):
        linear_rdrop(hidden, hidden, weight, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"target 5 is not a word"):
        linear_rdrop(hidden, hidden, weight, torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match=r"hidden is torch\.float16 and weight torch.float32"):
        linear_cross_entropy(hidden.half(), weight, torch.tensor([0, 1, 2]))
