"""What every field of a head profile must be: one rule and one message per field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn


def validate(profile: Any) -> None:
    """Check each field of a HeadProfile by itself and against the others.

    Raises:
        ValueError: names the field, what was found, what was expected and what to do.
    """
    for name in ("num_layers", "num_kv_heads"):
        _require(profile, name, _positive, "a whole number above 0")
    for name in ("head_dim", "top_k_pages", "page_size", "num_windows"):
        _require(profile, name, _optional(_positive), "a whole number above 0, or null")
    _require(
        profile, "window", _optional(lambda v: _positive(v) and v > 1), "at least 2 steps, or null"
    )
    for name in ("model_id", "revision", "model_type"):
        _require(profile, name, _optional(_text), "a text that is not empty, or null")
    _require(profile, "tool_version", _text, "a text that is not empty")
    _require(
        profile,
        "tasks",
        lambda v: isinstance(v, tuple) and all(map(_text, v)) and len(set(v)) == len(v),
        "a list of distinct task names",
    )
    _require(profile, "provenance", _json_object, "an object that JSON can hold")
    _matrix(profile, "stability", lambda v: 0 <= v <= 1, "a number from 0 to 1 or null")
    limit = profile.num_windows if profile.num_windows is not None else math.inf
    _matrix(profile, "votes", lambda v: v == int(v) and 0 <= v <= limit, "0 to num_windows or null")
    if profile.votes is not None and profile.stability is None:
        _fail("votes", "given", "none without stability", "add the stability matrix")
    _heads(profile, "unstable_heads", profile.unstable_heads)
    _task_heads(profile)


def _heads(profile: Any, name: str, heads: Any) -> None:
    pairs = isinstance(heads, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(v) is int for v in pair)
        for pair in heads
    )
    if not pairs:
        _fail(name, repr(heads), "a list of [layer, KV head] pairs of whole numbers")
    for layer, head in heads:
        if not (0 <= layer < profile.num_layers and 0 <= head < profile.num_kv_heads):
            _fail(
                name,
                f"(layer {layer}, KV head {head})",
                f"layers 0..{profile.num_layers - 1} and KV heads 0..{profile.num_kv_heads - 1}",
            )
    if tuple(sorted(set(heads))) != heads:
        _fail(
            name,
            repr(heads),
            "pairs in ascending order, each once",
            "sort them and drop duplicates",
        )
    if profile.stability is not None:
        for layer, head in heads:
            if profile.stability[layer][head] is None:
                _fail(name, f"(layer {layer}, KV head {head})", "heads with a stability only")


def _matrix(profile: Any, name: str, rule: Callable[[Any], bool], expected: str) -> None:
    matrix = getattr(profile, name)
    if matrix is None:
        return
    shape = f"{profile.num_layers} rows of {profile.num_kv_heads} values (num_layers, num_kv_heads)"
    rows = isinstance(matrix, tuple) and all(isinstance(row, tuple) for row in matrix)
    if not rows or [len(row) for row in matrix] != [profile.num_kv_heads] * profile.num_layers:
        found = f"rows of {[len(row) for row in matrix]} values" if rows else repr(matrix)
        _fail(name, found, shape)
    for layer, row in enumerate(matrix):
        for head, value in enumerate(row):
            number = type(value) in (int, float) and math.isfinite(value)
            if value is not None and not (number and rule(value)):
                _fail(f"{name}[{layer}][{head}]", repr(value), expected)


def _task_heads(profile: Any) -> None:
    sets = profile.task_heads
    if not isinstance(sets, dict) or not all(map(_text, sets)):
        _fail("task_heads", repr(sets), "an object from task name to a list of pairs")
    if strangers := sorted(set(sets) - set(profile.tasks)):
        _fail("task_heads", f"the tasks {strangers}", f"tasks of profile.tasks {profile.tasks}")
    for task, heads in sets.items():
        _heads(profile, f"task_heads[{task!r}]", heads)
    if len({len(heads) for heads in sets.values()}) > 1:
        sizes = {task: len(heads) for task, heads in sets.items()}
        _fail("task_heads", f"sets of the sizes {sizes}", "sets of one size")


def _require(profile: Any, name: str, rule: Callable[[Any], bool], expected: str) -> None:
    value = getattr(profile, name)
    if not rule(value):
        _fail(name, repr(value), expected)


def _fail(name: str, found: str, expected: str, advice: str = "") -> NoReturn:
    shown = found if len(found) <= 200 else f"{found[:200]}..."
    raise ValueError(
        f"profile.{name} is {shown}, expected {expected}; "
        f"{advice or 'correct the file, or make the profile again with this version'}"
    )


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _optional(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or rule(value)


def _json_object(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return isinstance(value, dict)
