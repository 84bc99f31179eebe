"""Relative positions: what counts is how far a key stands from a query.

    ShawRelative · T5Bias · ALiBi   a bias [B, H, N, M] on the scores, from the distance key − query
    Rotary                          turns q and k, so that q · k depends on their distance

As with the absolute schemes, positions are whole numbers [N] or one list per row [B, N].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.kernels.linear import linear
from weft.layers.positions import angles_of, at_least_float32, check_even, check_positions, learned_vectors


def distances(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """How far each key stands behind each query, key − query: [1 or B, N, M].

    Args:
        query_positions: [N] or [B, N].
        key_positions: [M] or [B, M].
    """
    check_positions(query_positions)
    check_positions(key_positions)
    query, key = (p.long() if p.dim() == 2 else p.long()[None] for p in (query_positions, key_positions))
    if 1 not in (len(query), len(key)) and len(query) != len(key):
        raise ValueError(f"there are {len(query)} rows of query positions, but {len(key)} of key positions")
    return key[:, None, :] - query[:, :, None]


class ShawRelative(nn.Module):
    """A learned vector for each distance, clipped to ±max_distance and shared by the heads (Shaw et al., 2018).

    score_ij = scale · q_i · (k_j + a_{clip(j − i)}),  output_i = Σ_j weight_ij (v_j + b_{clip(j − i)})

    Calling the module gives the q · a term and `values` the b term. Neither makes an [N, M, D] tensor: q meets
    the 2 · max_distance + 1 vectors first and the results are looked up, and the weights are summed by distance first.

    Args:
        head_dim: the size of the vectors.
        max_distance: everything farther shares one vector on each side.
        values: whether there are vectors b; the paper found a alone to do about as well.
    """

    def __init__(self, head_dim: int, max_distance: int, values: bool = True) -> None:
        super().__init__()
        if max_distance < 0:
            raise ValueError(f"max_distance must be ≥ 0, not {max_distance}")
        self.head_dim, self.max_distance = head_dim, max_distance
        self.key_vectors = learned_vectors(2 * max_distance + 1, head_dim)
        self.value_vectors = learned_vectors(2 * max_distance + 1, head_dim) if values else None

    def forward(self, q: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """q_i · a_{clip(j − i)} for q[B, H, N, D]: [B, H, N, M], unscaled: the bias is this times the scores' scale."""
        check_positions(query_positions, q.shape[0], q.shape[2])
        index = self._index(query_positions, key_positions)
        by_distance = linear(q.to(self.key_vectors.dtype), self.key_vectors)  # [B, H, N, 2 · max_distance + 1]
        return by_distance.gather(-1, index.expand(*q.shape[:3], -1))

    def values(self, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Σ_j weights_ij b_{clip(j − i)} for weights[B, H, N, M]: [B, H, N, D], to add to the attention's output."""
        if self.value_vectors is None:
            raise ValueError("this ShawRelative was made with values=False: it has no vectors for the values")
        check_positions(query_positions, weights.shape[0], weights.shape[2])
        check_positions(key_positions, weights.shape[0], weights.shape[3])
        index = self._index(query_positions, key_positions)
        weights = weights.to(self.value_vectors.dtype)
        by_distance = weights.new_zeros(*weights.shape[:3], len(self.value_vectors))
        return linear(by_distance.scatter_add(-1, index.expand(weights.shape), weights), self.value_vectors.T)

    def _index(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """The vector for each pair: [1 or B, 1, N, M]."""
        clipped = distances(query_positions, key_positions).clamp(-self.max_distance, self.max_distance)
        return clipped[:, None] + self.max_distance


class T5Bias(nn.Module):
    """A learned bias for each head and each bucket of distances (Raffel et al., 2020).

    Args:
        num_heads: how many heads.
        num_buckets: how many buckets, half of them for each direction if ``bidirectional``.
        max_distance: everything farther shares the last bucket.
        bidirectional: tell keys before and behind a query apart; if False all keys behind it are alike.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        sides = 2 if bidirectional else 1
        if num_buckets < 2 * sides or num_buckets % sides or max_distance <= num_buckets // sides // 2:
            raise ValueError(
                f"num_buckets must be {'even and ≥ 4' if bidirectional else '≥ 2'} and max_distance more than the "
                f"{num_buckets // sides // 2} exact buckets, not {num_buckets} and {max_distance}"
            )
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.weight = learned_vectors(num_buckets, num_heads)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """The bias of each pair, for query positions [N] or [B, N] and key positions [M]: [1 or B, H, N, M]."""
        buckets = self.buckets(distances(query_positions, key_positions))  # [1 or B, N, M]
        # Per head, not per bucket: forward and backward take 5 ms so and 29 ms by an embedding (N = M = 512, 8 heads).
        bias = self.weight.T.index_select(1, buckets.flatten())  # [H, B · N · M]
        return bias.view(-1, *buckets.shape).transpose(0, 1)

    def buckets(self, distance: Tensor) -> Tensor:
        """The bucket of each distance key − query: the near half exact, the far half wider by powers."""
        if self.bidirectional:
            count = self.num_buckets // 2
            first, distance = (distance > 0) * count, distance.abs()
        else:
            count = self.num_buckets
            first, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
        exact = count // 2
        # In float32 whatever the module's dtype: distances on the edge of a bucket must not change sides.
        far = torch.log(distance.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        far_bucket = (exact + (far * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, far_bucket)


class ALiBi(nn.Module):
    """Scores fall with distance, each head at its own rate: bias = −slope_h · |i − j| (Press et al., 2022).

    The slopes of n = 2^m heads are 2^{−8/n}, 2^{−16/n}, …, 2^{−8}. Other counts take those of the next smaller
    power of two, then every second one of twice that power.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads must be ≥ 1, not {num_heads}")
        power = 1 << (num_heads.bit_length() - 1)
        whole = [2 ** (-8 * (head + 1) / power) for head in range(power)]
        between = [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
        self.slopes = (*whole, *between)

    def forward(self, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The bias of each pair, for query positions [N] or [B, N] and key positions [M]: [1 or B, H, N, M]."""
        distance = distances(query_positions, key_positions).abs()[:, None]  # [1 or B, 1, N, M]
        dtype = dtype or torch.get_default_dtype()
        slopes = torch.tensor(self.slopes, dtype=at_least_float32(dtype), device=distance.device)
        return (-slopes[:, None, None] * distance).to(dtype)


class Rotary(nn.Module):
    """Turns each pair of entries by an angle that grows with the position (Su et al., 2021).

    (x_a, x_b) → (x_a cos pθ_i − x_b sin pθ_i,  x_b cos pθ_i + x_a sin pθ_i),  θ_i = base^{−2i/head_dim}

    The product of a q and a k turned so depends on their distance, not on where they stand. A model of many layers
    makes the `angles` once per step and calls `turn` in each layer.

    Args:
        head_dim: the size of a head, even.
        base: of the wavelengths.
        interleaved: pair entry 2i with 2i + 1 (as in the paper and GPT-J), not i with i + head_dim/2 (Llama).
        scaling: changes the frequencies θ [head_dim/2], for a context longer than the one first trained with
            (`slowed`, `slowed_where_low`).
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scaling: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        check_even("head_dim", head_dim)
        self.head_dim, self.base, self.interleaved, self.scaling = head_dim, base, interleaved, scaling

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x[B, H, N, head_dim] turned to its ``positions`` [N] or [B, N]; computed in float32 at least."""
        check_positions(positions, x.shape[0], x.shape[2])
        return self.turn(x, *self.angles(positions, x.dtype))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cos and sin of the angles, each [1 or B, 1, N, head_dim/2], for x of ``dtype``.

        They are float32, as in Llama, so that published weights find the angles they were trained with;
        float64 for float64.
        """
        angles = self.table(positions, dtype)
        angles = angles.reshape(-1, 1, *angles.shape[-2:])
        return angles.cos(), angles.sin()

    def table(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The angles themselves [N, head_dim/2] or [B, N, head_dim/2], by which what stands there is turned."""
        check_positions(positions)
        return angles_of(positions, self.head_dim, self.base, at_least_float32(dtype), self.scaling)

    def turning(self, positions: Tensor, dtype: torch.dtype) -> Turning:
        """What turns queries and keys x of ``dtype`` that stand at ``positions`` [N] or [B, N], layer after layer."""
        return Turning(self, *self.angles(positions, dtype))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x[B, H, N, head_dim] turned by what `angles` gave."""
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"expected heads of size {self.head_dim}, not {x.shape[-1]}")
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = x.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return turned.to(x.dtype)


@dataclass(frozen=True)
class Turning:
    """A rotation by angles that are made already, as attention layers take it: all of a model's have the same.

    Attributes:
        rotary: whose it is.
        cos, sin: [1 or B, 1, N, head_dim/2].
    """

    rotary: Rotary
    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, N, head_dim] turned; where it stands, the angles know."""
        return self.rotary.turn(x, self.cos, self.sin)


def slowed(frequencies: Tensor, factor: float) -> Tensor:
    """θ / factor: positions up to factor · N turn as far as those up to N did (Chen et al., 2023)."""
    return frequencies / factor


def slowed_where_low(frequencies: Tensor, factor: float, low: float, high: float, length: int) -> Tensor:
    """θ / factor for the slow, θ for the fast, and something between for those between, as in Llama 3.1.

    A frequency that turns ``low`` times or less in ``length`` positions is slow, one that turns ``high`` times or
    more is fast: θ ((1 − s) / factor + s) with s = (turns − low) / (high − low), from 0 to 1.

    Args:
        frequencies: θ, in radians a position.
        factor: by which the slow are divided.
        low: turns in the original context.
        high: turns in the original context.
        length: the original context.
    """
    turns = length * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * ((1.0 - share) / factor + share)
