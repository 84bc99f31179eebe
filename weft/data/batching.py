"""Batches of pairs of about one length, as a pure function of a seed and a number.

    batches = Batches(store, batch_tokens=4096, seed=1)
    batches.at(0), batches.at(1), …     # batch number n over all epochs and ranks

Pairs are sorted into buckets by the lengths of both sides, and the row of all buckets is cut into batches. The cuts
depend on lengths alone, so every epoch has the same number of batches. What changes with the epoch is the order inside
each bucket, and so who sits with whom, and the order of the batches. Nothing is remembered from one batch to the next:
a run that stops before number n goes on with number n.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.config import BOS, EOS
from weft.data.disk import Sequences
from weft.data.store import PairStore

if TYPE_CHECKING:  # only dropout needs them
    from weft.data.tokenizers import Tokenizer, TokenizerPair

Ints = NDArray[np.integer[Any]]

_BITS = 5  # lengths are told apart to so many leading bits: exactly below 32, in steps of 2 below 64, of 4 below 128, …
# What a token keeps for the backward pass besides its attention weights, in keys attended to: some 20 numbers a dim
# against two a head and key, with heads of 64.
_TOKEN = 640
_PAIRS, _BATCHES, _SOURCES, _TARGETS = range(4)  # what random numbers are for, so that each use has its own


class Batch(NamedTuple):
    """Pairs of sequences, padded at the right to the longest.

    A decoder reads ``target[:, :-1]`` and should say ``target[:, 1:]``.
    """

    source: Tensor  # [B, N] tokens, EOS, padding
    target: Tensor  # [B, T + 1] BOS, tokens, EOS, padding


class Batches:
    """The batches of a store, over and over, in another order each epoch.

    A batch has rows × max(longest source, longest target with BOS and EOS) ≤ batch_tokens, padding counted; a pair that
    is longer than that is a batch of its own. Each epoch has every pair once. Micro-batches are numbered over all
    ranks: rank r of w takes the numbers r, r + w, r + 2w, …, so that no two ranks see the same pair in an epoch.

    With BPE dropout each row is segmented anew, keyed by (seed, epoch, pair), when its batch is made. Rows mostly get
    longer by it, so a batch may exceed batch_tokens. No row gets longer than the longest of its side in the store: one
    that would keeps its plain segmentation.

    Attributes:
        per_epoch: how many batches an epoch has.
    """

    def __init__(
        self,
        store: PairStore,
        batch_tokens: int,
        seed: int,
        *,
        dropout: float = 0.0,
        tokenizers: TokenizerPair | None = None,
    ) -> None:
        """Cut the store into batches.

        Args:
            store: the pairs.
            batch_tokens: the budget of a batch.
            seed: of every order and of dropout.
            dropout: of BPE merges.
            tokenizers: needed for dropout.

        Raises:
            ValueError: if batch_tokens is less than 1, or dropout has no tokenizers that it can work with.
        """
        if dropout and (tokenizers is None or {tokenizers.source.kind, tokenizers.target.kind} != {"bpe"}):
            given = "none" if tokenizers is None else f"{tokenizers.source.kind} and {tokenizers.target.kind}"
            raise ValueError(f"BPE dropout needs a BPE tokenizer for each side, not {given}")
        self.store, self.batch_tokens, self.seed = store, batch_tokens, seed
        self._buckets, self._bounds = _arranged(store, batch_tokens)
        self.per_epoch = len(self._bounds) - 1
        self._plan: _Plan | None = None
        self._dropout = dropout
        self._tokenizers = tokenizers if dropout else None
        if self._tokenizers is not None:
            _check_round_trip(store.sources, self._tokenizers.source)
            _check_round_trip(store.targets, self._tokenizers.target)

    def at(self, number: int) -> Batch:
        """Batch ``number`` = 0, 1, 2, …, counted over all epochs and ranks.

        Raises:
            ValueError: if the number is negative.
        """
        if number < 0:
            raise ValueError(f"batches are numbered from 0: there is no batch {number}")
        epoch, place = divmod(number, self.per_epoch)
        plan = self._planned(epoch)
        return self._made(plan, int(plan.batches[place]))

    def prefetched(self, numbers: Iterable[int], depth: int = 4) -> Iterator[Batch]:
        """The batches with these numbers, in this order, made in a thread up to ``depth`` ahead of their use.

        An error in making a batch is raised where that batch would have come. Leaving the loop early ends the thread.
        """
        with ThreadPoolExecutor(1, "weft-batches") as pool:
            ahead: deque[Future[Batch]] = deque()
            try:
                for number in numbers:
                    ahead.append(pool.submit(self.at, number))
                    if len(ahead) > depth:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    def costliest(self) -> Batch:
        """The batch of epoch 0 that takes the most memory: a trial of it fails at the start, not hours in."""
        rows, source, target = self._shapes
        cost = rows * (source * (_TOKEN + source) + target * (_TOKEN + source + target))
        return self._made(self._planned(0), int(cost.argmax()))

    @property
    def padding(self) -> float:
        """The share of padding in all batches of epoch 0, source and target together, without dropout."""
        rows, source, target = self._shapes
        real = len(self.store.sources.tokens) + len(self.store.targets.tokens) + len(self.store)  # a BOS each
        return 1.0 - real / int((rows * (source + target)).sum())

    def report(self) -> str:
        """How many batches there are and how full, in one line."""
        what = f"{self.per_epoch:,} batch{'' if self.per_epoch == 1 else 'es'} an epoch"
        return f"{what} of up to {self.batch_tokens:,} tokens a side, {self.padding:.1%} padding"

    @cached_property
    def _shapes(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Rows, source width and target width of each batch of epoch 0, in the order of the buckets."""
        pairs, starts = self._planned(0).pairs, self._bounds[:-1]
        widths = (np.maximum.reduceat(side.lengths[pairs], starts) for side in (self.store.sources, self.store.targets))
        source, target = (width.astype(np.int64) for width in widths)
        return np.diff(self._bounds), source, target + 1

    def _planned(self, epoch: int) -> _Plan:
        plan = self._plan
        if plan is None or plan.epoch != epoch:
            # The bucket decides, then 32 random bits, then the number of the pair.
            places = scrambled(np.arange(len(self.store), dtype=np.uint64), self.seed, epoch, _PAIRS)
            places >>= np.uint64(32)
            places |= self._buckets.astype(np.uint64) << np.uint64(32)
            pairs = in_turn(places).astype(np.int32)
            batches = scrambled(np.arange(self.per_epoch, dtype=np.uint64), self.seed, epoch, _BATCHES)
            plan = self._plan = _Plan(epoch, pairs, np.argsort(batches, kind="stable"))  # the only one that is kept
        return plan

    def _made(self, plan: _Plan, batch: int) -> Batch:
        rows = plan.pairs[self._bounds[batch] : self._bounds[batch + 1]]
        store, tokenizers = self.store, self._tokenizers
        if tokenizers is None:
            return _batch(store.sources, store.targets, rows)
        source = self._segmented(store.sources, tokenizers.source, rows, plan.epoch, _SOURCES)
        target = self._segmented(store.targets, tokenizers.target, rows, plan.epoch, _TARGETS)
        return _batch(source, target, np.arange(len(rows)))

    def _segmented(self, side: Sequences, tokenizer: Tokenizer, rows: Ints, epoch: int, use: int) -> Sequences:
        """These rows of a side, segmented anew with dropout."""
        seeds = scrambled(rows.astype(np.uint64), self.seed, epoch, use).tolist()
        plain = [side[row].tolist() for row in rows]
        texts = [tokenizer.decode(tokens[:-1]) for tokens in plain]
        marks = set(tokenizer.tags.values())
        opening = [[token for token in tokens[:1] if token in marks] for tokens in plain]
        encoded = tokenizer.encode_dropout(texts, self._dropout, seeds)
        drawn = ([*mark, *tokens, EOS] for mark, tokens in zip(opening, encoded, strict=True))
        return Sequences.of([new if len(new) <= side.longest else old for new, old in zip(drawn, plain, strict=True)])


