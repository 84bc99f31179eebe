"""BPE dropout: the same text in other pieces each time, by merges that are left out (Provilkov et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import groupby
from math import inf, log, log1p
from random import Random
from typing import Any

from tokenizers import Encoding


class MergeDropout:
    """Byte pair encoding that leaves out merges: the library's own draws from a generator that takes no seed."""

    def __init__(self, model: dict[str, Any]) -> None:
        """Read the merges of a tokenizer.json's model."""
        vocab, prefix = model["vocab"], len(model["continuing_subword_prefix"] or "")
        self._merges: dict[tuple[int, int], tuple[int, int]] = {  # (left, right) -> (rank, what they become)
            (vocab[left], vocab[right]): (rank, vocab[left + right[prefix:]])
            for rank, (left, right) in enumerate(model["merges"])
        }
        self._parts = {into: pair for pair, (_, into) in self._merges.items()}
        self._known: dict[int, list[int]] = {}

    def encode(
        self, texts: Sequence[str], encodings: Sequence[Encoding], p: float, seeds: Sequence[int]
    ) -> list[list[int]]:
        """The tokens of each text, given the library's encoding of it; each has its own coins."""
        rows = []
        for text, seed, encoding in zip(texts, seeds, encodings, strict=True):
            coins, ids, start = Coins(p, f"{seed} {text}"), encoding.ids, 0
            row: list[int] = []
            for _, word in groupby(encoding.word_ids):
                stop = start + sum(1 for _ in word)
                tokens, start = ids[start:stop], stop
                symbols = [symbol for token in tokens for symbol in self._symbols(token)]
                merges = len(symbols) - len(tokens)
                if coins.heads >= merges:  # none of them is left out
                    coins.heads -= merges
                    row += tokens
                else:
                    row += self._merged(symbols, coins)
            rows.append(row)
        return rows

    def _symbols(self, token: int) -> list[int]:
        """What a token was made of by merges, in the end."""
        if token not in self._known:
            parts = self._parts.get(token)
            self._known[token] = [symbol for part in parts for symbol in self._symbols(part)] if parts else [token]
        return self._known[token]

    def _merged(self, symbols: Sequence[int], keep: Callable[[], bool]) -> list[int]:
        """The word after its merges: the lowest rank first, then the leftmost.

        Before each merge, all that are possible are drawn for anew, in their order up to the first that is kept.
        """
        ids, length = list(symbols), len(symbols)
        left, right = list(range(-1, length - 1)), list(range(1, length + 1))
        queue: list[tuple[int, int, int, int, int]] = []

        def offer(place: int) -> None:
            if place >= 0 and right[place] < length:
                pair = ids[place], ids[right[place]]
                if pair in self._merges:
                    rank, into = self._merges[pair]
                    heappush(queue, (rank, place, *pair, into))

        for place in range(length):
            offer(place)
        passed_over = []
        while queue:
            merge = heappop(queue)
            _, place, *pair, into = merge
            other = right[place]
            if other >= length or [ids[place], ids[other]] != pair:
                continue  # one of the two is part of something else by now
            if not keep():
                passed_over.append(merge)
                continue
            ids[place], ids[other], right[place] = into, -1, right[other]
            if right[place] < length:
                left[right[place]] = place
            offer(left[place])
            offer(place)
            while passed_over:
                heappush(queue, passed_over.pop())
        return [number for number in ids if number >= 0]


class Coins:
    """Coins that fall on tails with probability p, drawn as the lengths of the runs of heads."""

    def __init__(self, p: float, seed: str) -> None:
        self._random = Random(seed).random
        self._log_heads = log1p(-p) if p < 1.0 else -inf
        self.heads = self._run()

    def __call__(self) -> bool:
        """Whether the next one falls on heads."""
        if self.heads:
            self.heads -= 1
            return True
        self.heads = self._run()
        return False

    def _run(self) -> int:
        return int(min(log(1.0 - self._random()) / self._log_heads, 1e18))
