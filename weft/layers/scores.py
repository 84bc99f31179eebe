"""Attention as it is built up: a score for each query and key, a softmax, a weighted mean of the values.

    scores[B, N, M] ─ softmax over the keys ─▶ weights[B, 1, N, M] ─ times values ─▶ context[B, N, V]

The score is the part that differs: a dot product, scaled, through a matrix, or a small network. With
one query it is a soft look-up in a memory; with many, rows of the same; with each input its own
query, self-attention. ``HardAttention`` is the look-up without the softness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import observe
from weft.kernels import additive
from weft.kernels.attention import attend, attention_weights, vectors
from weft.kernels.mask import Mask, check_mask
from weft.layers.linear import Linear

Look = Callable[[Tensor], Tensor]  # a query [B, Q] and what it finds [B, V]

# How many numbers the inner layer of the additive score makes at a time, 64 MB in fp32: a longer
# list of queries goes in parts, which bounds the memory where no gradient is kept.
_PART = 1 << 24


class Terms(NamedTuple):
    """A score in the form that the kernel takes: scale · q kᵀ + bias."""

    q: Tensor  # [B, 1, N, D]
    k: Tensor  # [B, 1, M, D]
    bias: Tensor | None  # [B, 1, N, M]
    scale: float


class Score(nn.Module):
    """How well each query fits each key.

    ``project`` does what needs the keys alone, so that a decoder does it once and not at each step::

        projected = score.project(keys)     # [B, M, K] -> [B, M, ·]
        scores = score(query, projected)    # [B, N, Q] -> [B, N, M]
    """

    def project(self, keys: Tensor) -> Tensor:
        """What of the score needs the keys alone: [B, M, K] -> [B, M, ·]."""
        return keys

    def terms(self, query: Tensor, projected: Tensor) -> Terms:
        """The score of query[B, N, Q] and the projected keys as the kernel takes it."""
        raise NotImplementedError

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        """The scores [B, N, M] of query[B, N, Q] and the projected keys."""
        q, k, bias, scale = self.terms(query, projected)
        scores = q @ k.transpose(-2, -1) * scale
        return (scores if bias is None else scores + bias)[:, 0]

    def looks(self, projected: Tensor, values: Tensor, mask: Mask | None) -> Look | None:
        """Soft attention by one query after the other over the same keys, where that has a fast way of its own."""
        return None


class DotScore(Score):
    """qᵀ k: the larger, the more alike (Luong et al. 2015). Queries and keys have the same width."""

    def terms(self, query: Tensor, projected: Tensor) -> Terms:
        """The query and the key as they are."""
        if query.shape[-1] != projected.shape[-1]:
            raise ValueError(
                f"a dot product needs queries and keys of one width, not {query.shape[-1]} and {projected.shape[-1]}"
            )
        return Terms(query[:, None], projected[:, None], None, self.scale(query.shape[-1]))

    def scale(self, dim: int) -> float:
        """What the product of two vectors of ``dim`` numbers is multiplied by."""
        return 1.0


class ScaledDotScore(DotScore):
    """qᵀ k / √dim: the variance of the score does not grow with the width (Vaswani et al. 2017)."""

    def scale(self, dim: int) -> float:
        """1 / √dim."""
        return float(dim**-0.5)


class BilinearScore(Score):
    """qᵀ W k with W learned [query_dim, key_dim] (Luong et al. 2015, "general")."""

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        self.key = Linear(key_dim, query_dim, bias=False)

    def project(self, keys: Tensor) -> Tensor:
        """W k: [B, M, key_dim] -> [B, M, query_dim]."""
        projected: Tensor = self.key(keys)
        return projected

    def terms(self, query: Tensor, projected: Tensor) -> Terms:
        """The product of the query and W k."""
        return Terms(query[:, None], projected[:, None], None, 1.0)


class AdditiveScore(Score):
    """vᵀ tanh(W_q q + W_k k + b): a small network looks at both (Bahdanau et al. 2015)."""

    def __init__(self, query_dim: int, key_dim: int, dim: int) -> None:
        """Make a network with ``dim`` inner units."""
        super().__init__()
        self.query = Linear(query_dim, dim, bias=False)
        self.key = Linear(key_dim, dim)
        self.energy = Linear(dim, 1, bias=False)

    def project(self, keys: Tensor) -> Tensor:
        """W_k k + b: [B, M, key_dim] -> [B, M, dim]."""
        projected: Tensor = self.key(keys)
        return projected

    def terms(self, query: Tensor, projected: Tensor) -> Terms:
        """The whole score is a bias: there is no product of a query and a key in it."""
        none = query.new_zeros(query.shape[0], 1, 1, 1)
        q, k = none.expand(-1, -1, query.shape[1], -1), none.expand(-1, -1, projected.shape[1], -1)
        return Terms(q, k, self(query, projected)[:, None], 1.0)

    def forward(self, query: Tensor, projected: Tensor) -> Tensor:
        """The scores [B, N, M] of query[B, N, query_dim] and the projected keys [B, M, dim]."""
        rows = max(1, _PART // max(1, projected.numel()))
        parts = self.query(query).split(rows, 1)
        scores = [self.energy((part[:, :, None] + projected[:, None]).tanh()) for part in parts]  # [B, rows, M, 1]
        return (scores[0] if len(scores) == 1 else torch.cat(scores, 1))[..., 0]

    def looks(self, projected: Tensor, values: Tensor, mask: Mask | None) -> Look | None:
        """Compiled, where training has chosen that."""
        energy = self.energy.weight[0]
        if not additive.serves(projected, values, energy, mask):
            return None
        memory = additive.Memory(projected, values, energy, mask)
        return lambda query: memory.look(self.query(query))


class ScoreAttention(nn.Module):
    """Soft attention with any score: softmax of the scores, then the weighted mean of the values.

    The weights [B, 1, N, M] are recorded. A query that may attend nowhere gets a context of zeros.

    Example:
        >>> attention = ScoreAttention(ScaledDotScore())
        >>> attention(torch.randn(2, 1, 8), torch.randn(2, 5, 8)).shape  # one query, five keys
        torch.Size([2, 1, 8])
    """

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor | None = None,
        mask: Mask | None = None,
        projected: Tensor | None = None,
    ) -> Tensor:
        """Look up each query.

        Args:
            query: [B, N, Q].
            keys: [B, M, K].
            values: [B, M, V]; the keys themselves if None.
            mask: which keys each query may attend to; all if None.
            projected: ``score.project(keys)``, if it is already there.

        Returns:
            The context [B, N, V].

        Raises:
            ValueError: if the shapes do not fit each other.
        """
        values = keys if values is None else values
        if query.dim() != 3 or keys.dim() != 3 or values.shape[:2] != keys.shape[:2] or len(query) != len(keys):
            raise ValueError(
                "expected query [B, N, Q], keys [B, M, K] and values [B, M, V], "
                f"not {list(query.shape)}, {list(keys.shape)} and {list(values.shape)}"
            )
        check_mask(mask, query.shape[0], 1, query.shape[1], keys.shape[1])
        projected = self.score.project(keys) if projected is None else projected
        observe.see(self, "weights", lambda: {"weights": self.weights(query, projected, mask)})
        return self.context(query, projected, values, mask)

    def weights(self, query: Tensor, projected: Tensor, mask: Mask | None = None) -> Tensor:
        """The weights [B, 1, N, M] of query[B, N, Q] over the projected keys."""
        q, k, bias, scale = self.score.terms(query, projected)
        return attention_weights(q, k, mask, bias, scale)

    def context(self, query: Tensor, projected: Tensor, values: Tensor, mask: Mask | None = None) -> Tensor:
        """The context [B, N, V], unrecorded: for a loop that shows all of its steps at once."""
        q, k, bias, scale = self.score.terms(query, projected)
        return attend(q, k, values[:, None], mask, bias, scale)[:, 0]

    def looks(self, projected: Tensor, values: Tensor, masks: Sequence[Mask | None]) -> list[Look]:
        """Of each step of a loop, with its mask, the context [B, V] of a query [B, Q]; unrecorded."""

        def look(mask: Mask | None) -> Look:
            return lambda query: self.context(query[:, None], projected, values, mask)[:, 0]

        alike = all(mask is masks[0] for mask in masks)
        fast = self._fast(projected, values, masks[0]) if alike else None
        return [fast or look(mask) for mask in masks]

    def _fast(self, projected: Tensor, values: Tensor, mask: Mask | None) -> Look | None:
        return self.score.looks(projected, values, mask)


class AdditiveAttention(ScoreAttention):
    """The attention of Bahdanau et al. 2015.

    e_i = vᵀ tanh(W_q q + W_k k_i + b),    α = softmax(e),    context = Σ_i α_i v_i
    """

    def __init__(self, query_dim: int, key_dim: int, dim: int) -> None:
        """Make the score: queries of ``query_dim``, keys of ``key_dim``, ``dim`` inner units."""
        super().__init__(AdditiveScore(query_dim, key_dim, dim))


class HardAttention(ScoreAttention):
    """The value of the single best key, the contrast to soft attention.

    A step of the argmax has no slope: gradients reach the chosen values, and neither the query nor
    the keys nor the score. Such a score must be learned in another way. The recorded weights are
    one-hot; of equal scores the kernel's argmax takes one. Nothing allowed: a context of zeros.
    """

    def weights(self, query: Tensor, projected: Tensor, mask: Mask | None = None) -> Tensor:
        """The choice [B, 1, N, M]: 1 at the best allowed key, 0 elsewhere."""
        with torch.no_grad():
            scores = self.score(query, projected)[:, None]  # [B, 1, N, M]
        allowed = (mask or Mask()).dense(query.shape[1], projected.shape[1], scores.device)
        best = scores.masked_fill(~allowed, float("-inf")).argmax(-1)
        return F.one_hot(best, scores.shape[-1]).to(scores).masked_fill(~allowed, 0.0)

    def context(self, query: Tensor, projected: Tensor, values: Tensor, mask: Mask | None = None) -> Tensor:
        """The chosen values [B, N, V]."""
        return self.weights(query, projected, mask)[:, 0] @ values

    def _fast(self, projected: Tensor, values: Tensor, mask: Mask | None) -> Look | None:
        return None


class SelfAttention(nn.Module):
    """Self-attention without a parameter: W = softmax(scale · X Xᵀ), Y = W X.

    Each input is its own query, key and value. A vector is most like itself, so the diagonal of W
    stands out; learned projections of queries, keys and values are what frees attention from that.
    The weights [B, 1, N, N] are recorded.
    """

    def __init__(self, scale: float | None = 1.0) -> None:
        """Set the scale: 1 for the plain product, None for 1 / √dim."""
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """Mix the inputs x[B, N, D] by how alike they are: [B, N, D].

        Raises:
            ValueError: if x has another number of dimensions.
        """
        if x.dim() != 3:
            raise ValueError(f"expected x [B, N, D], not {list(x.shape)}")
        x = x[:, None]
        observe.see(
            self,
            "weights",
            lambda: {"weights": attention_weights(x, x, mask, scale=self.scale)},
            {"vectors": lambda: vectors(x, x, x, mask, scale=self.scale)},
        )
        return attend(x, x, x, mask, scale=self.scale)[:, 0]


# The scores by name, all called alike: SCORES[name](query_dim, key_dim, dim).
SCORES: dict[str, Callable[[int, int, int], Score]] = {
    "dot": lambda query_dim, key_dim, dim: DotScore(),
    "scaled_dot": lambda query_dim, key_dim, dim: ScaledDotScore(),
    "bilinear": lambda query_dim, key_dim, dim: BilinearScore(query_dim, key_dim),
    "additive": AdditiveScore,
}
