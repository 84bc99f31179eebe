"""Attention: softmax(scale · q kᵀ + bias) v, where the mask allows it."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.mask import Mask


def attention_weights(
    q: Tensor, k: Tensor, mask: Mask | None = None, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The reference: weights[B, H, N, M] = softmax over keys of scale · q kᵀ + bias, where allowed.

    A query that may attend nowhere gets weights of zero.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)  # [B, H, N, M]
    if bias is not None:
        scores = scores + bias
    if mask is None or mask.open:
        return scores.softmax(-1)
    allowed = mask.dense(q.shape[2], k.shape[2], q.device)
    empty = ~allowed.any(-1, keepdim=True)  # left open for the softmax, which of nothing would be NaN
    weights = scores.masked_fill(~(allowed | empty), float("-inf")).softmax(-1)
    return weights.masked_fill(empty, 0.0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of queries q[B, H, N, D] over keys k[B, G, M, D] and values v[B, G, M, E]: [B, H, N, E]."""
    weights = torch.nn.functional.dropout(attention_weights(q, k, mask, bias, scale), dropout)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