class _Plan(NamedTuple):
    """The order of an epoch."""

    epoch: int
    pairs: NDArray[np.int32]  # [n] bucket by bucket, shuffled inside each
    batches: NDArray[np.int64]  # [per_epoch] which batch comes when


def in_order(store: PairStore, batch_tokens: int) -> Iterator[Batch]:
    """Each pair of a store once, short ones first, in batches as those of ``Batches``: for validation.

    Raises:
        ValueError: if batch_tokens is less than 1.
    """
    buckets, bounds = _arranged(store, batch_tokens)
    pairs = np.argsort(buckets, kind="stable")
    for start, end in pairwise(bounds):
        yield _batch(store.sources, store.targets, pairs[start:end])


def _check_round_trip(side: Sequences, tokenizer: Tokenizer) -> None:
    """Raise ValueError unless the first rows come back from their text, as dropout takes them there."""
    marks = tokenizer.tags.values()
    for row in range(min(len(side), 100)):
        tokens = [token for token in side[row][:-1].tolist() if token not in marks]
        if tokenizer.encode_batch([tokenizer.decode(tokens)]) != [tokens]:
            raise ValueError(f"BPE dropout needs a tokenizer that gives texts back as they were: {tokenizer} does not")


def _batch(sources: Sequences, targets: Sequences, rows: Ints) -> Batch:
    begin = np.full((len(rows), 1), BOS)
    target = np.concatenate((begin, targets.padded(rows)), axis=1)
    return Batch(torch.from_numpy(sources.padded(rows)), torch.from_numpy(target))


