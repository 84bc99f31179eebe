"""Batches of a long text or of packed documents, as a pure function of a seed and a number.

    batches = PackedBatches(store, rows=64, length=256, seed=1)                           # nanoGPT's
    batches = PackedBatches(store, rows=64, length=256, seed=1, sample="rounds")          # each token once an epoch
    batches = PackedBatches(store, rows=64, length=256, seed=1, sample="documents")       # packed, kept apart
    batches.at(0), batches.at(1), …     # batch number n over all epochs and ranks
    sampled(validation, 64, 256, count=200, seed=1)     # nanoGPT's estimate of the loss: the mean over these
    in_order(validation, 64, 256, stride=128)           # every token once, with at least 128 before it

A row has length + 1 tokens: a model reads all but the last and should say all but the first. Nothing is remembered from
one batch to the next: a run that stops before number n goes on with number n.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.config import PAD, nearest
from weft.data.batching import scrambled
from weft.data.text_store import TextStore

Sample = Literal["stream", "rounds", "documents"]

_SAMPLES = ("stream", "rounds", "documents")
_WINDOWS, _DOCUMENTS, _ROWS, _BEGIN = range(4)  # what random numbers are for, so that each use has its own


class TokenBatch(NamedTuple):
    """Rows of text. A model reads ``tokens[:, :-1]`` and should say ``tokens[:, 1:]``.

    Attributes:
        tokens: [B, N + 1].
        segments: [B, N + 1] numbers that differ from document to document and do not fall along a row: attention stays
            inside a document, and its first token is not asked for. Each place of padding is a document of its own.
            None: the rows are one text each.
        counted: [B, N] which of ``tokens[:, 1:]`` count for the loss; None: all that the segments leave.
    """

    tokens: Tensor
    segments: Tensor | None = None
    counted: Tensor | None = None


class PackedBatches:
    """The batches of a text, over and over.

    ``stream`` takes windows at random places of the whole text, as nanoGPT does; documents are not told apart.
    ``rounds`` goes round the text once in each epoch, from a place of its own on, the end and the beginning joined, and
    shuffles the rows: each token is asked for once, but for the few that are no whole row, and behind others each time.
    ``documents`` shuffles the documents each epoch, lays them one behind the other and cuts that into rows. Each row
    begins with the last token of the one before it, so that in an epoch each token is read once and each but the first
    of a document is asked for once. The rows are shuffled too; the last batch of an epoch may have fewer, and
    the end of its last document is followed by padding.

    Micro-batches are numbered over all ranks: rank r of w takes the numbers r, r + w, r + 2w, …

    Attributes:
        per_epoch: how many batches ask for each token once; of a stream, for as many tokens as there are.
    """

    def __init__(self, store: TextStore, rows: int, length: int, seed: int, *, sample: Sample = "stream") -> None:
        """Cut the text into rows.

        Args:
            store: the text.
            rows: how many a batch has.
            length: how many tokens of a row are read.
            seed: of every order and place.
            sample: "stream", "rounds" or "documents".

        Raises:
            ValueError: if rows or length are less than 1, or the text is too short for a row.
        """
        _check(sample, rows=rows, length=length)
        total = len(store.tokens)
        if total < (2 if sample == "documents" else length + 1):
            raise ValueError(f"a row has {length + 1:,} tokens: expected a longer text than one of {total:,}")
        self.store, self.rows, self.length, self.seed, self.sample = store, rows, length, seed, sample
        self._num_rows = total // length if sample == "rounds" else -(-(total - 1) // length)  # of an epoch
        self.per_epoch = -(-self._num_rows // rows)
        self._plan: _Plan | None = None

    def at(self, number: int) -> TokenBatch:
        """Batch ``number`` = 0, 1, 2, …, counted over all epochs and ranks.

        Raises:
            ValueError: if the number is negative.
        """
        if number < 0:
            raise ValueError(f"batches are numbered from 0: there is no batch {number}")
        epoch, place = divmod(number, self.per_epoch)
        if self.sample == "documents":
            return self._packed(epoch, place)
        if self.sample == "rounds":
            return self._of_round(epoch, place)
        rows = np.arange(number * self.rows, (number + 1) * self.rows, dtype=np.uint64)
        places = scrambled(rows, self.seed, _WINDOWS) % np.uint64(len(self.store.tokens) - self.length)
        return TokenBatch(_windows(self.store, places.astype(np.int64), self.length))

    def costliest(self) -> TokenBatch:
        """A batch that takes the most memory: any full one."""
        return self.at(0)

    def report(self) -> str:
        """How many batches there are, in one line."""
        what = f"{self.per_epoch:,} batch{'' if self.per_epoch == 1 else 'es'} an epoch"
        return f"{what} of {self.rows:,} × {self.length:,} tokens"

    def _of_round(self, epoch: int, place: int) -> TokenBatch:
        begin = scrambled(np.array([epoch], np.uint64), self.seed, _BEGIN) % np.uint64(len(self.store.tokens))
        rows = self._planned(epoch).rows[place * self.rows : (place + 1) * self.rows]
        return TokenBatch(_windows(self.store, begin.astype(np.int64) + rows * self.length, self.length))

    def _packed(self, epoch: int, place: int) -> TokenBatch:
        plan = self._planned(epoch)
        rows = plan.rows[place * self.rows : (place + 1) * self.rows]
        places = rows[:, None] * self.length + np.arange(self.length + 1)  # [B, N + 1] in the shuffled text
        total = int(plan.ends[-1])
        inside = np.minimum(places, total - 1)
        order = np.searchsorted(plan.ends, inside, side="right")  # [B, N + 1] which document of the shuffled ones
        begins = np.where(order > 0, plan.ends[order - 1], 0)
        tokens = self.store.tokens[self.store.starts[plan.documents[order]] + inside - begins].astype(np.int64)
        beyond = places - inside  # 1, 2, 3, … behind the end
        tokens[beyond > 0] = PAD
        return TokenBatch(torch.from_numpy(tokens), torch.from_numpy(order + beyond))

    def _planned(self, epoch: int) -> _Plan:
        plan = self._plan
        if plan is None or plan.epoch != epoch:
            documents = _shuffled(len(self.store), self.seed, epoch, _DOCUMENTS)
            ends = np.cumsum(self.store.documents.lengths[documents], dtype=np.int64)
            plan = _Plan(epoch, documents, ends, _shuffled(self._num_rows, self.seed, epoch, _ROWS))
            self._plan = plan  # the only one that is kept
        return plan


class _Plan(NamedTuple):
    """The order of an epoch."""

    epoch: int
    documents: NDArray[np.int64]  # [n] which document comes when
    ends: NDArray[np.int64]  # [n] where each ends in the shuffled text
    rows: NDArray[np.int64]  # which row comes when


def sampled(store: TextStore, rows: int, length: int, count: int, seed: int) -> Iterator[TokenBatch]:
    """So many batches of random windows, always the same: the mean of their losses is nanoGPT's estimate.

    Raises:
        ValueError: if rows or length are less than 1, or the text is too short for a row.
    """
    batches = PackedBatches(store, rows, length, seed)
    return map(batches.at, range(count))


def in_order(
    store: TextStore, rows: int, length: int, stride: int | None = None, *, sample: Sample = "stream"
) -> Iterator[TokenBatch]:
    """The whole text in windows, each token but the first counted once: for perplexities.

    Window w reads the tokens from w · stride on, and the last ``stride`` of what it should say count, so that each has
    at least length − stride tokens before it; in the first window all count. The last window may be shorter, and then
    is a batch of its own.

    Args:
        store: the text.
        rows: how many windows a batch has.
        length: how many tokens of a window are read.
        stride: from one window to the next; None: length, so that each token is read once.
        sample: "documents" keeps documents apart by segments; their first tokens are then not asked for.

    Raises:
        ValueError: if a number is less than 1, stride is more than length, or there are not two tokens.
    """
    stride = length if stride is None else stride
    _check(sample, rows=rows, length=length, stride=stride)
    total = len(store.tokens)
    if stride > length or total < 2:
        what = f"stride {stride} of {length}" if stride > length else f"a text of {total} tokens"
        raise ValueError(f"expected a stride up to the length, and at least two tokens, not {what}")
    return _in_order(store, rows, length, stride, sample)


def _in_order(store: TextStore, rows: int, length: int, stride: int, sample: Sample) -> Iterator[TokenBatch]:
    last = len(store.tokens) - 1  # the last token is only asked for
    full = (last - length) // stride + 1 if last >= length else 0
    batches = [(np.arange(row, min(row + rows, full)) * stride, length) for row in range(0, full, rows)]
    done = (full - 1) * stride + length if full else 0  # the last token that a full window asks for
    if done < last:
        batches.append((np.array([full * stride]), last - full * stride))
    for places, size in batches:
        asked = places[:, None] + np.arange(1, size + 1)  # [B, N] where the tokens stand that are asked for
        counted = (asked > places[:, None] + length - stride) | (places[:, None] == 0)
        segments = None
        if sample == "documents":
            segments = torch.from_numpy(np.searchsorted(store.starts, places[:, None] + np.arange(size + 1), "right"))
        tokens = _windows(store, places, size)
        yield TokenBatch(tokens, segments, None if counted.all() else torch.from_numpy(counted))


def _windows(store: TextStore, places: NDArray[np.int64], length: int) -> Tensor:
    """length + 1 tokens from each of these places on, behind the last the first: [B, length + 1]."""
    within = (places[:, None] + np.arange(length + 1)) % len(store.tokens)
    return torch.from_numpy(store.tokens[within].astype(np.int64))


def _shuffled(count: int, *keys: int) -> NDArray[np.int64]:
    return np.argsort(scrambled(np.arange(count, dtype=np.uint64), *keys), kind="stable")


def _check(sample: str, **numbers: int) -> None:
    if sample not in _SAMPLES:
        raise ValueError(f"sample must be one of {', '.join(_SAMPLES)}, not {sample!r}{nearest(sample, _SAMPLES)}")
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
