"""Who may attend to whom: a description, and the one place where it becomes a matrix.

The query i sits at the key position ``offset + i``; everything below is about that position p and
a key position j:

    causal     j ≤ p
    prefix     the keys j < prefix are open to all, causal or not
    window     |p − j| < window: itself and the window − 1 nearest on each side that is open
    lengths    j < lengths[b]: what lies behind is padding
    segments   segments[b, j] = segments[b, p]: packed documents, blocks; a p past the last key has none
    pattern    any boolean matrix, True = may attend

All that is given must hold. Fast ways read the fields; only ``dense`` makes a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may attend to; see the module's docstring for the fields.

    Attributes:
        causal: no query sees past its own position.
        window: how far a query sees, itself included.
        lengths: [B] how many keys are real in each row.
        segments: [B, M] (or [1, M]) the document of each key position.
        prefix: how many first keys are open to all; a number or one per row [B]. Needs ``causal``.
        pattern: boolean [N, M], [B, N, M] or [B, H, N, M] (1 broadcasts).
        offset: the key position of the first query; a number or one per row [B].
    """

    causal: bool = False
    window: int | None = None
    lengths: Tensor | None = None
    segments: Tensor | None = None
    prefix: int | Tensor | None = None
    pattern: Tensor | None = None
    offset: int | Tensor = 0

    def __post_init__(self) -> None:
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"window must be a whole number ≥ 1, not {self.window!r}")
        if self.prefix is not None and not self.causal:
            raise ValueError("prefix opens keys that causal=True closes: give both")
        for field in fields(self):  # a mask is a value: what happens to the tensors it was given does not reach it
            if isinstance(value := getattr(self, field.name), Tensor):
                object.__setattr__(self, field.name, value.clone())
        for name, dims in (("lengths", 1), ("prefix", 1), ("offset", 1), ("segments", 2)):
            _check_integers(name, getattr(self, name), dims)
        if self.pattern is not None:
            if not isinstance(self.pattern, Tensor):
                raise ValueError(f"pattern must be a torch tensor, not {type(self.pattern).__name__}")
            if self.pattern.dtype != torch.bool:
                raise ValueError(
                    f"pattern must be boolean (True = may attend), not {_dtype(self.pattern)}; "
                    "numbers to add to the scores go in bias"
                )
            if not 2 <= self.pattern.dim() <= 4:
                raise ValueError(f"pattern must be [N, M], [B, N, M] or [B, H, N, M], not {list(self.pattern.shape)}")
        rows = {name: count for name, count in self._rows().items() if count != 1}
        if len(set(rows.values())) > 1:
            raise ValueError(f"the fields must have one count of rows, not {rows}")

    @cached_property
    def open(self) -> bool:
        """Whether every query may attend to every key."""
        given = (getattr(self, f.name) for f in fields(self) if f.name != "offset")
        return all(value is None or value is False for value in given)

    def __and__(self, other: Mask) -> Mask:
        """The mask that allows what both allow.

        Raises:
            ValueError: if the two have different offsets, or fields whose shapes do not fit each other.
        """
        prefix = self.prefix if self.causal else other.prefix
        if self.causal and other.causal:
            prefix = None if self.prefix is None or other.prefix is None else _least(self.prefix, other.prefix)
        return Mask(
            causal=self.causal or other.causal,
            window=min((w for w in (self.window, other.window) if w is not None), default=None),
            lengths=_both("lengths", self.lengths, other.lengths, torch.minimum),
            segments=_both("segments", self.segments, other.segments, _pairs),
            prefix=prefix,
            pattern=_both("pattern", self._pattern4(), other._pattern4(), torch.logical_and),
            offset=self._common_offset(other),
        )

    def at(self, offset: int | Tensor) -> Mask:
        """The same mask for queries whose first sits at the key position ``offset``."""
        return replace(self, offset=offset)

    def dense(self, n: int, m: int, device: torch.device | str | None = None) -> Tensor:
        """The boolean matrix [B or 1, H or 1, n, m], True = may attend.

        Args:
            n: how many queries.
            m: how many keys.
            device: where to make it; the mask's own tensors' if None.

        Raises:
            ValueError: if a field does not fit n and m.
        """
        if n < 0 or m < 0:
            raise ValueError(f"lengths of queries and keys must be ≥ 0, not {n} and {m}")
        self.check(self.batch, self.num_heads, n, m)
        return self.tile(slice(0, self.batch), slice(0, n), slice(0, m), device).expand(-1, -1, n, m)

    def tile(self, rows: slice, queries: slice, keys: slice, device: torch.device | str | None = None) -> Tensor:
        """The part of the matrix for these rows, queries and keys; 1 in each dimension in which all is alike."""
        device = torch.device(device) if device is not None else self.device
        key = torch.arange(keys.start, keys.stop, device=device)  # [m]
        conditions = []
        if self.positional:
            query = torch.arange(queries.start, queries.stop, device=device)[None, None, :, None]
            query = query + _column(self.offset, rows, device)  # [B or 1, 1, n, 1]
            conditions = self._by_position(query, key, rows, keys)
        if self.lengths is not None:
            conditions.append(key < _column(self.lengths, rows, device))
        if self.pattern is not None:
            conditions.append(part(self._pattern4(), rows, queries, keys).to(device))  # type: ignore[arg-type]
        if not conditions:
            return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return reduce(torch.logical_and, conditions)

    def _by_position(self, query: Tensor, key: Tensor, rows: slice, keys: slice) -> list[Tensor]:
        """What causal, window and segments allow to queries at these positions [B or 1, 1, n, 1]."""
        conditions = []
        if self.causal:
            seen = key <= query
            if self.prefix is not None:
                seen = seen | (key < _column(self.prefix, rows, key.device))
            conditions.append(seen)
        if self.window is not None:
            conditions.append((query - key).abs() < self.window)
        if self.segments is not None:
            conditions.append(self._same_segment(query, rows, keys, key.device))
        return conditions

    def all_see(self, queries: slice, m: int) -> bool:
        """Whether each of these queries surely may attend to some of m keys: itself, or the first."""
        if self.pattern is not None or m == 0:
            return False
        _, last = self._offsets()
        inside = not self.positional or queries.stop + last <= m
        if self.lengths is None:
            return inside
        filled = self.lengths.numel() > 0 and int(self.lengths.min()) > 0
        return filled and self.window is None and self.segments is None

    def shows(self, m: int) -> bool:
        """Whether every query may attend to each of m keys: nothing is asked, or no more than lengths that all have."""
        others = (self.window, self.segments, self.prefix, self.pattern)
        if self.causal or any(other is not None for other in others):
            return False
        return self.lengths is None or self._shortest >= m

    @cached_property
    def _shortest(self) -> int:
        return int(self.lengths.min()) if self.lengths is not None and len(self.lengths) else 0

    def span(self, queries: slice, m: int) -> slice:
        """The keys, of m, outside of which none of these queries may look, in any row."""
        first, last = self._offsets()
        low, high = queries.start + first, queries.stop + last  # positions of the queries: low ≤ p < high
        begin, end = 0, m
        if self.causal:
            end = min(m, max(high, _largest(self.prefix)))
        if self.window is not None:
            begin, end = max(begin, low - self.window + 1), min(end, high + self.window - 1)
        if self.lengths is not None:
            end = min(end, _largest(self.lengths))
        if self.segments is not None and low < high and m:
            firsts, lasts = self._segment_ends
            inside = slice(min(low, m - 1), min(high, m))
            begin = max(begin, int(firsts[inside].min()))
            end = min(end, int(lasts[inside].max()) + 1)
        return slice(min(begin, m), max(min(begin, m), end))

    @property
    def device(self) -> torch.device:
        """Where the mask's tensors are (the CPU if it has none)."""
        tensors = (v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor))
        return next((t.device for t in tensors), torch.device("cpu"))

    @property
    def batch(self) -> int:
        """How many rows the mask tells apart (1 if all rows are alike)."""
        return max(self._rows().values(), default=1)

    @property
    def num_heads(self) -> int:
        """How many heads the mask tells apart (1 if all heads are alike)."""
        pattern = self._pattern4()
        return 1 if pattern is None else pattern.shape[1]

    def check(self, batch: int, num_heads: int, n: int, m: int) -> None:
        """Raise ValueError unless the mask fits q [batch, num_heads, n, ·] and k [batch, ·, m, ·]."""
        for name in ("lengths", "segments", "prefix", "offset"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.shape[0] not in (1, batch):
                raise ValueError(f"{name} has {value.shape[0]} rows, but the batch has {batch}")
        if self.lengths is not None and self.lengths.device.type == "cpu" and _largest(self.lengths) > m:
            raise ValueError(f"lengths go up to {_largest(self.lengths)}, but there are {m} keys")
        if self.segments is not None and self.segments.shape[1] != m:
            raise ValueError(f"segments cover {self.segments.shape[1]} positions, but there are {m} keys")
        if self.pattern is not None:
            for given, expected in zip(self._pattern4().shape, (batch, num_heads, n, m), strict=True):  # type: ignore[union-attr]
                if given not in (1, expected):
                    raise ValueError(
                        f"pattern {list(self.pattern.shape)} does not fit: expected something that "
                        f"broadcasts to [batch {batch}, heads {num_heads}, queries {n}, keys {m}]"
                    )

    def _rows(self) -> dict[str, int]:
        """How many rows each tensor tells apart."""
        named = {f.name: getattr(self, f.name) for f in fields(self)} | {"pattern": self._pattern4()}
        return {name: value.shape[0] for name, value in named.items() if isinstance(value, Tensor)}

    def _pattern4(self) -> Tensor | None:
        if self.pattern is None or self.pattern.dim() == 4:
            return self.pattern
        return self.pattern[None, None] if self.pattern.dim() == 2 else self.pattern[:, None]

    def _same_segment(self, query: Tensor, rows: slice, keys: slice, device: torch.device) -> Tensor:
        assert self.segments is not None
        segments = (self.segments if self.segments.shape[0] == 1 else self.segments[rows]).to(device)
        m = segments.shape[1]
        if m == 0:
            return torch.ones(1, 1, 1, 0, dtype=torch.bool, device=device)
        batch = query.shape[0] if segments.shape[0] == 1 else segments.shape[0]
        segments = segments.expand(batch, m)
        positions = query[:, 0, :, 0].expand(batch, -1)  # [B, n]
        own = segments.gather(1, positions.clamp(max=m - 1))
        same = own[:, :, None] == segments[:, None, keys]  # [B, n, keys]
        return (same & (positions < m)[:, :, None])[:, None]

    @cached_property
    def memory(self) -> dict[Any, Any]:
        """What kernels made of this mask and may want again; a mask never changes."""
        return {}

    @cached_property
    def _segment_ends(self) -> tuple[Tensor, Tensor]:
        """For each position, the first and the last key of its segment, over all rows: [M] and [M]."""
        assert self.segments is not None
        rows, m = self.segments.shape
        _, number = torch.unique(self.segments, return_inverse=True)
        number = (number + torch.arange(rows, device=number.device)[:, None] * (int(number.max()) + 1)).flatten()
        place = torch.arange(m, device=number.device).repeat(rows)
        size = int(number.max()) + 1
        first = place.new_full((size,), m).scatter_reduce_(0, number, place, "amin")
        last = place.new_full((size,), -1).scatter_reduce_(0, number, place, "amax")
        return first[number].view(rows, m).amin(0), last[number].view(rows, m).amax(0)

    def _offsets(self) -> tuple[int, int]:
        """The smallest and the largest offset of a row."""
        if isinstance(self.offset, int):
            return self.offset, self.offset
        return (int(self.offset.min()), int(self.offset.max())) if len(self.offset) else (0, 0)

    def _common_offset(self, other: Mask) -> int | Tensor:
        for one, two in ((self, other), (other, self)):
            if not one.positional:
                return two.offset
        a, b = _broadcast("offset", torch.as_tensor(self.offset), torch.as_tensor(other.offset))
        if not torch.equal(a, b):
            raise ValueError(f"cannot combine masks with different offsets, {self.offset} and {other.offset}")
        return self.offset

    @property
    def positional(self) -> bool:
        """Whether it matters at which position a query sits."""
        return self.causal or self.window is not None or self.segments is not None


def check_mask(mask: Mask | None, batch: int, num_heads: int, n: int, m: int) -> None:
    """Raise ValueError unless this is a mask that fits, or None."""
    if mask is not None and not isinstance(mask, Mask):
        given = type(mask).__name__
        raise ValueError(f"mask must be a Mask, not {given}; a boolean matrix goes in as Mask(pattern=…)")
    if mask is not None:
        mask.check(batch, num_heads, n, m)


def _column(value: int | Tensor, rows: slice, device: torch.device) -> int | Tensor:
    """A number, or one per row as [B or 1, 1, 1, 1]."""
    if isinstance(value, int):
        return value
    return (value if value.shape[0] == 1 else value[rows]).to(device).view(-1, 1, 1, 1)


def part(tensor: Tensor, rows: slice, queries: slice, keys: slice) -> Tensor:
    """The part of tensor [B, H, N, M] for these rows, queries and keys; a dimension of 1 stays."""
    for dim, part in ((0, rows), (2, queries), (3, keys)):
        if tensor.shape[dim] != 1:
            tensor = tensor.narrow(dim, part.start, part.stop - part.start)
    return tensor


def _largest(value: int | Tensor | None) -> int:
    if isinstance(value, Tensor):
        return int(value.max()) if value.numel() else 0
    return 0 if value is None else value


def _check_integers(name: str, value: int | Tensor | None, dims: int) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be a torch tensor of whole numbers, not {type(value).__name__} {value!r}")
        if dims != 1 or name == "lengths":
            raise ValueError(f"{name} must be a tensor of whole numbers, not {value!r}")
        smallest = value
    else:
        if value.dtype not in _INTEGERS:
            raise ValueError(f"{name} must be whole numbers, not {_dtype(value)}")
        if value.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimension{'s' * (dims > 1)}, not shape {list(value.shape)}")
        if value.device.type != "cpu" or value.numel() == 0:
            return  # reading a GPU's values would make it wait
        smallest = int(value.min())
    if smallest < 0 and name != "segments":
        raise ValueError(f"{name} must be ≥ 0, not {smallest}")


def _broadcast(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    try:
        a, b = torch.broadcast_tensors(a, b)
    except RuntimeError:
        raise ValueError(f"cannot combine masks with {name} {list(a.shape)} and {list(b.shape)}") from None
    return a, b


def _both(name: str, a: Tensor | None, b: Tensor | None, merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return merge(*_broadcast(name, a, b))


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """One number for each pair of segment numbers; ranks, as the numbers themselves may be too large to multiply."""
    first: Tensor = a.unique(return_inverse=True)[1]
    second: Tensor = b.unique(return_inverse=True)[1]
    return first * b.numel() + second


def _least(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return torch.minimum(*_broadcast("prefix", torch.as_tensor(a), torch.as_tensor(b)))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
