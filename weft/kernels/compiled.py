"""Which operations of training are compiled ones: those that a run has chosen, in all threads.

    with compiled("losses", "attention", "rows"):
        ...

Outside of it, and without a compiler, all is torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from weft.kernels import native

KINDS = ("losses", "attention", "rows")
_on: dict[str, ctypes.CDLL] = {}  # autograd runs backward passes in threads of its own, so this is no context variable


@contextmanager
def compiled(*kinds: str) -> Iterator[None]:
    """Inside, these operations are compiled; if there is a compiler."""
    global _on
    if unknown := set(kinds).difference(KINDS):
        raise ValueError(f"expected some of {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    library = native.library()
    before, _on = _on, {} if library is None else dict.fromkeys(kinds, library)
    try:
        yield
    finally:
        _on = before


def functions(kind: str) -> ctypes.CDLL | None:
    """What computes operations of this kind here; None if it is torch."""
    return _on.get(kind)


def fastest() -> str:
    """Which operations training should take here, "compiled" or "torch"."""
    return "torch" if native.library() is None else "compiled"
