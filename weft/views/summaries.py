"""What many attention weights come to: a number for each head, a matrix for all layers, a place for each token.

Every function takes weights [..., N, M] as a record has them (rows of queries, from 0 to 1, each summing to 1 or, for a
query that may look nowhere and for padding, to 0), or the record's entry itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
from torch import Tensor

from weft.observe import Seen
from weft.views.matrix import Values, plain

_MARK = re.compile("</?[a-z]+>")  # a byte is <0x0A>


def mean_of_heads(weights: Seen | Values) -> Tensor:
    """The mean over heads: [B, H, N, M] -> [B, N, M], or [H, N, M] -> [N, M]. Its rows still sum to 1."""
    return _weights(weights).mean(-3)


def entropy(weights: Seen | Values) -> Tensor:
    """How widely each head looks, in bits: the mean over queries of −Σ_j w_ij log₂ w_ij. [..., H, N, M] -> [..., H].

    0 where every query looks at one key; log₂ M where it looks at all alike. Queries that look nowhere do not count.
    """
    w = _weights(weights)
    return _mean_of_queries(-torch.special.xlogy(w, w).sum(-1) / torch.log(torch.tensor(2.0)), w)


def distance(weights: Seen | Values) -> Tensor:
    """How far each head looks, in tokens: the mean over queries of Σ_j w_ij |i − j|. [..., H, N, N] -> [..., H].

    For self-attention: query i and key i are the same token.

    Raises:
        ValueError: if there are not as many queries as keys.
    """
    w = _weights(weights)
    n, m = w.shape[-2:]
    if n != m:
        raise ValueError(f"a distance is for self-attention, of as many queries as keys, not {n} and {m}")
    order = torch.arange(n, dtype=w.dtype)
    return _mean_of_queries((w * (order[:, None] - order).abs()).sum(-1), w)


def alignment(weights: Seen | Values) -> Tensor:
    """The key that each query looks at most: [..., N, M] -> [..., N]; of equals the first, −1 if it looks nowhere."""
    w = _weights(weights)
    return torch.where(w.sum(-1) > 0, w.argmax(-1), -1)


def order(places: Sequence[int]) -> tuple[int, int]:
    """How far a translation keeps the order of its source, from where each target word looks most.

    Args:
        places: in the source, for each target word in its order; −1 for one that looks nowhere, which does not count.

    Returns:
        How many runs there are in which the place never goes back; and how many crossings: pairs of target words whose
        places stand in the opposite order. A diagonal, one run without crossings, is a translation word for word.
    """
    seen = [place for place in places if place >= 0]
    runs = sum(after < before for before, after in pairwise(seen)) + bool(seen)
    return runs, sum(after < before for before, after in combinations(seen, 2))


def rollout(layers: Sequence[Seen | Values], residual: float = 0.5) -> Tensor:
    """How much of each input is in each output of a stack of self-attentions (Abnar and Zuidema 2020).

    With W_l the mean over the heads of layer l, and the residual connection as a share r of looking at oneself::

        A_l = (1 − r) · W_l + r · I, its rows made to sum to 1,    rollout = A_L ⋯ A_2 A_1

    Args:
        layers: weights [B, H, N, N] of each layer, first to last.
        residual: r; the paper's is 0.5.

    Returns:
        [B, N, N]: row i is what output i is made of.

    Raises:
        ValueError: if there are no layers, or they are not of one self-attention's shape.
    """
    if not 0.0 <= residual < 1.0:
        raise ValueError(f"residual must be at least 0 and less than 1, not {residual}")
    means = [mean_of_heads(layer) for layer in layers]
    if not means:
        raise ValueError("expected at least one layer, not none")
    shape = means[0].shape
    if shape[-1] != shape[-2] or any(mean.shape != shape for mean in means):
        shapes = ", ".join(str(list(mean.shape)) for mean in means)
        raise ValueError(f"rollout needs the self-attentions of one stack, [B, N, N] each, not {shapes}")
    rolled = torch.eye(shape[-1])
    for mean in means:
        mixed = (1.0 - residual) * mean + residual * torch.eye(shape[-1])
        rolled = mixed / mixed.sum(-1, keepdim=True).clamp(min=1e-12) @ rolled
    return rolled.expand(shape)


def word_numbers(labels: Sequence[str]) -> list[int]:
    """For each token the number of its word: a word begins with a space (or ▁), and a mark such as </s> is one."""
    numbers: list[int] = []
    for label in labels:
        begins = label[:1] in ("", " ", "▁", "…") or _MARK.fullmatch(label) is not None
        numbers.append(numbers[-1] + begins if numbers else 0)
    return numbers


def by_words(weights: Values, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    """Weights between words from weights between their pieces: [..., N, M] -> [..., words, words].

    A word is looked at as much as all of its pieces together, and looks where its pieces look on average; rows that
    summed to 1 still do.

    Args:
        weights: [..., N, M].
        queries, keys: for each of the N and of the M tokens the number of its word, 0, 0, 1, …

    Raises:
        ValueError: if there are other numbers of tokens.
    """
    w = _weights(weights)
    if w.shape[-2:] != (len(queries), len(keys)):
        raise ValueError(f"{len(queries)} and {len(keys)} tokens do not fit weights {list(w.shape)}")
    rows, columns = (
        torch.nn.functional.one_hot(torch.tensor(side, dtype=torch.int64), max(side, default=-1) + 1).to(w.dtype)
        for side in (queries, keys)
    )
    return (rows / rows.sum(0)).T @ w @ columns


def _weights(given: Seen | Values) -> Tensor:
    weights = plain(given.weights if isinstance(given, Seen) else given, torch.float32)
    if weights.dim() < 2:
        raise ValueError(f"expected weights [..., query, key], not {list(weights.shape)}")
    return weights


def _mean_of_queries(values: Tensor, weights: Tensor) -> Tensor:
    """The mean of values [..., N] over the queries that look somewhere."""
    looks = weights.sum(-1) > 0
    return (values * looks).sum(-1) / looks.sum(-1).clamp(min=1)
