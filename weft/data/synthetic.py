"""Tasks made on the spot, which every architecture that maps a sequence to a sequence must learn.

    copy      c a d a b  ->  c a d a b
    reverse   c a d a b  ->  b a d a c
    sort      c a d a b  ->  a a b c d

Everything follows from the seed. A hash of the sequence decides whether it is for training or held out, so
nothing that a model is tested on was ever trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.config import BOS, EOS, PAD
from weft.data.batching import Batch

__all__ = ["BOS", "EOS", "FIRST", "PAD", "TASKS", "Batch", "Task", "is_held_out"]

FIRST = 3  # the id of the first symbol

_HELD_OUT = 8  # one sequence in so many is held out
_TRIES = 1000  # draws without one that fits, after which there is none


def _reverse(symbols: Tensor, lengths: Tensor) -> Tensor:
    places = lengths[:, None] - 1 - torch.arange(symbols.shape[1])
    return symbols.gather(1, places.clamp(min=0))


def _sort(symbols: Tensor, lengths: Tensor) -> Tensor:
    padding = torch.arange(symbols.shape[1]) >= lengths[:, None]
    return symbols.masked_fill(padding, torch.iinfo(symbols.dtype).max).sort(1).values


# The answer to symbols [B, N], of which lengths [B] are real; what stands behind them is of no account.
TASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": lambda symbols, lengths: symbols,
    "reverse": _reverse,
    "sort": _sort,
}


@dataclass(frozen=True)
class Task:
    """A task over sequences of min_len to max_len symbols.

    Attributes:
        name: copy, reverse or sort.
        num_symbols: how many different symbols there are; their ids are FIRST, FIRST + 1, …
        min_len, max_len: how many symbols a sequence has, EOS not counted; all lengths are as likely.

    Example:
        >>> task = Task("reverse", num_symbols=26, min_len=3, max_len=8)
        >>> source, target = next(task.batches(batch_size=32, seed=0))
    """

    name: str
    num_symbols: int = 26
    min_len: int = 1
    max_len: int = 10

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise ValueError(f"the task must be one of {', '.join(TASKS)}, not {self.name!r}")
        if self.num_symbols < 1 or not 1 <= self.min_len <= self.max_len:
            raise ValueError(
                "expected num_symbols ≥ 1 and 1 ≤ min_len ≤ max_len, "
                f"not {self.num_symbols}, {self.min_len} and {self.max_len}"
            )

    @property
    def vocab_size(self) -> int:
        """The symbols and the three specials."""
        return FIRST + self.num_symbols

    def batches(self, batch_size: int, seed: int, held_out: bool = False) -> Iterator[Batch]:
        """Batches without end, the same ones for the same seed.

        Args:
            batch_size: how many pairs each has.
            seed: of the random numbers; torch's own generator is left alone.
            held_out: pairs that ``held_out=False`` never gives, whatever the seed.

        Raises:
            ValueError: if there are so few sequences that none is on the side asked for.
        """
        generator = torch.Generator().manual_seed(seed)
        while True:
            parts: list[Tensor] = []
            tries = 0
            while sum(map(len, parts)) < batch_size:
                drawn = self._draw(batch_size, generator)
                parts.append(drawn[is_held_out(drawn) == held_out])
                tries += 1
                if tries >= _TRIES and not any(map(len, parts)):
                    raise ValueError(f"{self} has too few sequences to hold some out")
            yield self._pairs(torch.cat(parts)[:batch_size])

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Symbols [count, max_len], PAD behind the end of each."""
        shape = (count, self.max_len)
        symbols = torch.randint(FIRST, self.vocab_size, shape, generator=generator)
        lengths = torch.randint(self.min_len, self.max_len + 1, (count, 1), generator=generator)
        return symbols.masked_fill(torch.arange(self.max_len) >= lengths, PAD)

    def _pairs(self, symbols: Tensor) -> Batch:
        lengths = (symbols != PAD).sum(1)
        answers = TASKS[self.name](symbols, lengths)
        bos = torch.full((len(symbols), 1), BOS)
        return Batch(_close(symbols, lengths), torch.cat((bos, _close(answers, lengths)), 1))


def _close(symbols: Tensor, lengths: Tensor) -> Tensor:
    """Each row's first ``lengths`` symbols and EOS, then padding: [B, longest + 1]."""
    places = torch.arange(int(lengths.max()) + 1)
    room = torch.cat((symbols, symbols[:, :1]), 1)[:, : len(places)]
    closed = room.masked_fill(places > lengths[:, None], PAD)
    return closed.masked_fill(places == lengths[:, None], EOS)


def is_held_out(symbols: Tensor) -> Tensor:
    """Which of the sequences symbols [B, N], padded at the right with PAD, are held out: boolean [B]."""
    hashed = torch.zeros(len(symbols), dtype=torch.int64)
    for column in symbols.unbind(1):
        hashed = torch.where(column == PAD, hashed, (hashed * 8191 + column) % 2147483647)
    return hashed % _HELD_OUT == 0
