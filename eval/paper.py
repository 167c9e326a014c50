"""The paper's own tables: its models, tasks, budgets and profiles, its numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.paper_numbers import ABLATION, LEVAL, LONGBENCH, LONGBENCH_ROWS, NOTES
from eval.report.bootstrap import retention
from eval.report.collect import DENSE, Cell, collect, pair_scores
from eval.report.tables import interval, markdown, number
from eval.runner import run
from eval.settings import Settings, method_key
from eval.tasks.leval import PAPER_TASKS
from eval.tasks.longbench import ENGLISH_AND_CODE

PAGE = 16


@dataclass(frozen=True)
class PaperModel:
    """A model of the paper; `stand_in` is the model type that dry runs use for it."""

    name: str
    repository: str
    unstable_heads: int
    stand_in: str


MODELS = {
    model.name: model
    for model in (
        PaperModel("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", 64, "llama"),
        PaperModel("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.2", 64, "mistral"),
        PaperModel("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", 80, "mistral"),
        PaperModel("qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", 128, "qwen2"),
    )
}
SUITES = {"leval": (PAPER_TASKS, ABLATION), "longbench": (ENGLISH_AND_CODE, LONGBENCH_ROWS)}


def profile_task(task: str) -> str:
    """The task whose profile serves `task`: gov_report, except for GovReport itself."""
    return "paper_assistant" if task.startswith("gov_report") else "gov_report"


def write_profiles(
    model: PaperModel,
    config: Any,
    heads: str | Path,
    tasks: Sequence[str],
    budgets: Sequence[int],
    out: Path,
) -> str:
    """One profile for every task and budget, from a file in the authors' format
    (`model_unstable_heads_data.json`); returns the pattern for `Settings.profile`.

    Raises:
        ValueError: the file has no list for this model, task and K.
    """
    lists = json.loads(Path(heads).read_text(encoding="utf-8")).get(model.repository, {})
    for budget in budgets:
        for task in tasks:
            key = (
                f"unstable-{model.unstable_heads}-profile-{profile_task(task)}"
                f"-topk-{budget // PAGE}"
            )
            if key not in lists:
                raise ValueError(f"{heads} has no {key} for {model.repository}: {sorted(lists)}")
            save_profile(config, lists[key], out / f"{task}-{budget}", source=key)
    return str(out / "{task}-{budget}")


def save_profile(config: Any, heads: Sequence[Sequence[int]], path: Path, **facts: Any) -> None:
    """Unstable heads as a profile folder."""
    from flexicache_hf import HeadProfile

    pairs = [(layer, head) for layer, head in heads]
    HeadProfile.from_unstable_heads(config, pairs, **facts).save_pretrained(path)


def run_table(settings: Settings, rows: Sequence[tuple[str, str, int]]) -> None:
    """Runs the table's rows; each method only at its own budgets."""
    for budget in dict.fromkeys(budget for *_, budget in rows):
        methods = tuple(method for _, method, own in rows if own == budget)
        run(replace(settings, methods=methods, budgets=(budget,)))


def table(name: str, settings: Settings, rows: Sequence[tuple[str, str, int]]) -> str:
    """Markdown: for each task the published score (where known) and ours, for every row."""
    cells = {(cell.task, cell.method): cell for cell in collect([settings.out])}
    published: Mapping[str, Sequence[float]]
    published = (LEVAL if settings.suite == "leval" else LONGBENCH).get(name, {})
    keys = [_key(settings, method, budget) for _, method, budget in rows]
    head = ["task", *(f"{label}: {who}" for label, *_ in rows for who in ("paper", "ours"))]
    body = []
    for task in settings.tasks:
        line = [task]
        for index, key in enumerate(keys):
            cell = cells.get((task, key))
            line.append(number(published[task][index] if task in published else None))
            line.append(number(cell.score if cell else None))
        body.append(line)
    body.append(["mean ratio to dense", *_ratios(published, keys, cells, settings.tasks)])
    note = NOTES.get((settings.suite, name), "")
    return markdown(head, body) + (f"\n{note}\n" if note else "")


def _key(settings: Settings, spec: str, budget: int) -> str:
    one = replace(settings, methods=(spec,), budgets=(budget,))
    return method_key(one.build_methods(settings.tasks[0])[0])


def _ratios(
    published: Mapping[str, Sequence[float]],
    keys: Sequence[str],
    cells: Mapping[tuple[str, str], Cell],
    tasks: Sequence[str],
) -> list[str]:
    """Mean over tasks of the ratio to dense, published and ours (with its interval)."""
    line = []
    for index, key in enumerate(keys):
        theirs = [scores[index] / scores[0] for scores in published.values()]
        line.append(number(sum(theirs) / len(theirs) if theirs else None, 3))
        pairs = [
            pair_scores(cells[task, key], cells[task, DENSE])
            for task in tasks
            if (task, key) in cells and (task, DENSE) in cells
        ]
        line.append(interval(retention(pairs, 2000)))
    return line
