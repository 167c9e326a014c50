"""Where benchmark files lie. They are never part of the repository."""

from __future__ import annotations

import os
from pathlib import Path


def data_root() -> Path:
    """`$FLEXICACHE_DATA`, else `../shared/data` beside the checkout; it may not exist."""
    if root := os.environ.get("FLEXICACHE_DATA"):
        return Path(root)
    return Path(__file__).resolve().parents[2] / "shared" / "data"
