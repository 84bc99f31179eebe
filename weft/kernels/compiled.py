"""Which operations of training are compiled ones: those that a run has chosen, in all threads.

    with compiled("losses", "attention", "rows"):
        ...

Outside of it, and without a compiler, all is torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from weft.kernels import native
from weft.kernels.machine import cpu_instructions

KINDS = ("losses", "attention", "rows", "sublayers", "updates")


class _Block:
    """What is compiled inside a ``with``; one is another's equal only if it is the same."""

    def __init__(self, library: ctypes.CDLL | None, kinds: tuple[str, ...]) -> None:
        self.functions = {} if library is None else dict.fromkeys(kinds, library)


# Of all threads, as autograd runs backward passes in its own: the last one counts, and threads may leave in any order.
_blocks: list[_Block] = []


@contextmanager
def compiled(*kinds: str) -> Iterator[None]:
    """Inside, these operations are compiled; if there is a compiler."""
    if unknown := set(kinds).difference(KINDS):
        raise ValueError(f"expected some of {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    block = _Block(native.library(), kinds)
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)


def functions(kind: str) -> ctypes.CDLL | None:
    """What computes operations of this kind here; None if it is torch, as it is for what torch compiles itself."""
    last = _blocks[-1:]  # at once, as another thread may take it away
    return last[0].functions.get(kind) if last and not torch.compiler.is_compiling() else None


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether compiled products of this dtype are as fast here as anything; asked where something is compiled.

    Those of bf16 are by blocks, where the CPU can do that, else by vectors.
    """
    library = native.library()
    if dtype != torch.bfloat16 or library is None:
        return dtype == torch.float32
    library.weft_multiplies_bf16.argtypes, library.weft_multiplies_bf16.restype = [], ctypes.c_int32
    by = library.weft_multiplies_bf16()
    return bool(by == 2 or (by == 1 and "amx_bf16" not in cpu_instructions()))


def enough_memory(failed: Any, *_: Any) -> Any:
    """What ctypes calls ``errcheck``, of a function that gives 0, or 1 for a lack of memory.

    Raises:
        MemoryError: for that.
    """
    if failed:
        raise MemoryError("out of memory in a compiled operation")
    return failed


def fastest() -> str:
    """Which operations training should take here, "compiled" or "torch"."""
    return "torch" if native.library() is None else "compiled"
