"""Positions: where a token stands, told to a model that would otherwise see a set.

Every scheme takes the positions themselves, whole numbers [N] or one list per row [B, N] (see `positions`),
so a cached step in which each row stands elsewhere is the same call.

Here are the absolute schemes, Order, Fraction, Sinusoidal and Learned: a vector per position, added or concatenated
by `Positioned`; and what is asked of such a scheme, measured. The relative ones are in relative.py.

All but Learned are made from the numbers when called, in the precision asked for: there is no table to
outgrow, and none that goes stale when a module changes its dtype. Learned refuses what lies past its max_len.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.layers.linear import is_bare

Length = int | Tensor | None


def positions(n: int, offset: int | Tensor = 0, device: torch.device | str | None = None) -> Tensor:
    """The positions offset, offset + 1, … of ``n`` tokens: [n], or [B, n] for one offset per row [B]."""
    if isinstance(offset, Tensor):
        return offset[..., None] + torch.arange(n, device=offset.device)
    return torch.arange(offset, offset + n, device=device)


class Absolute(nn.Module):
    """A vector of ``dim`` numbers for each position. A scheme says how in `encode`."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim must be ≥ 1, not {dim}")
        self.dim = dim

    def forward(self, positions: Tensor, length: Length = None, dtype: torch.dtype | None = None) -> Tensor:
        """The encodings of ``positions`` [N] or [B, N]: [N, dim] or [B, N, dim].

        Args:
            positions: whole numbers.
            length: how long the sequence is, or each row [B]; only Fraction asks for it.
            dtype: of the result; torch's default (Learned: that of its parameters) if None.
        """
        check_positions(positions)
        encoding = self.encode(positions, length)
        return encoding.expand(*encoding.shape[:-1], self.dim).to(dtype or self.dtype)

    def encode(self, positions: Tensor, length: Length) -> Tensor:
        """The encodings in the best precision there is, [N, dim or 1] or [B, N, dim or 1]."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Of the result, if none is asked for."""
        return torch.get_default_dtype()


class Order(Absolute):
    """The order number 0, 1, 2, … in all ``dim`` entries."""

    def encode(self, positions: Tensor, length: Length) -> Tensor:
        return positions.double()[..., None]


class Fraction(Absolute):
    """How far through the sequence, pos / (length − 1) from 0 to 1, in all ``dim`` entries."""

    def encode(self, positions: Tensor, length: Length) -> Tensor:
        if length is None:
            raise ValueError("the fraction of the length needs the length of the sequence: none was given")
        last = (torch.as_tensor(length, device=positions.device) - 1).clamp(min=1)  # [] or [B]
        return (positions.double() / last[..., None])[..., None]


