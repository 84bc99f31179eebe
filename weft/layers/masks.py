"""The masks of the field by name, over `weft.kernels.mask.Mask`.

The pictures show which key (across) each query (down) may attend to: ``■`` may, ``·`` may not.
Masks combine with ``&`` or `combine`::

    mask = masks.combine(masks.causal(), masks.padding([5, 3]))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from weft.kernels.mask import Mask


def padding(lengths: Tensor | Sequence[int]) -> Mask:
    """Keys behind the end of their row are closed.

    A row of 5 keys with length 3::

        ■ ■ ■ · ·
        ■ ■ ■ · ·

    Args:
        lengths: [B] how many keys are real in each row.
    """
    return Mask(lengths=torch.as_tensor(lengths))


def padding_from_tokens(tokens: Tensor, pad_id: int) -> Mask:
    """The padding of ``tokens`` [B, M], whose rows are filled up at the right with ``pad_id``.

    Raises:
        ValueError: if a padding token stands before a real one.
    """
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be whole numbers [B, M], not {tokens.dtype} {list(tokens.shape)}")
    real = tokens != pad_id
    lengths = real.sum(1)
    early = (~real & (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None])).nonzero()
    if len(early):
        row, place = early[0].tolist()
        raise ValueError(
            f"padding must be at the right, but row {row} has the padding token {pad_id} "
            f"at position {place} and real tokens behind it"
        )
    return Mask(lengths=lengths)


def causal() -> Mask:
    """No query sees a later key.

    ::

        ■ · · ·
        ■ ■ · ·
        ■ ■ ■ ·
        ■ ■ ■ ■
    """
    return Mask(causal=True)


def prefix(n: int | Tensor) -> Mask:
    """Causal, but the first ``n`` keys are open to all (Raffel et al., 2020: the prefix language model).

    With n = 2::

        ■ ■ · ·
        ■ ■ · ·
        ■ ■ ■ ·
        ■ ■ ■ ■

    Args:
        n: one number, or one per row [B].
    """
    return Mask(causal=True, prefix=n)


def window(size: int, causal: bool = True) -> Mask:
    """Each query sees itself and the ``size − 1`` keys before it; without ``causal`` as many behind it too.

    With size = 2, causal and not (Beltagy et al., 2020)::

        ■ · · ·    ■ ■ · ·
        ■ ■ · ·    ■ ■ ■ ·
        · ■ ■ ·    · ■ ■ ■
        · · ■ ■    · · ■ ■
    """
    return Mask(causal=causal, window=size)


def block(length: int, size: int) -> Mask:
    """Blocks of ``size`` along the diagonal: each position attends inside its own; the last may be shorter.

    With length = 5 and size = 2::

        ■ ■ · · ·
        ■ ■ · · ·
        · · ■ ■ ·
        · · ■ ■ ·
        · · · · ■
    """
    if length < 0 or size < 1:
        raise ValueError(f"a block mask needs length ≥ 0 and size ≥ 1, not length {length} and size {size}")
    return Mask(segments=torch.arange(length)[None] // size)


def packed(segments: Tensor, causal: bool = True) -> Mask:
    """Several documents in one row: each position attends inside its own document.

    With segments [[0, 0, 1, 1, 1]], causal::

        ■ · · · ·
        ■ ■ · · ·
        · · ■ · ·
        · · ■ ■ ·
        · · ■ ■ ■

    Args:
        segments: [B, M] the number of the document at each position.
        causal: no position sees a later one of its document.
    """
    return Mask(causal=causal, segments=segments)


def packed_from_lengths(documents: Sequence[Sequence[int]], total: int, causal: bool = True) -> Mask:
    """The mask of packed rows, from the lengths of the documents in each.

    What a row has left of ``total`` is padding, which attends nowhere and is attended by none.

    Args:
        documents: one list per row: the lengths of its documents, in order.
        total: the length of every row.
        causal: no position sees a later one of its document.

    Raises:
        ValueError: if a length is negative or a row holds more than ``total``.
    """
    segments = torch.full((len(documents), total), -1)
    filled = [sum(row) for row in documents]
    for number, row in enumerate(documents):
        if any(length < 0 for length in row) or filled[number] > total:
            raise ValueError(
                f"row {number} has documents of length {list(row)}: expected ≥ 0, at most {total} together"
            )
        segments[number, : filled[number]] = torch.arange(len(row)).repeat_interleave(
            torch.tensor(row, dtype=torch.long)
        )
    lengths = torch.tensor(filled) if any(count < total for count in filled) else None
    return Mask(causal=causal, segments=segments, lengths=lengths)


def from_edges(edges: Tensor, num_nodes: int, self_loops: bool = True, directed: bool = False) -> Mask:
    """The edges of a graph, nodes as tokens: along the edge (u, v) node v attends to node u.

    The path 0 – 1 – 2, directed and not, with self-loops::

        ■ · ·    ■ ■ ·
        ■ ■ ·    ■ ■ ■
        · ■ ■    · ■ ■

    Args:
        edges: [2, E] node numbers, the sources over the targets.
        num_nodes: how many nodes there are.
        self_loops: every node attends to itself too.
        directed: if False, u attends to v as well.

    Raises:
        ValueError: if an edge names a node that does not exist.
    """
    if edges.dim() != 2 or edges.shape[0] != 2 or edges.is_floating_point() or edges.dtype == torch.bool:
        raise ValueError(f"edges must be whole numbers [2, E], not {edges.dtype} {list(edges.shape)}")
    strange = edges[(edges < 0) | (edges >= num_nodes)]
    if len(strange):
        raise ValueError(f"an edge names node {int(strange[0])}, but the {num_nodes} nodes are 0 … {num_nodes - 1}")
    source, target = edges.long()
    pattern = torch.zeros(num_nodes, num_nodes, dtype=torch.bool, device=edges.device)
    pattern[target, source] = True
    if not directed:
        pattern |= pattern.T.clone()
    if self_loops:
        pattern.fill_diagonal_(True)
    return Mask(pattern=pattern)


def combine(*masks: Mask | None) -> Mask:
    """What all of ``masks`` allow; None allows everything."""
    return reduce(Mask.__and__, (mask for mask in masks if mask is not None), Mask())