def _arranged(store: PairStore, batch_tokens: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The bucket of each pair [n], and where the row of all buckets is cut into batches [batches + 1].

    A bucket is a width and a lean: the longer side, and by how much the source is longer than the target, both
    rounded, the lean twice as coarsely. Every other width has its leans the other way round, so that neighbouring
    buckets are alike everywhere. On Multi30k (10,000 BPE tokens, 4,096 a batch) this leaves 3.8% padding, and a pair
    finds 540 in its bucket; exact lengths would leave 3.0%, and it would find 290.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, not {batch_tokens}")
    source, target = store.sources.lengths, store.targets.lengths + 1  # BOS counts
    width = np.maximum(source, target)
    table = np.arange(int(width.max()) + 1)
    shift = np.maximum(np.frexp(table)[1] - _BITS, 0).astype(np.int8)[width]
    level = -(-width >> shift)  # rounded up
    lean = (source - target) >> (shift + 1)
    lean[level % 2 == 0] *= -1
    key = (level << shift) * np.int64(len(table)) + lean  # |lean| is at most half of the width
    del source, target, shift, level, lean  # there may be millions of pairs
    buckets, count = _numbered(key)
    widest = np.zeros(count, np.int32)
    np.maximum.at(widest, buckets, width)
    return buckets, _cuts(widest.tolist(), np.bincount(buckets).tolist(), batch_tokens)


def _numbered(keys: NDArray[np.int64]) -> tuple[NDArray[np.int32], int]:
    """Which of the different keys, in their order, each one is, and how many there are."""
    keys = keys - keys.min()
    if int(keys.max()) > 4 * len(keys):  # a table would be larger than the keys
        names = np.unique(keys)
        return np.searchsorted(names, keys).astype(np.int32), len(names)
    numbers = np.cumsum(np.bincount(keys) > 0) - 1
    return numbers.astype(np.int32)[keys], int(numbers[-1]) + 1


def _cuts(widths: list[int], counts: list[int], batch_tokens: int) -> NDArray[np.int64]:
    """Where to cut a row of buckets, so many pairs of such a width each, so that rows × width ≤ batch_tokens."""
    bounds, rows, widest = [0], 0, 0
    for width, count in zip(widths, counts, strict=True):
        while count:
            wider = max(widest, width)
            taken = min(count, max(batch_tokens // wider, 1) - rows)
            if taken > 0:
                rows, count, widest = rows + taken, count - taken, wider
            else:  # full
                bounds.append(bounds[-1] + rows)
                rows = widest = 0
    return np.array([*bounds, bounds[-1] + rows])


def in_turn(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The places of the keys, lowest first, of equal ones the first first: a stable sort, in half of its time."""
    order: NDArray[np.int64] = np.argsort(keys)
    ordered = keys[order]
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    for run in np.split(same, np.flatnonzero(np.diff(same) > 1) + 1) if len(same) else ():
        order[run[0] : run[-1] + 2].sort()
    return order


def scrambled(numbers: NDArray[np.uint64], *keys: int) -> NDArray[np.uint64]:
    """64 random bits for each number, from the number and the keys alone (SplitMix64, Steele et al. 2014).

    No library's generator is used, since none promises the same shuffle in its next version, and a run must go on.
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mixed(state + np.array([key % (1 << 64)], np.uint64))
    return _mixed(numbers * np.uint64(0x9E3779B97F4A7C15) + state)


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
