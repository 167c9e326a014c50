"""The user's own rows: one JSON object a line, with `context`, `question` and `answers`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from eval.metrics.custom import METRICS
from eval.predictions import read_jsonl
from eval.tasks.base import Example, Prompt, Request, Task, cut_middle

RESERVE = 500


def custom_task(spec: str) -> Task:
    """A task from `path.jsonl` or `path.jsonl:metric` (default f1).

    Rows: context, question, answers (list); optional id, system, max_new_tokens is the task's 128.

    Raises:
        ValueError: the metric is unknown.
    """
    path, _, metric = spec.rpartition(":") if ".jsonl:" in spec else (spec, "", "f1")
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r} in {spec!r}, expected one of {', '.join(METRICS)}")
    load = partial(_load, path)
    return Task("custom", Path(path).stem, metric, 128, load, cut_middle(RESERVE))


def _load(path: str, request: Request) -> list[Example]:
    return [_example(path, index, row) for index, row in enumerate(read_jsonl(path))]


def _example(path: str, index: int, row: dict[str, Any]) -> Example:
    missing = [name for name in ("context", "question", "answers") if name not in row]
    if missing:
        raise ValueError(f"{path}, row {index + 1} lacks {', '.join(missing)}")
    question = f"\n\n{row['question']}"
    prompt = Prompt(row["context"], question, system=row.get("system", ""))
    name = str(row.get("id", index))
    return Example(name, prompt, list(row["answers"]), str(row.get("document_id", name)))
