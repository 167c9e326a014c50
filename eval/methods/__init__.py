"""Long-context methods under one interface: `build(name, budget, **options)`."""

from __future__ import annotations

import types
import typing
from dataclasses import fields
from typing import Any

from .base import Method, Session
from .controls import Oracle, Random, StreamingPages
from .dense import Dense
from .duoattention import DuoAttention
from .flexicache import FlexiCache
from .flexicache_mask import FlexiCacheMask
from .h2o import H2O
from .infinigen import InfiniGen
from .infllm import InfLLM
from .ledger import Tokens
from .lserve import LServe
from .quest import Quest
from .recording import record
from .scissorhands import Scissorhands
from .shadowkv import ShadowKV
from .snapkv import SnapKV
from .streamingllm import StreamingLLM
from .tova import TOVA

METHODS: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        Dense,
        Oracle,
        Random,
        StreamingPages,
        FlexiCache,
        FlexiCacheMask,
        LServe,
        DuoAttention,
        Quest,
        H2O,
        StreamingLLM,
        SnapKV,
        TOVA,
        InfiniGen,
        ShadowKV,
        InfLLM,
        Scissorhands,
    )
}

__all__ = ["METHODS", "Method", "Session", "Tokens", "build", "names", "record"]


def names() -> list[str]:
    """All methods, in the order of tables."""
    return list(METHODS)


def build(name: str, budget: int, **options: Any) -> Method:
    """The method `name` with `budget` tokens; options are its fields, strings being converted.

    Raises:
        ValueError: no such method or option, or a value the method does not accept.
    """
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    cls = METHODS[name]
    allowed = [f.name for f in fields(cls) if f.name != "budget"]
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"{name} has no option {option!r}; it takes {', '.join(allowed) or 'none'}"
            )
    hints = typing.get_type_hints(cls)
    values = {key: _convert(name, key, value, hints[key]) for key, value in options.items()}
    return cls(budget=budget, **values)


def _convert(method: str, option: str, value: Any, hint: Any) -> Any:
    """A string from the command line as the option's type; anything else as it is."""
    if not isinstance(value, str):
        return value
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    if type(None) in kinds and value.lower() == "none":
        return None
    if bool in kinds:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{method}: {option} is {value!r}, expected true or false")
        return value.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError:
                raise ValueError(
                    f"{method}: {option} is {value!r}, expected a number ({kind.__name__})"
                ) from None
    return value
