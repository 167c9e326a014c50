"""The report of one or more result folders: report.md, scores.csv, plots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from eval.report.collect import collect
from eval.report.plots import curves
from eval.report.tables import Group, csv_rows, overview, per_task, write_csv
from eval.results import find

NOTES = """\
Retention is the method's score over dense's on the same rows, averaged over tasks; KL, top-1 and
NLL are teacher-forced on dense's own continuation. Intervals are 95 %, from a paired bootstrap over
documents. Tokens are per KV head (attended: per query head) and decode step; device bytes are KV
and metadata over dense KV. A budget means what each method makes of it: compare at equal attended.
"""


def write_report(
    folders: Sequence[str | Path], out: str | Path | None = None, resamples: int = 2000
) -> Path:
    """Writes the report and returns the path of report.md.

    Raises:
        FileNotFoundError: a folder holds no results.
    """
    target = Path(out) if out else Path(folders[0]) / "report"
    target.mkdir(parents=True, exist_ok=True)
    parts, rows = ["# Accuracy against dense\n", _provenance(folders), NOTES], []
    for name, cells in groupby(collect(folders), key=lambda cell: cell.group):
        group = Group(name, list(cells), resamples)
        parts += [f"## {name}\n", overview(group)]
        if any(cell.answers for cell in group.cells.values()):
            parts += ["### Scores\n", per_task(group, "score")]
            parts += ["### Retention\n", per_task(group, "retention")]
        if any(cell.fidelity for cell in group.cells.values()):
            parts += ["### KL to dense\n", per_task(group, "kl")]
        parts += [f"![{path.stem}]({path.name})\n" for path in curves(group, target)]
        rows += csv_rows(group)
    write_csv(rows, target / "scores.csv")
    path = target / "report.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _provenance(folders: Sequence[str | Path]) -> str:
    """Models, versions and commits behind the rows."""
    headers = [file.header() for folder in folders for _, _, file in find(folder)]
    known = [header for header in headers if header]

    def distinct(values: list[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value)) or "unknown"

    model = distinct([f"{h['model']['name']} ({h['model']['dtype']})" for h in known])
    commits = distinct(
        [g["commit"][:12] + " with changes" * g["dirty"] for h in known if (g := h["git"])]
    )
    packages = ("transformers", "torch", "rouge", "rouge_score", "fuzzywuzzy")
    versions = ", ".join(
        f"{name} {distinct([h['versions'].get(name) for h in known])}" for name in packages
    )
    context = distinct([h["rules"]["context"] for h in known])
    return f"Model {model}; context {context} tokens; commit {commits}; {versions}.\n"
