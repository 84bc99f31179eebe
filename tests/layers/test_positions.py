"""Positions against loops straight from the formulas, in float64."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels.attention import attention_weights
from weft.layers import positions as P
from weft.layers import relative as R

MILLION = torch.tensor([0, 1, 999_999, 1_000_000])


def sinusoid_by_loop(places: list[int], dim: int) -> Tensor:
    table = torch.zeros(len(places), dim, dtype=torch.float64)
    for row, pos in enumerate(places):
        for i in range(dim // 2):
            table[row, 2 * i] = math.sin(pos / 10000 ** (2 * i / dim))
            table[row, 2 * i + 1] = math.cos(pos / 10000 ** (2 * i / dim))
    return table


def test_positions_count_from_an_offset_or_from_one_per_row() -> None:
    assert P.positions(3).tolist() == [0, 1, 2]
    assert P.positions(3, 7).tolist() == [7, 8, 9]
    assert P.positions(2, torch.tensor([0, 5])).tolist() == [[0, 1], [5, 6]]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.lists(st.integers(0, 2_000_000), min_size=1, max_size=5))
def test_sinusoid_is_the_formula(half: int, places: list[int]) -> None:
    dim = 2 * half
    expected = sinusoid_by_loop(places, dim)
    given_places = torch.tensor(places)
    assert (P.Sinusoidal(dim)(given_places, dtype=torch.float64) - expected).abs().max() < 1e-9
    assert (P.Sinusoidal(dim)(given_places) - expected).abs().max() < 1e-7  # float32 rounds the result, not the angle


def test_order_and_fraction_are_the_formula() -> None:
    rows = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert P.Order()(rows).tolist() == [[[0.0], [1.0], [2.0]], [[3.0], [4.0], [5.0]]]
    assert P.Fraction()(torch.arange(5), 5).flatten().tolist() == [0, 0.25, 0.5, 0.75, 1]
    by_row = P.Fraction(dim=2)(torch.arange(3), torch.tensor([3, 5]))
    assert by_row.tolist() == [[[0, 0], [0.5, 0.5], [1, 1]], [[0, 0], [0.25, 0.25], [0.5, 0.5]]]
    assert P.Fraction()(torch.arange(1), 1).item() == 0
    with pytest.raises(ValueError, match="needs the length"):
        P.Fraction()(torch.arange(5))


@pytest.mark.parametrize("name", P.ABSOLUTE)
def test_rows_stand_where_they_are_told(name: str) -> None:
    scheme = P.Learned(6, max_len=20) if name == "learned" else P.ABSOLUTE[name](6)
    whole = scheme(torch.arange(20), 20)
    rows = scheme(P.positions(4, torch.tensor([0, 9, 16])), 20)
    assert rows.shape == (3, 4, scheme.dim)
    for row, start in zip(rows, (0, 9, 16), strict=True):
        assert torch.equal(row, whole[start : start + 4])


def test_wavelengths_run_from_two_pi_almost_to_ten_thousand_times_that() -> None:
    assert P.wavelengths(512).tolist() == pytest.approx([2 * math.pi * 10000 ** (2 * i / 512) for i in range(256)])
    assert P.wavelengths(512)[0].item() == 2 * math.pi
    turns = [P.wavelengths(dim)[-1].item() / (2 * math.pi) for dim in (4, 64, 512, 65536)]
    assert turns == pytest.approx([100, 7498.942, 9646.616, 9997.189], rel=1e-6)
    # One wavelength on, a component is where it was.
    for i, wavelength in enumerate(P.wavelengths(8, base=2.0).tolist()):
        assert math.sin(wavelength / 2.0 ** (2 * i / 8)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("k", [-3, 0, 1, 7, 50])
def test_a_shift_is_linear_and_least_squares_finds_the_same_matrix(k: int) -> None:
    dim, start = 8, 100
    here = sinusoid_by_loop(list(range(start, start + 400)), dim)
    there = sinusoid_by_loop(list(range(start + k, start + k + 400)), dim)
    shift = P.shift_matrix(dim, k)
    assert (here @ shift.T - there).abs().max() < 1e-10
    found = torch.linalg.lstsq(here, there).solution.T
    assert (found - shift).abs().max() < 1e-8


def test_the_criteria_come_out_as_taught() -> None:
    holds = {
        name: [measured.holds for measured in P.criteria(scheme).values()]
        for name, scheme in (("order", P.Order()), ("fraction", P.Fraction()), ("sinusoidal", P.Sinusoidal(64)))
    }
    assert list(P.criteria(P.Order())) == ["unique", "consistent", "bounded", "deterministic"]
    assert holds == {
        "order": [True, True, False, True],
        "fraction": [True, False, True, False],
        "sinusoidal": [True, True, True, True],
    }


def test_a_learned_table_does_not_generalise() -> None:
    measured = P.criteria(P.Learned(8, max_len=1000))
    assert [name for name, one in measured.items() if not one.holds] == ["consistent", "bounded"]


def test_the_figures_behind_the_criteria() -> None:
    order, fraction = P.criteria(P.Order(), (10, 100), 1000), P.criteria(P.Fraction(), (10, 100), 1000)
    assert [measured.figure for measured in order.values()] == pytest.approx([1, 0, 999 / 99, 0])
    spread = (1 / 9 - 1 / 99) / (1 / 9)
    assert [measured.figure for measured in fraction.values()] == pytest.approx([1 / 99, spread, 1, 1 - 9 / 99])
    table = P.criteria_table().splitlines()
    assert table[0] == "| scheme | unique | consistent | bounded | deterministic |"
    assert table[2] == "| order number | yes (1) | yes (0) | no (100) | yes (0) |"
    assert len(table) == 5


def test_the_criteria_can_fail_each() -> None:
    class Wheel(P.Absolute):  # comes round after 7 positions
        def encode(self, positions: Tensor, length: P.Length) -> Tensor:
            return (positions % 7).double()[..., None]

    class Dice(P.Absolute):
        def encode(self, positions: Tensor, length: P.Length) -> Tensor:
            return torch.rand(*positions.shape, self.dim, dtype=torch.float64)

    wheel, dice = P.criteria(Wheel()), P.criteria(Dice(8))
    assert not wheel["unique"].holds
    assert not wheel["consistent"].holds
    assert not dice["deterministic"].holds
    with pytest.raises(ValueError, match="lengths must be ≥ 2"):
        P.criteria(P.Order(), (1, 10))


def test_learned_looks_up_and_names_its_limit() -> None:
    scheme = P.Learned(4, max_len=6)
    assert torch.equal(scheme(torch.tensor([[5, 0]])), scheme.weight[[5, 0]][None])
    scheme(torch.tensor([2, 2])).sum().backward()
    assert scheme.weight.grad is not None
    assert scheme.weight.grad.sum(1).tolist() == [0, 0, 8, 0, 0, 0]
    with pytest.raises(ValueError, match="position 6 has no learned vector: max_len is 6"):
        scheme(torch.arange(7))
    with pytest.raises(ValueError, match="position -1 has no learned vector"):
        scheme(torch.tensor([-1, 2]))
    assert scheme.double()(torch.arange(2)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_added_and_concatenated(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 8, dtype=dtype)
    encoding = sinusoid_by_loop(list(range(5)), 8).to(dtype)
    added = P.Positioned(P.Sinusoidal(8))
    torch.testing.assert_close(added(x), x + encoding)
    side_by_side = P.Positioned(P.Sinusoidal(6), how="concat")
    joined = side_by_side(x)
    assert joined.dtype == added(x).dtype == dtype
    assert joined.shape == (2, 5, 14)
    assert (added.output_dim(8), side_by_side.output_dim(8)) == (8, 14)
    assert torch.equal(joined[..., :8], x)
    torch.testing.assert_close(joined[..., 8:], sinusoid_by_loop(list(range(5)), 6).to(dtype).expand(2, 5, 6))


def test_added_at_the_positions_given() -> None:
    x = torch.zeros(2, 3, 4)
    rows = P.positions(3, torch.tensor([0, 40]))
    expected = torch.stack([sinusoid_by_loop([0, 1, 2], 4), sinusoid_by_loop([40, 41, 42], 4)]).float()
    torch.testing.assert_close(P.Positioned(P.Sinusoidal(4))(x, rows), expected)
    assert torch.equal(P.Positioned(P.Order())(x, rows), rows[..., None].float().expand(2, 3, 4))
    fractions = P.Positioned(P.Fraction(), "concat")(x, length=torch.tensor([3, 5]))
    assert fractions[..., 4].tolist() == [[0, 0.5, 1], [0, 0.25, 0.5]]
    assert P.Positioned(P.Fraction(), "concat")(x)[0, :, 4].tolist() == [0, 0.5, 1]  # the length is that of x


def test_positioned_refuses_what_does_not_fit() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="'add' or 'concat', not 'multiply'"):
        P.Positioned(P.Order(), how="multiply")
    with pytest.raises(ValueError, match="positions of dim 6 to embeddings of dim 4"):
        P.Positioned(P.Sinusoidal(6))(x)
    for wrong in (torch.arange(4), torch.zeros(3, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"do not fit: expected \[3\] or \[2, 3\]"):
            P.Positioned(P.Sinusoidal(4))(x, wrong)


@pytest.mark.parametrize("wrong", [torch.tensor([0.0, 1.0]), torch.tensor([True]), torch.tensor(3)])
def test_positions_are_whole_numbers(wrong: Tensor) -> None:
    for scheme in (P.Order(), P.Sinusoidal(4), P.Learned(4, max_len=8)):
        with pytest.raises(ValueError, match="positions must be"):
            scheme(wrong)
    with pytest.raises(ValueError, match="positions must be"):
        R.ALiBi(2)(torch.arange(2), wrong)
    with pytest.raises(ValueError, match="positions must be"):
        R.Rotary(4).angles(wrong, torch.float32)


def test_sizes_are_checked() -> None:
    for odd in (3, 0, -2):
        for make in (P.Sinusoidal, R.Rotary, P.wavelengths, lambda dim: P.shift_matrix(dim, 1)):
            with pytest.raises(ValueError, match=r"even|≥ 1"):
                make(odd)
    with pytest.raises(ValueError, match="dim must be ≥ 1, not 0"):
        P.Order(0)
    with pytest.raises(ValueError, match="num_heads must be ≥ 1, not 0"):
        R.ALiBi(0)
    with pytest.raises(ValueError, match="max_distance must be ≥ 0, not -1"):
        R.ShawRelative(4, -1)
    with pytest.raises(ValueError, match="not 0 × 4"):
        P.Learned(4, max_len=0)
    for buckets, farthest, both_ways in ((2, 128, True), (7, 128, True), (1, 128, False), (32, 8, True)):
        with pytest.raises(ValueError, match=f"not {buckets} and {farthest}"):
            R.T5Bias(2, buckets, farthest, both_ways)
    with pytest.raises(ValueError, match="2 rows of query positions, but 3 of key"):
        R.distances(torch.zeros(2, 4, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long))


def test_far_positions_stay_finite_and_in_range() -> None:
    assert P.Sinusoidal(512)(MILLION).abs().max() <= 1
    assert P.Fraction()(MILLION, 1_000_001).flatten().tolist()[-1] == 1
    assert P.Order()(MILLION).flatten().tolist() == MILLION.tolist()
    x = torch.randn(1, 2, 4, 64)
    turned = R.Rotary(64)(x, MILLION)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))  # turning keeps the length
    assert R.ALiBi(3)(MILLION, MILLION).isfinite().all()
    assert R.T5Bias(3)(MILLION, MILLION).shape == (1, 3, 4, 4)
    shaw = R.ShawRelative(64, max_distance=2)
    assert torch.equal(shaw(x, MILLION, MILLION)[0, 0, 0, 2:], (x[0, 0, 0] @ shaw.key_vectors[4]).expand(2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_tells_the_distance_only(interleaved: bool) -> None:
    rotary = R.Rotary(16, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(m: int, n: int) -> Tensor:
        turned: Tensor = rotary(q, torch.tensor([m])) * rotary(k, torch.tensor([n]))
        return turned.sum()

    assert torch.equal(rotary(q, torch.tensor([0])), q)
    for m, n, moved in ((0, 3, 17), (9, 2, 1), (5, 5, 100_000)):
        torch.testing.assert_close(score(m, n), score(m + moved, n + moved), rtol=0, atol=1e-9)
        assert (score(m, n) - score(m, n + 1)).abs() > 1e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_the_formula(interleaved: bool) -> None:
    dim, base, places = 6, 500.0, [[0, 1, 7], [30, 31, 32]]
    x = torch.randn(2, 2, 3, dim, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for b, h, n, i in product(range(2), range(2), range(3), range(dim // 2)):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = places[b][n] * base ** (-2 * i / dim)
        expected[b, h, n, first] = x[b, h, n, first] * math.cos(angle) - x[b, h, n, second] * math.sin(angle)
        expected[b, h, n, second] = x[b, h, n, second] * math.cos(angle) + x[b, h, n, first] * math.sin(angle)
    rotary = R.Rotary(dim, base, interleaved)
    torch.testing.assert_close(rotary(x, torch.tensor(places)), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotary(x[:1], torch.tensor(places[0])), expected[:1], rtol=0, atol=1e-12)


def test_rotary_works_in_float32_at_least() -> None:
    x = torch.randn(1, 2, 5, 8)
    far = P.positions(5, 1000)
    exact = R.Rotary(8)(x, far)
    assert exact.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        half = R.Rotary(8)(x.to(dtype), far)
        assert half.dtype == dtype
        assert torch.equal(half, R.Rotary(8)(x.to(dtype).float(), far).to(dtype))


def test_rotary_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="heads of size 8, not 6"):
        R.Rotary(8)(torch.zeros(1, 1, 2, 6), torch.arange(2))
    with pytest.raises(ValueError, match=r"expected \[2\] or \[1, 2\]"):
        R.Rotary(8)(torch.zeros(1, 1, 2, 8), torch.arange(3))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(0, 5), min_size=1, max_size=2))
def test_shaw_is_the_formula(max_distance: int, n: int, m: int, starts: list[int]) -> None:
    rows, heads, dim = len(starts), 2, 3
    shaw = R.ShawRelative(dim, max_distance).double()
    torch.nn.init.normal_(shaw.key_vectors)
    assert shaw.value_vectors is not None
    torch.nn.init.normal_(shaw.value_vectors)
    q = torch.randn(rows, heads, n, dim, dtype=torch.float64)
    weights = torch.randn(rows, heads, n, m, dtype=torch.float64).softmax(-1)
    scores, output = torch.zeros_like(weights), torch.zeros_like(q)
    for b, h, i, j in product(range(rows), range(heads), range(n), range(m)):
        distance = max(-max_distance, min(max_distance, j - (starts[b] + i)))
        scores[b, h, i, j] = q[b, h, i] @ shaw.key_vectors[distance + max_distance]
        output[b, h, i] += weights[b, h, i, j] * shaw.value_vectors[distance + max_distance]
    queries, keys = P.positions(n, torch.tensor(starts)), torch.arange(m)
    torch.testing.assert_close(shaw(q, queries, keys), scores, rtol=0, atol=1e-12)
    torch.testing.assert_close(shaw.values(weights, queries, keys), output, rtol=0, atol=1e-12)


def test_shaw_learns_and_checks_its_input() -> None:
    shaw, places = R.ShawRelative(4, 2).double(), torch.arange(3)

    def both(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return shaw(q, places, places), shaw.values(weights, places, places)

    inputs = (torch.randn(1, 1, 3, 4, dtype=torch.float64), torch.rand(1, 1, 3, 3, dtype=torch.float64))
    assert torch.autograd.gradcheck(both, [one.requires_grad_() for one in inputs])
    sum(part.sum() for part in both(*inputs)).backward()  # type: ignore[union-attr]
    for name, parameter in shaw.named_parameters():
        assert parameter.grad is not None, name
    with pytest.raises(ValueError, match="values=False"):
        R.ShawRelative(4, 2, values=False).values(torch.zeros(1, 1, 3, 3), places, places)
    with pytest.raises(ValueError, match=r"expected \[3\] or \[1, 3\]"):
        shaw(inputs[0], torch.arange(2), places)
    with pytest.raises(ValueError, match=r"expected \[3\] or \[1, 3\]"):
        shaw.values(inputs[1], places, torch.arange(2))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_gives_each_bucket_its_bias_at_each_row_of_queries(bidirectional: bool) -> None:
    bias = R.T5Bias(3, num_buckets=8, max_distance=20, bidirectional=bidirectional)
    starts = torch.tensor([0, 30])
    made = bias(P.positions(4, starts), torch.arange(40))
    assert made.shape == (2, 3, 4, 40)
    for b, h, i, j in product(range(2), range(3), range(4), range(40)):
        bucket = bias.buckets(torch.tensor(j - (int(starts[b]) + i)))
        assert made[b, h, i, j] == bias.weight[bucket, h]
    # Both ways, the bucket "0 behind" stays empty: a key at the query's own place counts as before it.
    used = [0, 1, 2, 3, 5, 6, 7] if bidirectional else list(range(8))
    assert bias.buckets(torch.arange(-100, 101)).unique().tolist() == used


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_falls_with_distance(num_heads: int, exponents: list[float]) -> None:
    queries, keys = torch.tensor([[0, 1, 2], [4, 5, 6]]), torch.arange(7)
    bias = R.ALiBi(num_heads)(queries, keys, dtype=torch.float64)
    assert bias.shape == (2, num_heads, 3, 7)
    for b, h, i, j in product(range(2), range(num_heads), range(3), range(7)):
        assert bias[b, h, i, j].item() == pytest.approx(-(2 ** -exponents[h]) * abs(j - queries[b, i].item()))
    # bfloat16 knows no 1001: the product is made in float32 and rounded once
    half = R.ALiBi(num_heads)(torch.tensor([1001]), keys, dtype=torch.bfloat16)
    assert torch.equal(half, R.ALiBi(num_heads)(torch.tensor([1001]), keys).bfloat16())


def test_positions_break_the_equivariance_of_attention() -> None:
    x, order = torch.randn(1, 5, 8, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])

    def attend_itself(x: Tensor) -> Tensor:
        return attention_weights(x[:, None], x[:, None])[:, 0] @ x

    placed = P.Positioned(P.Sinusoidal(8))
    torch.testing.assert_close(attend_itself(x[:, order]), attend_itself(x)[:, order])
    assert (attend_itself(placed(x[:, order])) - attend_itself(placed(x))[:, order]).abs().max() > 0.1
