"""Who may attend to whom: a description, and the one place where it becomes a matrix.

The query i sits at the key position ``offset + i``; everything below is about that position p and
a key position j:

    causal     j ≤ p
    prefix     the keys j < prefix are open to all, causal or not
    window     |p − j| < window: itself and the window − 1 nearest on each side that is open
    lengths    j < lengths[b]: what lies behind is padding
    segments   segments[b, j] = segments[b, p]: packed documents, blocks
    pattern    any boolean matrix, True = may attend

All that is given must hold. Fast ways read the fields; only ``dense`` makes a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


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
        if self.window is not None and (not isinstance(self.window, int) or self.window < 1):
            raise ValueError(f"window must be a whole number ≥ 1, not {self.window!r}")
        if self.prefix is not None and not self.causal:
            raise ValueError("prefix opens keys that causal=True closes: give both")
        for name, dims in (("lengths", 1), ("prefix", 1), ("offset", 1), ("segments", 2)):
            _check_integers(name, getattr(self, name), dims)
        if self.pattern is not None:
            if self.pattern.dtype != torch.bool:
                raise ValueError(
                    f"pattern must be boolean (True = may attend), not {_dtype(self.pattern)}; "
                    "numbers to add to the scores go in bias"
                )
            if not 2 <= self.pattern.dim() <= 4:
                raise ValueError(f"pattern must be [N, M], [B, N, M] or [B, H, N, M], not {list(self.pattern.shape)}")

    @property
    def open(self) -> bool:
        """Whether every query may attend to every key."""
        return all(getattr(self, f.name) in (None, False) for f in fields(self) if f.name != "offset")

    def __and__(self, other: Mask) -> Mask:
        """The mask that allows what both allow."""
        prefix = self.prefix if self.causal else other.prefix
        if self.causal and other.causal:
            prefix = None if self.prefix is None or other.prefix is None else _least(self.prefix, other.prefix)
        return Mask(
            causal=self.causal or other.causal,
            window=min((w for w in (self.window, other.window) if w is not None), default=None),
            lengths=_both(self.lengths, other.lengths, torch.minimum),
            segments=_both(self.segments, other.segments, _pairs),
            prefix=prefix,
            pattern=_both(self._pattern4(), other._pattern4(), torch.logical_and),
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
        device = torch.device(device) if device is not None else self.device
        key = torch.arange(m, device=device)  # [m]
        query = self._column(self.offset, device) + torch.arange(n, device=device)[:, None]  # [B or 1, 1, n, 1]
        allowed = torch.ones(1, 1, n, m, dtype=torch.bool, device=device)
        if self.causal:
            closed = key > query
            if self.prefix is not None:
                closed &= key >= self._column(self.prefix, device)
            allowed = allowed & ~closed
        if self.window is not None:
            allowed = allowed & ((query - key).abs() < self.window)
        if self.lengths is not None:
            allowed = allowed & (key < self._column(self.lengths, device))
        if self.segments is not None:
            allowed = allowed & self._same_segment(query, m, device)
        if self.pattern is not None:
            pattern = self._pattern4().to(device)  # type: ignore[union-attr]
            if pattern.shape[-2] not in (1, n) or pattern.shape[-1] not in (1, m):
                raise ValueError(
                    f"pattern {list(self.pattern.shape)} does not fit {n} queries and {m} keys: expected […, {n}, {m}]"
                )
            allowed = allowed & pattern
        return allowed

    @property
    def device(self) -> torch.device:
        """Where the mask's tensors are (the CPU if it has none)."""
        tensors = (v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor))
        return next((t.device for t in tensors), torch.device("cpu"))

    @property
    def batch(self) -> int:
        """How many rows the mask tells apart (1 if all rows are alike)."""
        tensors = (self.lengths, self.segments, self.prefix, self.offset, self._pattern4())
        return max((t.shape[0] for t in tensors if isinstance(t, Tensor)), default=1)

    def check(self, batch: int, num_heads: int, n: int, m: int) -> None:
        """Raise ValueError unless the mask fits q [batch, num_heads, n, ·] and k [batch, ·, m, ·]."""
        for name in ("lengths", "segments", "prefix", "offset"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.shape[0] not in (1, batch):
                raise ValueError(f"{name} has {value.shape[0]} rows, but the batch has {batch}")
        if self.segments is not None and self.segments.shape[1] != m:
            raise ValueError(f"segments cover {self.segments.shape[1]} positions, but there are {m} keys")
        if self.pattern is not None:
            for given, expected in zip(self._pattern4().shape, (batch, num_heads, n, m), strict=True):  # type: ignore[union-attr]
                if given not in (1, expected):
                    raise ValueError(
                        f"pattern {list(self.pattern.shape)} does not fit: expected something that "
                        f"broadcasts to [batch {batch}, heads {num_heads}, queries {n}, keys {m}]"
                    )

    def _pattern4(self) -> Tensor | None:
        if self.pattern is None or self.pattern.dim() == 4:
            return self.pattern
        return self.pattern[None, None] if self.pattern.dim() == 2 else self.pattern[:, None]

    def _same_segment(self, query: Tensor, m: int, device: torch.device) -> Tensor:
        segments = self.segments.to(device)  # type: ignore[union-attr]
        if segments.shape[1] != m:
            raise ValueError(f"segments cover {segments.shape[1]} positions, but there are {m} keys")
        rows = max(segments.shape[0], query.shape[0])
        segments = segments.expand(rows, m)
        positions = query[:, 0, :, 0].expand(rows, -1).clamp(0, max(m - 1, 0))  # [B, n]
        own = segments.gather(1, positions)
        return (own[:, :, None] == segments[:, None, :])[:, None]

    def _common_offset(self, other: Mask) -> int | Tensor:
        for one, two in ((self, other), (other, self)):
            if not one._positional:
                return two.offset
        a, b = torch.as_tensor(self.offset), torch.as_tensor(other.offset)
        if not torch.equal(*torch.broadcast_tensors(a, b)):
            raise ValueError(f"cannot combine masks with different offsets, {self.offset} and {other.offset}")
        return self.offset

    @property
    def _positional(self) -> bool:
        return self.causal or self.window is not None or self.segments is not None

    @staticmethod
    def _column(value: int | Tensor, device: torch.device) -> Tensor:
        """A number or one per row, as [B or 1, 1, 1, 1]."""
        return torch.as_tensor(value, device=device).reshape(-1, 1, 1, 1)


def _check_integers(name: str, value: int | Tensor | None, dims: int) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be whole numbers, not {value!r}")
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


def _both(a: Tensor | None, b: Tensor | None, merge: object) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    assert callable(merge)
    merged: Tensor = merge(a, b)
    return merged


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """One number for each pair of segment numbers."""
    spread = b - b.min() if b.numel() else b
    return a.long() * (spread.max() + 1 if b.numel() else 1) + spread


def _least(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return torch.minimum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
