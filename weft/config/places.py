"""Where weft keeps what it can get or make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """WEFT_CACHE, else weft in XDG_CACHE_HOME or ~/.cache."""
    if given := os.environ.get("WEFT_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
