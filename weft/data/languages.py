"""Which language a text is in, told by its tokens.

Naive Bayes: p(language | text) ∝ Π p(token | language), all languages alike before anything is read. How often a token
comes in a language is mixed with a little of how often it comes in all, so that what none of them has tells nothing. A
text may also be in no language that is known, in which every token is as likely as any other; one in a language that is
near to one of them is taken for that. A model of several languages keeps the table in languages.json, beside its
tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from weft.data.tokenizers import Tokenizer

_STEPS = 16  # to a nat: costs are stored as whole numbers
_HIGHEST = 1_000_000  # cost of a token
_CHUNK = 10_000  # texts that are tokenised at once
_COMMON = 1e-3  # how much of a token's frequency in all languages is added to that in one


@dataclass(frozen=True, eq=False)
class Languages:
    """What is known of some languages.

    Attributes:
        names: the languages.
        costs: [languages, tokens] −log p(token | language), in sixteenths.
    """

    names: tuple[str, ...]
    costs: NDArray[np.int64]

    @classmethod
    def learned(cls, texts: Mapping[str, Iterable[str]], tokenizer: Tokenizer) -> Self:
        """From text in each language."""
        counts = np.zeros((len(texts), tokenizer.vocab_size))
        for row, text in zip(counts, texts.values(), strict=True):
            stream = iter(text)
            while chunk := list(islice(stream, _CHUNK)):
                tokens = np.concatenate([np.asarray(ids, np.int64) for ids in tokenizer.encode_batch(chunk)])
                row += np.bincount(tokens, minlength=len(row))
        shares = counts / counts.sum(1, keepdims=True).clip(min=1.0)
        costs = -np.log(shares + _COMMON * shares.mean(0) + 0.5 / counts.sum(1).max().clip(min=1.0))
        return cls(tuple(texts), np.rint(_STEPS * costs).astype(np.int64))

    def of(self, tokens: Sequence[int]) -> dict[str, float]:
        """How probably a text of these tokens is in each language, the likeliest first; what is left: in none."""
        cost = np.append(self.costs[:, list(tokens)].sum(1) / _STEPS, len(tokens) * np.log(self.costs.shape[1]))
        likely = np.exp(cost.min() - cost)
        shares = dict(zip(self.names, (likely / likely.sum())[:-1].tolist(), strict=True))
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what ``load`` reads."""
        rows = {name: row.tolist() for name, row in zip(self.names, self.costs, strict=True)}
        Path(path).write_text(json.dumps(rows, separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str], vocab_size: int) -> Self:
        """Read what ``save`` wrote, for a vocabulary of this size.

        Raises:
            OSError: if it cannot be read.
            ValueError: if it is something else.
        """
        try:
            rows = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            rows = None
        right = isinstance(rows, dict) and rows and all(_is_row(row, vocab_size) for row in rows.values())
        if not right:
            raise ValueError(
                f"{os.fspath(path)}: expected {vocab_size:,} whole numbers for each language, from 0 to {_HIGHEST:,}"
            )
        return cls(tuple(rows), np.asarray(list(rows.values()), np.int64))


def _is_row(row: object, length: int) -> bool:
    return isinstance(row, list) and len(row) == length and all(type(n) is int and 0 <= n <= _HIGHEST for n in row)
