"""Rows of a benchmark, through `datasets`: local files in the official schema, or the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HUB = {
    "longbench": "zip://data/{task}.jsonl::hf://datasets/zai-org/LongBench/data.zip",
    "leval": "hf://datasets/L4NLP/LEval/LEval/{group}/{task}.jsonl",
}


def load_rows(source: str | None, suite: str, task: str, group: str = "") -> list[dict[str, Any]]:
    """All rows of `<task>.jsonl`: in `source` itself, else anywhere below it; None: on the Hub.

    Raises:
        FileNotFoundError: `source` has no such file.
    """
    from datasets import load_dataset

    url = HUB[suite].format(task=task, group=group) if source is None else _find(source, task)
    return list(load_dataset("json", data_files=url, split="train"))


def _find(source: str, task: str) -> str:
    folder, name = Path(source), f"{task}.jsonl"
    if (folder / name).is_file():
        return str(folder / name)
    if found := sorted(folder.rglob(name)):
        return str(found[0])
    raise FileNotFoundError(
        f"no {name} in {folder}: point --data at a folder with the benchmark's own files, "
        "or leave it out to read the Hub"
    )
