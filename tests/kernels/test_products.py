"""Compiled products and losses of training: those of torch, in any layout, with the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.test_steady import threads
from weft.kernels import cross_entropy, linear, machine, native, products
from weft.kernels.cross_entropy import linear_cross_entropy, linear_rdrop

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    with products.compiled():
        yield


def laid_out(rows: int, columns: int, layout: str) -> Tensor:
    """A random matrix: of rows, of columns, part of a larger one, or one row over and over."""
    if layout == "columns":
        return torch.randn(columns, rows).t()
    if layout == "part":
        return torch.randn(rows + 2, columns + 3)[1:-1, 2:-1]
    return torch.randn(1, columns).expand(rows, columns) if layout == "repeated" else torch.randn(rows, columns)


LAYOUTS = st.sampled_from(["rows", "columns", "part", "repeated"])


@given(
    st.integers(0, 40), st.integers(0, 50), st.integers(0, 30), LAYOUTS, LAYOUTS, LAYOUTS, st.booleans(),
    st.integers(1, 3), st.integers(0, 2**32),
)  # fmt: skip
def test_products_are_torchs(
    rows: int, columns: int, depth: int, first: str, second: str, third: str, bias: bool, count: int, seed: int
) -> None:
    torch.manual_seed(seed)
    a, b = laid_out(rows, depth, first), laid_out(depth, columns, second)
    added = torch.randn(columns) if bias else None
    total = laid_out(rows, columns, third if third != "repeated" else "rows")
    with threads(count):
        found, more = products.product(a, b, added), products.add_product(total.clone(), a, b)
    wanted = a.double() @ b.double()
    torch.testing.assert_close(found.double(), wanted + (0.0 if added is None else added), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(more.double(), wanted + total, atol=1e-4, rtol=1e-5)
    assert more.stride() == total.clone().stride()


@pytest.mark.parametrize("depth", [1, 255, 256, 257, 600])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_a_number_has_the_same_bits_in_any_company_and_by_any_threads(depth: int, layout: str) -> None:
    a, b = laid_out(250, depth, layout), torch.randn(depth, 70)
    with threads(1):
        whole = products.product(a, b)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(products.product(a, b), whole)
    for rows in (slice(0, 1), slice(3, 10), slice(119, 122), slice(7, 250)):
        for columns in (slice(0, 16), slice(16, 70), slice(32, 33)):
            assert torch.equal(products.product(a[rows], b[:, columns]), whole[rows, columns])


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[4, 5\] do not fit"):
        products.product(torch.zeros(2, 3), torch.zeros(4, 5))


def test_other_types_and_the_outside_are_torchs() -> None:
    a, b = torch.randn(300, 200), torch.randn(200, 300)
    assert products.is_compiled(a, b)
    assert not products.is_compiled(a.double())
    assert torch.equal(products.product(a.double(), b.double()), a.double() @ b.double())
    with products.compiled(False):
        assert not products.is_compiled(a)
        assert torch.equal(products.product(a, b), torch.mm(a, b))


@pytest.mark.parametrize("bias", [True, False])
def test_a_large_linear_layer_has_torchs_output_and_gradients(bias: bool) -> None:
    x, weight = torch.randn(32, 40, 256, requires_grad=True), torch.randn(300, 256, requires_grad=True)
    b = torch.randn(300, requires_grad=True) if bias else None
    inputs = [t for t in (x, weight, b) if t is not None]
    assert x.numel() * 300 >= linear._WORTH
    y = linear.linear(x, weight, b)
    assert type(y.grad_fn).__name__ == "_CompiledLinearBackward"
    way = torch.randn_like(y)
    wanted = F.linear(*(None if t is None else t.double() for t in (x, weight, b)))  # type: ignore[arg-type]
    torch.testing.assert_close(y.double(), wanted, atol=1e-3, rtol=1e-5)
    for mine, other in zip(
        torch.autograd.grad(y, inputs, way), torch.autograd.grad(wanted, inputs, way.double()), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("vocab_size", [5, 16, 1003])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compiled_losses_are_the_plain_ones(vocab_size: int, smoothing: float) -> None:
    first, second = (torch.randn(40, 12, requires_grad=True) for _ in range(2))
    weight, bias = torch.randn(vocab_size, 12, requires_grad=True), torch.randn(vocab_size, requires_grad=True)
    targets = torch.randint(vocab_size, (40,))
    targets[::7] = -100
    inputs = [first, second, weight, bias]
    for count in (1, 2):
        with threads(count):
            one = linear_cross_entropy(first, weight, targets, bias, smoothing)
            two = linear_rdrop(first, second, weight, targets, bias, smoothing, apart=1.7)
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


def test_no_number_stays_none_and_a_banned_word_costs_nothing() -> None:
    hidden, weight, targets = torch.randn(20, 4), torch.randn(30, 4), torch.arange(20)
    bias = torch.zeros(30)
    bias[25] = -torch.inf
    expected = F.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, bias).total, expected)
    hidden[3, 1] = torch.nan
    assert linear_cross_entropy(hidden, weight, targets).total.isnan()
    assert linear_rdrop(hidden, hidden, weight, targets).total.isnan()


def test_training_takes_them_on_amds_cpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for vendor, chosen in (("AuthenticAMD", "compiled"), ("GenuineIntel", "torch"), ("", "torch")):
        monkeypatch.setattr(machine, "cpu_vendor", lambda vendor=vendor: vendor)
        assert products.fastest() == chosen
