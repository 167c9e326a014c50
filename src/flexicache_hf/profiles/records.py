"""Recorded page rankings, one safetensors file per generation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .texts import Text

FORMAT = "flexicache-page-sets-1"


@dataclass(frozen=True)
class CollectSettings:
    """What is recorded; part of every record, so that only like records are analysed together."""

    top_k: int = 128  # the largest K that can be analysed
    page_sizes: tuple[int, ...] = (16,)
    steps: int = 256  # decode steps per document
    max_prompt_tokens: int = 4096

    def plain(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {**vars(self), "page_sizes": list(self.page_sizes)}


@dataclass(frozen=True)
class Record:
    """The page rankings of one generation."""

    task: str
    name: str
    pages: dict[int, Tensor]  # page size -> [steps, layers, H_kv, top_k]; best first, padded by -1
    num_pages: dict[int, Tensor]  # page size -> [steps]
    layers: tuple[int, ...]  # the model's layers that were recorded
    info: dict[str, Any]  # model_id, revision, settings, prompt_tokens


def save_record(record: Record, settings: CollectSettings, path: Path) -> None:
    """Write one record; a killed run never leaves half a file under its final name."""
    tensors = {}
    for size, pages in record.pages.items():
        small = int(record.num_pages[size].max()) <= torch.iinfo(torch.int16).max
        tensors[f"pages.{size}"] = pages.to(torch.int16 if small else torch.int32).contiguous()
        tensors[f"num_pages.{size}"] = record.num_pages[size].to(torch.int32)
    facts = {
        "format": FORMAT,
        "task": record.task,
        "name": record.name,
        "layers": list(record.layers),
        "settings": settings.plain(),
        **record.info,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"flexicache": json.dumps(facts)})
    partial.replace(path)


def load_record(path: Path) -> Record:
    """Raises ValueError if `path` is a safetensors file of something else."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads((file.metadata() or {}).get("flexicache", "{}"))
        if facts.get("format") != FORMAT:
            raise ValueError(
                f"{path}: format is {facts.get('format')!r}, expected {FORMAT!r}; "
                "collect again with this version"
            )
        sizes = facts["settings"]["page_sizes"]
        pages = {size: file.get_tensor(f"pages.{size}") for size in sizes}
        totals = {size: file.get_tensor(f"num_pages.{size}") for size in sizes}
    del facts["format"]
    task, name, layers = facts.pop("task"), facts.pop("name"), tuple(facts.pop("layers"))
    return Record(task, name, pages, totals, layers, facts)


def record_path(folder: Path, text: Text) -> Path:
    """`<folder>/<task>/<name>.safetensors`."""
    return folder / text.task.replace("/", "--") / f"{text.name.replace('/', '--')}.safetensors"
