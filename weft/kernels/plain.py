"""The plain ways: a mode in which every kernel is its own reference, to see what the fast ones change.

Attention is the formula, the output layer makes all logits and gives them to torch's cross entropy, dropout is
torch's, and a bf16 product is an fp32 one of rounded operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_plain: ContextVar[bool] = ContextVar("weft_plain", default=False)


@contextmanager
def plain(on: bool = True) -> Iterator[None]:
    """Inside, kernels go their plain ways."""
    token = _plain.set(on)
    try:
        yield
    finally:
        _plain.reset(token)


def is_plain() -> bool:
    """Whether this runs inside ``plain()``."""
    return _plain.get()
