"""Import of the unstable-head lists that the paper's authors publish with their vLLM fork."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .profile import HeadProfile, model_facts

KEY = re.compile(r"unstable-(?P<count>\d+)-profile-(?P<task>.+)-topk-(?P<top_k>\d+)")


def import_reference_list(
    path: str | Path, config: Any, *, model_id: str, task: str, top_k_pages: int
) -> HeadProfile:
    """One list of a file `{model: {"unstable-<M>-profile-<task>-topk-<K>": [[layer, head], ..]}}`.

    The lists come without stability; page size and W are the paper's, 16 and 16.

    Args:
        path: the JSON file.
        config: the model's transformers config, for the numbers the file lacks.
        model_id: the model's key in the file.
        task: profile task of the list.
        top_k_pages: K of the list.

    Raises:
        ValueError: no such list, or one that does not fit its name or the model.
    """
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if model_id not in document:
        raise ValueError(f"{path} has no model {model_id!r}; it has {sorted(document)}")
    lists = document[model_id]
    for name, heads in lists.items():
        match = KEY.fullmatch(name)
        if match is None or (match["task"], int(match["top_k"])) != (task, top_k_pages):
            continue
        if len(heads) != int(match["count"]):
            raise ValueError(f"{path}: {name} says {match['count']} heads, but holds {len(heads)}")
        pairs = tuple(sorted((int(layer), int(head)) for layer, head in heads))
        facts = {**model_facts(config), "model_id": model_id, "revision": None}
        return HeadProfile(
            unstable_heads=pairs,
            provenance={"source": "list published by the paper's authors", "list": name},
            tasks=(task,),
            top_k_pages=top_k_pages,
            page_size=16,
            window=16,
            task_heads={task: pairs},
            **facts,
        )
    raise ValueError(
        f"{path} has no list for task {task!r} and K = {top_k_pages}; it has {sorted(lists)}"
    )
