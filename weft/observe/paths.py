"""Searches go by steps, with rows that end, part and die out; a record of a search is of the paths that were chosen.

A search tells a ``Path`` what becomes of its rows. At its end what the modules showed step by step, for all rows, is
put together to one entry a module: the steps one below the other, of the chosen rows alone, as if the model had read
each chosen target at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.observe.records import Record, Seen

if TYPE_CHECKING:
    from weft.observe import Listener

_BY_KEY = ("weights", "allowed", "bias")  # [..., query, key]: a later step has more keys
_OF_KEYS = ("keys", "values")  # [..., key, dim]: the last step has them all
Place = tuple[int, int]  # a step and a row of it


class Path:
    """Which rows of which steps led to which ends. With nobody listening, telling it something costs nothing."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        """Begin a search."""
        self._listeners = listeners
        self._marks = [[len(listener.record)] for listener in listeners]  # where each portion of entries ends
        self._before: list[list[int]] = []  # for each step, the row that each row continues
        self._ends: dict[Hashable, Place] = {}
        self._read: list[int] = []
        self._begins: list[list[int] | None] = []  # of what was read at first and of each step, where rows begin
        self._left: dict[int, dict[int, int]] = {}  # step -> row -> where its keys are, of the rows that ended there
        self._grown: dict[str, list[Tensor]] = {}  # of the search, by column

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def wants(self, kind: str) -> bool:
        """Whether somebody listens for such things."""
        return any(kind in listener.kinds for listener in self._listeners)

    def begun(self, sources: Tensor, lengths: Tensor, begins: Tensor | None = None) -> None:
        """The model has read the sources; row r of the first step will be of source ``sources[r]``.

        Args:
            sources: [R].
            lengths: [B] how many tokens of the target, or of the prompt, it has consumed of each source by now.
            begins: [B] where what it sees of them begins, if its context slides.
        """
        if self:
            self._mark(begins)
            self._before.append(sources.tolist())
            self._read = lengths.tolist()

    def stepped(self, begins: Tensor | None = None) -> None:
        """The model has gone a step with all rows, and sees each from ``begins`` [R] on, or from its beginning."""
        if self:
            self._mark(begins)

    def show(self, kind: str, make: Callable[[], dict[str, Tensor]]) -> None:
        """Show something of the present step, for all rows, to those who listen for this kind."""
        listeners = [listener for listener in self._listeners if kind in listener.kinds]
        values = make() if listeners else {}
        for listener in listeners:
            listener.add("", kind, dict(values))

    def grew(self, **columns: Tensor) -> None:
        """How the search goes on from the present step; for each continuation

        source: which it belongs to; parent: the row that it continues; row: its own in the next step, −1 if it ends
        here; token, log_prob: what was added; total: the log-probability of all so far.
        """
        step = torch.full_like(columns["token"], len(self._before) - 1)
        for name, column in {"step": step, **columns}.items():
            self._grown.setdefault(name, []).append(column)

    def ended(self, key: Hashable, row: int) -> None:
        """What is called ``key`` ends with this row of the present step."""
        if self:
            self._ends[key] = (len(self._before) - 1, row)

    def goes_on(self, parents: Tensor) -> None:
        """Row r of the next step continues row ``parents[r]`` of the present one."""
        if self:
            self._forget_keys()
            self._before.append(parents.tolist())

    def finish(self, keys: Sequence[Hashable]) -> None:
        """Put together what was seen on the way to these ends, a row each."""
        if not self or not keys:
            return
        chains = [self._chain(*self._ends[key]) for key in keys]
        for listener, marks in zip(self._listeners, self._marks, strict=True):
            listener.replace(marks[0], self._folded(listener.record, marks, chains))
            if "search" in listener.kinds and self._grown:
                listener.add("", "search", {name: torch.cat(parts) for name, parts in self._grown.items()})

    def _forget_keys(self) -> None:
        """Of the present step, keep the keys and values of the rows that ended with it: the next step has the others'.

        All steps of a beam together would hold some hundred times as much as the chosen paths need.
        """
        now = len(self._before) - 1
        rows = sorted({row for step, row in self._ends.values() if step == now})
        self._left[now] = {row: place for place, row in enumerate(rows)}
        for listener, marks in zip(self._listeners, self._marks, strict=True):
            for entry in listener.record.entries[marks[-2] :]:
                entry.values |= {name: entry.values[name][rows] for name in _OF_KEYS if name in entry.values}

    def _mark(self, begins: Tensor | None) -> None:
        self._begins.append(None if begins is None else begins.tolist())
        for listener, marks in zip(self._listeners, self._marks, strict=True):
            marks.append(len(listener.record))

    def _chain(self, step: int, row: int) -> list[int]:
        """The source and then the row of each step that led to this row of a step."""
        rows = [row]
        for before in reversed(self._before[: step + 1]):
            rows.append(before[rows[-1]])
        return rows[::-1]

    def _folded(self, record: Record, marks: Sequence[int], chains: Sequence[Sequence[int]]) -> list[Seen]:
        entries = record.entries
        portions = [entries[low:high] for low, high in pairwise(marks)]
        start, *steps = ({(entry.name, entry.kind): entry for entry in portion} for portion in portions)
        moving = dict.fromkeys(key for step in steps for key in step)
        sources = [chain[0] for chain in chains]
        kept = [_chosen(entry, sources) for entry in portions[0] if (entry.name, entry.kind) not in moving]
        for key in moving:
            first = next(entry for entry in (portion.get(key) for portion in (start, *steps)) if entry)
            paths = [self._parts(start.get(key), [step.get(key) for step in steps], chain) for chain in chains]
            values = {name: _together([_joined(name, path[name]) for path in paths]) for name in paths[0]}
            kept.append(Seen(first.name, first.kind, first.call, _shared(first) | values))
        return kept + entries[marks[-1] :]

    def _parts(self, begun: Seen | None, steps: Sequence[Seen | None], chain: Sequence[int]) -> dict[str, list[Tensor]]:
        """What one module showed on one path, by value: what it had read at first, and a part for each step."""
        found: dict[str, list[Tensor]] = {}
        source, rows = chain[0], chain[1:]
        first = self._begin(0, source)
        for name, part in _rows(begun, source):
            whole = part if name in _OF_KEYS else part[..., : self._read[source] - first, :]
            found[name] = [_moved(name, whole, first, rows=True)]
        for number, (step, row) in enumerate(zip(steps, rows, strict=False)):
            last = number == len(rows) - 1
            for name, part in _rows(step, row, self._left.get(number) if last else {}):
                newest = part if name in _OF_KEYS else part[..., -1:, :]
                found.setdefault(name, []).append(_moved(name, newest, self._begin(number + 1, row)))
        return found

    def _begin(self, portion: int, row: int) -> int:
        begins = self._begins[portion]
        return 0 if begins is None else begins[row]


def _rows(entry: Seen | None, row: int, left: Mapping[int, int] | None = None) -> list[tuple[str, Tensor]]:
    """The values of one row, each [..., position, …]; a gate for the whole input is one position.

    Of keys, those of the rows that ``left`` has the places of, or of all if None.
    """
    found = []
    for name, value in ({} if entry is None else entry.values).items():
        place = row if left is None or name not in _OF_KEYS else left.get(row)
        if value.dim() > 1 and place is not None:
            found.append((name, torch.atleast_2d(value[place])))
    return found


def _moved(name: str, part: Tensor, by: int, rows: bool = False) -> Tensor:
    """A part in which keys, and rows if so said, stand where they do in the whole text: so many zeros before them."""
    if not by:
        return part
    down = by if rows or name in _OF_KEYS else 0
    return pad(part, (by if name in _BY_KEY else 0, 0, down, 0))


def _chosen(entry: Seen, sources: Sequence[int]) -> Seen:
    """What was seen of the sources, a row for each path."""
    if sources == list(range(len(next(iter(entry.values.values()))))):
        return entry
    values = {name: value if value.dim() < 2 else value[sources] for name, value in entry.values.items()}
    return Seen(entry.name, entry.kind, entry.call, values)


def _shared(entry: Seen) -> dict[str, Tensor]:
    """The values that all rows share: a scale, a bias."""
    return {name: value for name, value in entry.values.items() if value.dim() < 2}


def _joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The parts of a path as one."""
    if name in _OF_KEYS:
        return parts[-1]
    if name in _BY_KEY:
        longest = max(part.shape[-1] for part in parts)
        parts = [_grown(part, [*part.shape[:-1], longest]) for part in parts]
    return torch.cat(list(parts), -2)


def _together(rows: Sequence[Tensor]) -> Tensor:
    """[B, …] of one tensor a path; shorter ones are filled up with zeros."""
    shape = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    return torch.stack([_grown(row, shape) for row in rows])


def _grown(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x with zeros behind it in every dimension, up to this shape."""
    missing = [want - have for have, want in zip(x.shape, shape, strict=True)]
    return pad(x, [width for more in reversed(missing) for width in (0, more)])
