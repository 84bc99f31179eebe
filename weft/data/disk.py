"""What is made once and kept on disk: sequences of tokens as memory maps, in folders that are whole or not there.

A thing is written aside, flushed, and renamed when it is whole. Its name is a hash of all that it depends on. Of
several processes that ask for it one makes it, and the others wait.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.config import PAD

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of tokens, one behind the other in one array.

    Attributes:
        tokens: of all sequences.
        offsets: sequence i is ``tokens[offsets[i]:offsets[i + 1]]``; one more than there are sequences.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], dtype: np.dtype[Any] | type = np.int64) -> Self:
        """These rows, copied."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
        return cls(np.fromiter(chain.from_iterable(rows), dtype, int(offsets[-1])), offsets)

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        """The tokens of one sequence."""
        index = range(len(self))[index]
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """How many tokens each has, int32 [n]; made anew each time, so that nobody pays for it for long."""
        return np.diff(self.offsets).astype(np.int32)

    @cached_property
    def longest(self) -> int:
        """How many tokens the longest has."""
        return int(self.lengths.max(initial=0))

    def padded(self, rows: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The sequences with these numbers [B], PAD behind each: [B, the longest of them]."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        places = np.arange(lengths.max(initial=0))
        inside = places < lengths[:, None]  # [B, longest]
        found = np.full(inside.shape, PAD, np.int64)
        found[inside] = self.tokens[(starts[:, None] + places)[inside]]
        return found


def open_sequences(folder: Path, name: str, sizes: dict[str, Any]) -> Sequences:
    """The sequences of a finished store that have this name, as memory maps.

    Raises:
        OSError: if a file is missing.
        ValueError: if one has not the size that the store names.
    """
    wanted = {"tokens": (np.dtype(sizes["dtype"]), sizes["total"]), "offsets": (np.dtype(np.int64), sizes["count"] + 1)}
    arrays = []
    for part, (dtype, count) in wanted.items():
        path = folder / f"{name}.{part}"
        size, expected = path.stat().st_size, count * dtype.itemsize
        if size != expected:
            raise ValueError(f"{path}: expected {expected:,} bytes, not {size:,}")
        arrays.append(np.memmap(path, dtype, "r").view(np.ndarray))  # a plain view is sliced faster
    return Sequences(*arrays)


def once(place: Path, make: Callable[[Path], None], read: Callable[[Path], T]) -> T:
    """What ``read`` finds at a place; if nothing whole is there, ``make`` makes it first, and only one process does."""

    def found() -> T | None:
        try:
            return read(place)
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not there, or damaged from outside

    if (whole := found()) is not None:
        return whole
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(place.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets it go with the file, however the process ends
        if (whole := found()) is not None:
            return whole
        aside = place.with_name(place.name + ".part")
        _remove(aside)
        try:
            make(aside)
        except BaseException:
            _remove(aside)
            raise
        _remove(place)
        aside.rename(place)
        sync(place.parent)
    return read(place)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def save_json(path: Path, value: object) -> None:
    """Write a value, so that it lasts."""
    with path.open("wb") as file:
        file.write(json.dumps(value).encode())
        flush(file)


def flush(file: BinaryIO) -> None:
    """Make what was written last."""
    file.flush()
    os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(parts: Sequence[object]) -> str:
    """A name for what was made of these, which must be fit for JSON."""
    return sha256(json.dumps(parts).encode()).hexdigest()[:32]