class Sinusoidal(Absolute):
    """Sines and cosines whose wavelengths form a geometric series (Vaswani et al., 2017).

    PE(pos, 2i) = sin(pos / base^{2i/dim}),  PE(pos, 2i+1) = cos(pos / base^{2i/dim})

    The angles are taken in float64: in float32 they would be off by up to 0.06 at position 1,000,000.
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__(dim)
        check_even("dim", dim)
        self.base = base

    def encode(self, positions: Tensor, length: Length) -> Tensor:
        angles = angles_of(positions, self.dim, self.base, torch.float64)  # [..., N, dim/2]
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)


class Learned(Absolute):
    """A learned vector for each of the first ``max_len`` positions (Gehring et al., 2017).

    Raises ValueError for a position that is not below max_len.
    """

    def __init__(self, dim: int, max_len: int) -> None:
        super().__init__(dim)
        self.max_len = max_len
        self.weight = learned_vectors(max_len, dim)

    def encode(self, positions: Tensor, length: Length) -> Tensor:
        if not torch.compiler.is_compiling() and positions.numel():
            low, high = (int(end) for end in positions.aminmax())
            if low < 0 or high >= self.max_len:
                raise ValueError(
                    f"position {high if low >= 0 else low} has no learned vector: max_len is {self.max_len}, "
                    f"so positions are 0 … {self.max_len - 1}"
                )
        return nn.functional.embedding(positions.long(), self.weight)

    def first(self, n: int) -> Tensor:
        """Those of the first n positions: [n, dim]."""
        if n <= self.max_len and is_bare(self, Learned):
            return self.weight[:n] if n < self.max_len else self.weight  # a part of it is another pass on the way back
        vectors: Tensor = self(positions(n, device=self.weight.device))
        return vectors

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.weight.dtype


ABSOLUTE = {"order": Order, "fraction": Fraction, "sinusoidal": Sinusoidal, "learned": Learned}


class Positioned(nn.Module):
    """Embeddings that know their place: x + PE, or x and PE side by side.

    Args:
        scheme: makes the encodings.
        how: ``"add"`` (the scheme's dim is that of x, or 1: the same number on every entry) or
            ``"concat"`` (the result has x's dim plus the scheme's).
    """

    def __init__(self, scheme: Absolute, how: str = "add") -> None:
        super().__init__()
        if how not in ("add", "concat"):
            raise ValueError(f"how must be 'add' or 'concat', not {how!r}")
        self.scheme, self.how = scheme, how

    def forward(self, x: Tensor, positions: Tensor | None = None, length: Length = None) -> Tensor:
        """x[B, N, D] with its positions: [B, N, D] if added, [B, N, D + scheme.dim] if concatenated.

        Args:
            x: the embeddings.
            positions: [N] or [B, N]; 0 … N − 1 if None.
            length: of the sequence, or of each row [B]; N if neither it nor ``positions`` is given.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
            length = x.shape[1] if length is None else length
        check_positions(positions, x.shape[0], x.shape[1])
        encoding: Tensor = self.scheme(positions, length, x.dtype)  # [N, scheme.dim] or [B, N, scheme.dim]
        if self.how == "concat":
            return torch.cat((x, encoding.expand(*x.shape[:2], -1)), -1)
        if self.scheme.dim not in (1, x.shape[-1]):
            raise ValueError(f"cannot add positions of dim {self.scheme.dim} to embeddings of dim {x.shape[-1]}")
        return x + encoding

    def output_dim(self, dim: int) -> int:
        """The size of the result for embeddings of size ``dim``."""
        return dim + self.scheme.dim if self.how == "concat" else dim


def wavelengths(dim: int, base: float = 10000.0) -> Tensor:
    """The wavelengths of the sinusoids, 2π · base^{2i/dim}: [dim/2], float64.

    They run from 2π to 2π · base^{1 − 2/dim}: for dim 512 that is 9647 · 2π, and only in the limit base · 2π.
    """
    check_even("dim", dim)
    return 2 * math.pi / _frequencies(dim, base, torch.float64)


def shift_matrix(dim: int, k: int, base: float = 10000.0) -> Tensor:
    """The matrix T_k with PE(pos + k) = T_k PE(pos) for every pos: [dim, dim], float64.

    It turns each pair (sin, cos) by its own angle w k, w = base^{−2i/dim}: along the diagonal stand the blocks
    [[cos w k, sin w k], [−sin w k, cos w k]].
    """
    check_even("dim", dim)
    angles = k * _frequencies(dim, base, torch.float64)
    cos, sin = angles.cos(), angles.sin()
    blocks = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), -2)  # [dim/2, 2, 2]
    return torch.block_diag(*blocks)  # type: ignore[no-any-return]


class Measured(NamedTuple):
    """Whether a criterion holds, and the figure that says so."""

    holds: bool
    figure: float


