"""One attention matrix, ready to be drawn: weights, labels, what was closed, and a caption that says what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unicodedata import category

import torch
from torch import Tensor

from weft.observe import Seen

INK = ("#ffffff", "#5f97cb", "#0a2f66")  # of a weight from 0 to 1: one hue, in even steps of CIE lightness
# A tensor, an array of any library, or rows of numbers.
Values = Any


class Matrix:
    """Weights of attention with a row per query and a column per key.

    Attributes:
        weights: [N, M] from 0 to 1.
        queries, keys: N and M labels.
        allowed: boolean [N, M], False where a query may not look; None if it may look everywhere.
        caption: what is shown.
        sides: what the rows and what the columns are.
    """

    def __init__(
        self,
        weights: Values,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        allowed: Values | None = None,
        caption: str = "",
        sides: tuple[str, str] = ("query", "key"),
    ) -> None:
        """Take weights and allowed as tensors, arrays or lists of rows; without labels there are numbers.

        Raises:
            ValueError: if the shapes do not fit, or a weight is not between 0 and 1.
        """
        self.weights = plain(weights, torch.float32)
        if self.weights.dim() != 2:
            raise ValueError(f"expected weights [queries, keys], not of shape {list(self.weights.shape)}")
        if not bool(((self.weights >= 0) & (self.weights <= 1 + 1e-5)).all()):  # NaN is neither
            raise ValueError("weights of attention lie between 0 and 1, and these do not")
        n, m = self.weights.shape
        self.queries = _labels("queries", queries, n)
        self.keys = _labels("keys", keys, m)
        self.allowed = None if allowed is None else plain(allowed, torch.bool)
        if self.allowed is not None and self.allowed.shape != (n, m):
            raise ValueError(f"allowed {list(self.allowed.shape)} does not fit the weights [{n}, {m}]")
        self.caption = caption
        self.sides = sides

    @property
    def closed(self) -> Tensor:
        """Where a query may not look: boolean [N, M]."""
        return torch.zeros_like(self.weights, dtype=torch.bool) if self.allowed is None else ~self.allowed


def of(
    seen: Seen | Sequence[Seen], head: int | None = None, row: int = 0, allowed: Values | None = None, caption: str = ""
) -> Matrix:
    """The matrix of one recorded call, or of the steps of a decoder one below the other.

    A step of self-attention has one key more than the step before it; what it could not see is closed.

    Args:
        seen: a record of attention, or a list of them in the order of the steps.
        head: which head; the mean of all if None.
        row: which sequence of the batch.
        allowed: boolean [N, M], or [B or 1, H or 1, N, M] as ``mask.dense(n, m)`` gives it.
        caption: put before the name and the head.

    Raises:
        ValueError: if there is no such head or row.
    """
    steps = [seen] if isinstance(seen, Seen) else list(seen)
    if not steps:
        raise ValueError("expected at least one recorded call, not none")
    first = steps[0]
    batch, num_heads = first.weights.shape[:2]
    if not (0 <= row < batch and (head is None or 0 <= head < num_heads)):
        raise ValueError(f"{first.name!r} has {batch} rows and {num_heads} heads, so no row {row}, head {head}")
    parts = [step.weights[row].mean(0) if head is None else step.weights[row, head] for step in steps]  # each [n, m]
    longest = max(part.shape[1] for part in parts)
    weights = torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts])
    if allowed is not None:
        allowed = _matrix_of(plain(allowed, torch.bool), row, head or 0)
    elif any(part.shape[1] < longest for part in parts):
        widths = torch.cat([torch.full((len(part), 1), part.shape[1]) for part in parts])
        allowed = torch.arange(longest) < widths
    labels = [label for step in steps if step.queries is not None for label in step.queries]
    which = f"head {head + 1} of {num_heads}" if head is not None else f"mean of {num_heads} heads"
    told = f"{first.name}, {'one head' if num_heads == 1 else which}, after the softmax"
    return Matrix(weights, labels or None, steps[-1].keys, allowed, f"{caption}: {told}" if caption else told)


def heads(seen: Seen | Sequence[Seen], row: int = 0, allowed: Values | None = None) -> list[Matrix]:
    """A matrix for each head of one recorded call, or of the steps of a decoder."""
    first = seen if isinstance(seen, Seen) else seen[0]
    matrices = [of(seen, head, row, allowed) for head in range(first.weights.shape[1])]
    for number, matrix in enumerate(matrices):
        matrix.caption = f"head {number + 1}"
    return matrices


def visible(label: str) -> str:
    """A label as it is drawn: a space as a small dot, what has no picture as �."""
    return "".join("·" if c == " " else "�" if category(c) in ("Cc", "Cn", "Co", "Cs") else c for c in label)


def plain(values: Values, dtype: torch.dtype) -> Tensor:
    """Any array as a tensor that is drawn from."""
    return torch.as_tensor(values).detach().to("cpu", dtype)


def _matrix_of(allowed: Tensor, row: int, head: int) -> Tensor:
    """The [N, M] of one row and head, where [B or 1, H or 1, N, M] may tell them apart."""
    for chosen in (row, head)[: allowed.dim() - 2]:
        allowed = allowed[chosen if len(allowed) > 1 else 0]
    return allowed


def _labels(side: str, given: Sequence[str] | None, count: int) -> list[str]:
    if given is None:
        return [str(number) for number in range(count)]
    if len(given) != count:
        raise ValueError(f"there are {count} {side}, but {len(given)} labels were given")
    return [visible(label) for label in given]
