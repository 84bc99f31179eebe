"""weft: attention models as working software.

The public names are looked up when first used, so that ``import weft`` and the
shell's ``--help`` cost no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.api import load as load
    from weft.config import Recipe as Recipe
    from weft.observe import record as record

__version__ = "0.1.0"
__all__ = ["Recipe", "__version__", "load", "record"]

_HOMES = {"Recipe": "weft.config", "load": "weft.api", "record": "weft.observe"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
