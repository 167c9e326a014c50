"""Dry runs of the paper's tables: tiny stand-ins and synthetic rows in the official schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eval.metrics.longbench import METRICS
from eval.paper import PaperModel, save_profile
from eval.settings import Settings
from eval.stand_in import tiny_model
from eval.tasks.haystack import prose
from flexicache_hf.models.kv_heads import kv_heads
from flexicache_hf.profiles.default_rule import default_unstable_heads

SCALE = 16  # budgets of a dry run are this much smaller


def write_rows(suite: str, tasks: Sequence[str], folder: Path, rows: int = 1) -> Path:
    """`<task>.jsonl` files of invented rows, as `--data`."""
    folder.mkdir(parents=True, exist_ok=True)
    make = _leval_row if suite == "leval" else _longbench_row
    for task in tasks:
        made = [make(task, random.Random(f"{task}-{n}")) for n in range(rows)]
        for n, row in enumerate(made):
            if "_id" in row:
                row["_id"] = f"dry-{task}-{n}"  # rows of one id would be one row
        lines = [json.dumps(row) for row in made]
        (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _text(rng: random.Random, sentences: int) -> str:
    return " ".join(rng.sample(prose(None), sentences))


def _leval_row(task: str, rng: random.Random) -> dict[str, object]:
    return {
        "input": _text(rng, 12),
        "instructions": ["What is this about?"],
        "outputs": [_text(rng, 1)],
        "source": task,
        "evaluation": "f1" if task.endswith("_qa") else "rouge",
    }


def _longbench_row(task: str, rng: random.Random) -> dict[str, object]:
    answer = "Paragraph 3" if task.startswith("passage_retrieval") else _text(rng, 1)
    return {
        "input": "What is this about?",
        "context": _text(rng, 12),
        "answers": [answer],
        "length": 200,
        "dataset": task,
        "language": "en",
        "all_classes": [answer, "another class"] if METRICS[task] is None else None,
        "_id": "",
    }


def dry_settings(model: PaperModel, settings: Settings, budgets: Sequence[int]) -> Settings:
    """`settings` for a stand-in: invented rows, a few tokens, profiles by the default rule."""
    out = Path(settings.out)
    config = tiny_model(model.stand_in).config
    layers = range(config.num_hidden_layers)
    heads = default_unstable_heads(layers, len(layers), kv_heads(config))
    for task in settings.tasks:
        for budget in budgets:
            save_profile(config, heads, out / "profiles" / f"{task}-{budget}")
    return replace(
        settings,
        model=f"stand-in:{model.stand_in}",
        data=str(write_rows(settings.suite, settings.tasks, out / "rows")),
        profile=str(out / "profiles" / "{task}-{budget}"),
        context=2400,
        max_new_tokens=20,
        device="cpu",
        dtype="auto",
    )
