"""The tap: how layers tell what they attended to, and how a reader listens.

A layer says ``observe.see(self, "weights", make)`` on its way through, where ``make`` computes what
there is to see. With nobody listening that is one lookup. ``record`` is the listener::

    with weft.record(model) as seen:
        model(x)
    seen["encoder.0.attention"].weights  # [batch, head, query, key]

A module speaks of one kind of thing. Attention weights and gates are told to every record; what is ``"added"`` to the
residual stream only to one that asks for it, since that is much::

    with weft.record(model, kinds="added") as seen:
        model(x)
    seen["encoder.0.around_attention"]["added"]  # [batch, position, dim]
    seen["encoder.0.attention.output"]["heads"]  # [batch, head, position, dim]: which head added what

The tap lives in a ContextVar: no flag in a config, no field left on a module, and two threads
record apart. ``make`` runs without gradients and must draw no random numbers, so the outputs
are bit-identical with and without a listener.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

KINDS = ("weights", "gates", "added")

_listeners: ContextVar[tuple[Record, ...]] = ContextVar("weft_listeners", default=())


@dataclass
class Seen:
    """What one call of one module showed.

    Attributes:
        name: the module's name in ``model.named_modules()``.
        kind: ``"weights"`` for attention, ``"gates"`` for everything that multiplies by a learned 0…1, ``"added"`` for
            what goes into a residual stream.
        call: 0 for the module's first call under this record, 1 for its second, …
        values: the tensors by name; attention has one, ``"weights"`` [B, H, N, M].
        queries, keys: token labels, if they were given by ``Record.label``.
    """

    name: str
    kind: str
    call: int
    values: dict[str, Tensor]
    queries: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None

    @property
    def weights(self) -> Tensor:
        """The attention weights [batch, head, query, key]."""
        return self["weights"]

    def __getitem__(self, value: str) -> Tensor:
        if value not in self.values:
            raise KeyError(f"{self.name!r} showed {', '.join(self.values)}, not {value!r}")
        return self.values[value]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k}{list(v.shape)}" for k, v in self.values.items())
        return f"Seen({self.name!r}, call {self.call}: {shapes})"


@dataclass
class Record:
    """Everything that was seen, in the order in which it happened."""

    entries: list[Seen] = field(default_factory=list)
    _names: dict[nn.Module, str] = field(default_factory=dict, repr=False)
    _kinds: tuple[str, ...] = field(default=KINDS, repr=False)
    _calls: Counter[str] = field(default_factory=Counter, repr=False)

    def calls(self, name: str) -> list[Seen]:
        """All calls of the module ``name``, first to last."""
        found = [entry for entry in self.entries if entry.name == name]
        if not found:
            names = list(dict.fromkeys(entry.name for entry in self.entries))
            near = get_close_matches(name, names, n=1) or names[:1]
            hint = f"; did you mean {near[0]!r}?" if near else ": nothing was recorded"
            raise KeyError(f"no record of {name!r}{hint}")
        return found

    def __getitem__(self, name: str) -> Seen:
        found = self.calls(name)
        if len(found) > 1:
            raise KeyError(f"{name!r} was called {len(found)} times: use calls({name!r})[i]")
        return found[0]

    def __iter__(self) -> Iterator[Seen]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: str) -> bool:
        return any(entry.name == name for entry in self.entries)

    def label(self, pattern: str, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None) -> None:
        """Give token labels to every attention entry whose name matches the shell-style ``pattern``.

        Raises:
            ValueError: if nothing matches, or a list is not as long as that side of the weights.
        """
        found = [e for e in self.entries if e.kind == "weights" and fnmatchcase(e.name, pattern)]
        if not found:
            raise ValueError(f"no recorded attention matches {pattern!r}")
        for side, labels, dim in (("queries", queries, -2), ("keys", keys, -1)):
            if labels is None:
                continue
            for entry in found:
                if len(labels) != entry.weights.shape[dim]:
                    raise ValueError(
                        f"{entry.name!r} has {entry.weights.shape[dim]} {side}, but {len(labels)} labels were given"
                    )
                setattr(entry, side, tuple(labels))

    def _add(self, module: nn.Module, kind: str, values: dict[str, Tensor]) -> None:
        name = self._names[module]
        self.entries.append(Seen(name, kind, self._calls[name], values))
        self._calls[name] += 1


def see(module: nn.Module, kind: str, make: Callable[[], dict[str, Tensor]]) -> None:
    """Show what ``module`` is doing to whoever listens; ``make`` is called only then."""
    if torch.compiler.is_compiling():  # while somebody listens nothing is compiled, see record
        return
    listeners = [record for record in _listeners.get() if module in record._names and kind in record._kinds]
    if listeners:
        with torch.no_grad():
            values = {name: value.detach() for name, value in make().items()}
        for record in listeners:
            record._add(module, kind, values)


def listening() -> bool:
    """Whether anybody listens here and now."""
    return bool(_listeners.get())


@contextmanager
def record(
    model: nn.Module, names: str | Iterable[str] | None = None, kinds: str | Iterable[str] = ("weights", "gates")
) -> Iterator[Record]:
    """Collect what the attentions and gates of ``model`` show while the block runs.

    A compiled model runs eagerly in the block, as does everything else that torch.compile made.

    Args:
        model: any module; entries are named as in ``model.named_modules()``.
        names: shell-style patterns of the modules to listen to (``"decoder.*"``), all if None.
        kinds: what to listen for, of "weights", "gates" and "added".

    Raises:
        ValueError: if a pattern matches no module, or there is no such kind.
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in kinds:
        if kind not in KINDS:
            near = get_close_matches(kind, KINDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"kinds must be among {', '.join(KINDS)}, not {kind!r}{hint}")
    modules = dict(model.named_modules())
    if names is not None:
        patterns = [names] if isinstance(names, str) else list(names)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                near = get_close_matches(pattern, list(modules), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"no module matches {pattern!r}{hint}")
        modules = {n: m for n, m in modules.items() if any(fnmatchcase(n, p) for p in patterns)}
    seen = Record(_names={module: name.replace("_orig_mod.", "") for name, module in modules.items()}, _kinds=kinds)
    token = _listeners.set((*_listeners.get(), seen))
    # Importing the compiler takes seconds; where nobody has, nothing is compiled.
    compiled = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield seen
    finally:
        _listeners.reset(token)
        seen._names.clear()
