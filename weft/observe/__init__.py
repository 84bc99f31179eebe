"""The tap: how layers tell what they attended to, and how a reader listens.

A layer says ``observe.see(self, "weights", make)`` on its way through, where ``make`` computes what
there is to see. With nobody listening that is one lookup. ``record`` is the listener::

    with weft.record(model) as seen:
        model(x)
    seen["encoder.0.attention"].weights  # [batch, head, query, key]

A search tells which rows it goes on with (see paths.py), so that what it shows is the way of the hypothesis that it
chose, under a beam too::

    with weft.record(translator.model) as seen:
        translator.translate("we are eating bread", beam=5)
    seen["decoder.0.cross_attention"].weights  # [1, head, target token, source token]

Attention weights and gates are told to every record; what is more, or larger, to one that asks for it::

    with weft.record(model, kinds=("weights", "added")) as seen:
        model(x)
    seen["encoder.0.around_attention"]["added"]  # [batch, position, dim]
    seen["encoder.0.attention.output"]["heads"]  # [batch, head, position, dim]: which head added what

The tap lives in a ContextVar: no flag in a config, no field left on a module, and two threads
record apart. ``make`` runs without gradients and must draw no random numbers, so the outputs
are bit-identical with and without a listener.
"""

from __future__ import annotations

import sys
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.observe.paths import Path
from weft.observe.records import Record, Seen

__all__ = ["KINDS", "Record", "Seen", "listening", "path", "record", "see"]

# What can be listened for.
KINDS = {
    "weights": "where an attention looked",
    "gates": "everything that multiplies by a learned 0…1",
    "vectors": "the queries, keys and values, the mask and the bias that weights were made of, beside them",
    "added": "what goes into a residual stream",
    "hidden": "what a model's last layer gives for each position, and its memory of the source",
    "distribution": "the log-probabilities of the next token, at every step of a search",
    "search": "how a search went on: which token continued which row, and where it ended",
}
Make = Callable[[], dict[str, Tensor]]

_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("weft_listeners", default=())


class Holder(Protocol):
    """What has a module, such as a translator."""

    @property
    def model(self) -> nn.Module:
        """The module."""


class Listener:
    """Who writes a record: which modules it listens to, and for what.

    Attributes:
        record: what was heard.
        names: the modules and what they are called.
        kinds: what it listens for.
    """

    def __init__(self, names: dict[nn.Module, str], kinds: tuple[str, ...]) -> None:
        """Begin an empty record."""
        self.record, self.names, self.kinds = Record(), names, kinds
        self._calls: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, kind: str, values: dict[str, Tensor]) -> None:
        """Write down what is shown under a name."""
        self.record.entries.append(Seen(name, kind, self._calls[name, kind], values))
        self._calls[name, kind] += 1

    def replace(self, begin: int, entries: list[Seen]) -> None:
        """Put these entries in the place of all from number ``begin`` on."""
        del self.record.entries[begin:]
        self.record.entries += entries
        for entry in entries:
            self._calls[entry.name, entry.kind] = entry.call + 1


def see(module: nn.Module, kind: str, make: Make, more: Mapping[str, Make] | None = None) -> None:
    """Show what ``module`` is doing to whoever listens; ``make`` is called only then.

    Args:
        module: who speaks.
        kind: one of KINDS.
        make: gives the values.
        more: values for those who listen for another kind besides.
    """
    if torch.compiler.is_compiling():  # while somebody listens nothing is compiled, see record
        return
    present = _listeners.get()
    if not present:
        return
    listeners = [each for each in present if module in each.names and kind in each.kinds]
    if not listeners:
        return
    with torch.no_grad():
        values = _detached(make)
        extra = {
            other: _detached(give)
            for other, give in (more or {}).items()
            if any(other in listener.kinds for listener in listeners)
        }
    for listener in listeners:
        wanted = [found for other, found in extra.items() if other in listener.kinds]
        listener.add(listener.names[module], kind, dict(ChainMap(*wanted, values)))


def listening() -> bool:
    """Whether anybody listens here and now."""
    return bool(_listeners.get())


def path(model: object) -> Path:
    """For a search with this model: whom it tells which rows it goes on with."""
    listeners = _listeners.get()
    if not listeners:
        return Path(())
    modules = set(model.modules()) if isinstance(model, nn.Module) else set()
    return Path([listener for listener in listeners if not modules.isdisjoint(listener.names)])


@contextmanager
def record(
    model: nn.Module | Holder,
    names: str | Iterable[str] | None = None,
    kinds: str | Iterable[str] = ("weights", "gates"),
) -> Iterator[Record]:
    """Collect what the attentions and gates of ``model`` show while the block runs.

    In a search, an entry has the chosen hypotheses: for each source of the batch the best of a beam, or each drawn
    sample, its steps one below the other. Rows that end earlier are filled up with zeros. The rows are those of the
    search: whoever gives a translator several texts finds them in the order in which it took them, longest first, and
    samples as they were drawn, not as they are ranked.

    A compiled model runs eagerly in the block, as does everything else that torch.compile made.

    Args:
        model: any module, or what ``weft.load`` gives; entries are named as in ``named_modules()``.
        names: shell-style patterns of the modules to listen to (``"decoder.*"``), all if None.
        kinds: what to listen for, of ``KINDS``; "vectors" come beside "weights".

    Raises:
        ValueError: if a pattern matches no module, or there is no such kind.
    """
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for kind in kinds:
        if kind not in KINDS:
            near = get_close_matches(kind, KINDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"kinds must be among {', '.join(KINDS)}, not {kind!r}{hint}")
    modules = dict((model if isinstance(model, nn.Module) else model.model).named_modules())
    if names is not None:
        patterns = [names] if isinstance(names, str) else list(names)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in modules):
                near = get_close_matches(pattern, list(modules), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"no module matches {pattern!r}{hint}")
        modules = {n: m for n, m in modules.items() if any(fnmatchcase(n, p) for p in patterns)}
    if "vectors" in kinds and "weights" not in kinds:
        kinds = (*kinds, "weights")
    listener = Listener({module: name.replace("_orig_mod.", "") for name, module in modules.items()}, kinds)
    token = _listeners.set((*_listeners.get(), listener))
    # Importing the compiler takes seconds; where nobody has, nothing is compiled.
    compiled = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield listener.record
    finally:
        _listeners.reset(token)
        listener.names.clear()


def _detached(make: Make) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in make().items()}
