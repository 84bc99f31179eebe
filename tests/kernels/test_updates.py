"""Compiled updates: torch's own AdamW and norm on the same numbers, and the bits whatever the threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.test_steady import threads
from weft.kernels import native, updates
from weft.kernels.compiled import compiled

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")

SHAPES = [(3,), (64, 80), (1, 1), (4096,), (4097,), (20_000, 3), (0,), (17, 31)]


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with compiled("updates"):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which compiled functions were asked for."""
    found: list[str] = []
    library = updates._library()

    class Watched:
        def __getattr__(self, name: str) -> object:
            found.append(name)
            return getattr(library, name)

    monkeypatch.setattr(updates, "_library", Watched)
    return found


def draw(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def updated(steps: int, by: float) -> list[updates.Trained]:
    """After so many updates with gradients that are ``by`` times too small."""
    found = [updates.Trained(p, torch.zeros_like(p), torch.zeros_like(p), 0.3 if p.dim() > 1 else 0.0) for p in draw(0)]
    for step in range(1, steps + 1):
        for one, grad in zip(found, draw(step), strict=True):
            one.parameter.grad = grad / by
        updates.adamw(found, step, 0.01 * step, by, (0.8, 0.95), 1e-6)
    return found


@pytest.mark.parametrize("by", [1.0, 0.125, 3.0])
def test_adamw_is_torchs(by: float, calls: list[str]) -> None:
    parameters = [p.requires_grad_() for p in draw(0)]
    groups = [
        {"params": [p for p in parameters if (p.dim() > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.3), (False, 0.0))
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, foreach=False)
    for step in range(1, 8):
        for p, grad in zip(parameters, draw(step), strict=True):
            p.grad = grad
        for group in theirs.param_groups:
            group["lr"] = 0.01 * step
        theirs.step()
    mine = updated(7, by)
    assert calls == ["weft_adamw"] * 7
    for one, p in zip(mine, parameters, strict=True):
        torch.testing.assert_close(one.parameter, p.detach(), rtol=1e-5, atol=1e-6)
        state = theirs.state[p]
        torch.testing.assert_close(one.mean, state["exp_avg"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.square, state["exp_avg_sq"], rtol=1e-5, atol=1e-7)


def test_the_bits_are_those_of_one_thread() -> None:
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append((updates.norm(draw(5)), updated(3, 0.5)))
    for norm, trained in found[1:]:
        assert norm == found[0][0]
        for one, other in zip(found[0][1], trained, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


def test_the_norm_is_that_of_all_numbers(calls: list[str]) -> None:
    gradients = draw(9)
    expected = torch.cat([g.double().flatten() for g in gradients]).norm()
    assert updates.norm(gradients) == pytest.approx(float(expected), rel=1e-6)
    assert calls == ["weft_squares"]
    for bad in (torch.inf, torch.nan):
        for at in (0, 4096):  # in whole vectors and behind the last of them
            gradients[4][at] = bad
            assert not updates.norm(gradients) < torch.inf
            gradients[4][at] = 0.0
    assert updates.norm([]) == 0.0


def test_torch_updates_what_is_not_plain_fp32(calls: list[str]) -> None:
    """Of another dtype, or with numbers apart; and autograd sees that it was changed, either way."""
    for make in (lambda: torch.randn(6, 4).double(), lambda: torch.randn(4, 6).t(), lambda: torch.randn(6, 4)):
        p = make()
        p.grad = torch.randn_like(p)
        one = updates.Trained(p, torch.zeros_like(p), torch.zeros_like(p), 0.1)
        before, version = p.clone(), p._version
        updates.adamw([one], 1, 0.1, 1.0, (0.9, 0.99), 1e-8)
        assert not torch.equal(p, before)
        assert p._version > version
    assert calls == ["weft_adamw"]
    one.parameter.grad = None
    for nothing in ([], [one]):
        before = one.parameter.clone()
        updates.adamw(nothing, 1, 0.1, 1.0, (0.9, 0.99), 1e-8)
        assert torch.equal(one.parameter, before)
