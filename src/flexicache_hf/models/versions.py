"""What differs between the versions of transformers that are supported."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """Name of the forward argument that takes a cache: `cache` since transformers 5.24."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