@torch.no_grad()
def criteria(
    scheme: Absolute, lengths: tuple[int, ...] = (10, 100, 1000), unseen: int = 100_000
) -> dict[str, Measured]:
    """What is asked of an encoding of positions, measured in float64 on sequences of the given ``lengths``.

    - unique: no two positions share an encoding. The smallest distance between any two.
    - consistent: k steps are as far everywhere, and in sequences of any length. The spread of that distance,
      as a share of the largest.
    - bounded: the values keep their range at a length never seen. The largest at ``unseen`` over the largest before.
    - deterministic: a position has one encoding, asked again or in another sequence. The largest difference.
    """
    if min(lengths) < 2:
        raise ValueError(f"lengths must be ≥ 2, not {lengths}")

    def encode(length: int) -> Tensor:
        return scheme.forward(torch.arange(length), length, torch.float64)

    seen = [encode(length) for length in sorted(lengths)]  # each [length, dim]
    shortest, longest = seen[0], seen[-1]
    smallest = float(torch.pdist(longest).min())
    spread = 0.0
    for k in (1, 2, len(shortest) // 2):
        steps = torch.cat([(one[k:] - one[:-k]).norm(dim=-1) for one in seen])
        spread = max(spread, float((steps.max() - steps.min()) / steps.max()))
    try:
        growth = float(encode(unseen).abs().max() / longest.abs().max())
    except ValueError:  # a table that ends does not generalise
        growth = math.inf
    change = max(
        float((one[: len(again)] - again).abs().max()) for one in seen for again in (shortest, encode(len(one)))
    )
    return {
        "unique": Measured(smallest > 1e-9, smallest),
        "consistent": Measured(spread < 1e-9, spread),
        "bounded": Measured(growth <= 1 + 1e-9, growth),
        "deterministic": Measured(change == 0, change),
    }


def criteria_table(schemes: Mapping[str, Absolute] | None = None) -> str:
    """The `criteria` of several schemes (order, fraction and sinusoidal if None) as a Markdown table."""
    if schemes is None:
        schemes = {"order number": Order(), "fraction of the length": Fraction(), "sinusoidal": Sinusoidal(64)}
    measured = {name: criteria(scheme) for name, scheme in schemes.items()}
    columns = list(next(iter(measured.values()))) if measured else []
    lines = [["scheme", *columns], ["---"] * (len(columns) + 1)]
    for name, row in measured.items():
        lines.append([name, *(f"{'yes' if m.holds else 'no'} ({m.figure:.3g})" for m in row.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _frequencies(dim: int, base: float, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """base^{−2i/dim} for i = 0 … dim/2 − 1."""
    return 1.0 / base ** (torch.arange(0, dim, 2, device=device).to(dtype) / dim)


def angles_of(
    positions: Tensor, dim: int, base: float, dtype: torch.dtype, scaling: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The angle pos · base^{−2i/dim}: [N, dim/2] or [B, N, dim/2]; ``scaling`` changes the frequencies [dim/2]."""
    frequencies = _frequencies(dim, base, dtype, positions.device)
    return positions[..., None].to(dtype) * (frequencies if scaling is None else scaling(frequencies))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def learned_vectors(rows: int, dim: int) -> nn.Parameter:
    if rows < 1 or dim < 1:
        raise ValueError(f"a table of learned vectors needs at least one row and one entry, not {rows} × {dim}")
    return nn.Parameter(torch.empty(rows, dim).normal_(std=0.02))


def check_even(name: str, value: int) -> None:
    if value < 2 or value % 2:
        raise ValueError(f"{name} must be even and ≥ 2, since entries turn in pairs, not {value}")


def check_positions(positions: Tensor, batch: int | None = None, n: int | None = None) -> None:
    if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
        raise ValueError(f"positions must be whole numbers, not {positions.dtype}")
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions must be [N] or [B, N], not {list(positions.shape)}")
    if n is not None and (positions.shape[-1] != n or (positions.dim() == 2 and len(positions) not in (1, batch))):
        raise ValueError(f"positions {list(positions.shape)} do not fit: expected [{n}] or [{batch}, {n}]")
