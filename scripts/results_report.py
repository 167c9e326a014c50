"""Tables and plots of docs/results, from the folders that `scripts/results.py run` filled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from compare_fidelity import LONG, MASK_FORM, Rows, ablations, flat, load, paired, plot, show
from compare_fidelity import targets as against_all

from eval.methods import METHODS
from eval.report import write_report
from eval.report.bootstrap import Estimate
from eval.report.collect import collect
from eval.report.tables import Group, interval, markdown, number, write_csv
from eval.results import find

PAPER = f"{MASK_FORM} (paper)"
RESAMPLES = 2000
MARK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
Row = dict[str, Any]


def write(results: Path, out: Path) -> Path:
    """Writes reports, CSV files and plots, and fills the marked places of `out`/README.md, which is
    returned. Of results without the main table, a later run of other parts, only those are filled.

    Raises:
        FileNotFoundError: `results` is empty, or `out` has no README.md.
    """
    readme = out / "README.md"
    text = readme.read_text(encoding="utf-8")
    out.mkdir(parents=True, exist_ok=True)
    folders = [f for f in ("main", "long", "answers") if any((results / f).glob("*/*/*.jsonl"))]
    if not folders:
        raise FileNotFoundError(f"no results in {results}: expected a folder that `run` wrote")
    for name in folders:
        write_report([results / name], out / name, RESAMPLES)
    parts: dict[str, str] = {}
    if whole := "main" in folders:
        every = load([results / "main"])
        judged = verdicts(every)
        write_csv(flat(judged), out / "targets.csv")
        parts |= {"settings": settings(results), "targets": show_verdicts(judged)}
        for name, tasks in (("methods", None), ("longtasks", LONG)):
            table = against_all(every, MASK_FORM, tasks)
            write_csv(flat(table), out / f"{name}.csv")
            parts[name] = show(table)
    if "long" in folders:
        table = against_all(load([results / "long"]), MASK_FORM, None)
        write_csv(flat(table), out / "long.csv")
        parts["long"] = show(table)
    if whole and any((results / "ablations").glob("*/*/*.jsonl")):
        # On the rows that both have: the main table is also of LongBench.
        table = ablations(load([results / "main", results / "ablations"]), None)
        write_csv(flat(table), out / "ablations.csv")
        plot(table, out / "ablations.png")
        parts["ablations"] = show(table)
    if "answers" in folders:
        parts["answers"] = answers(results / "answers")

    def fill(place: re.Match[str]) -> str:
        begin, name, end = place.groups()
        if name not in parts and not whole:
            return place[0]
        return f"{begin}{parts.get(name, 'not run' + chr(10))}{end}"

    filled = MARK.sub(fill, text)
    readme.write_text(filled, encoding="utf-8")
    return readme


def settings(results: Path) -> str:
    """What the rows were made with, and what FlexiCache's defaults were at the time."""
    headers = [
        header
        for folder in ("main", "long", "ablations", "answers")
        if any((results / folder).glob("*/*/*.jsonl"))
        for *_, file in find(results / folder)
        if (header := file.header())
    ]
    model = {f"{h['model']['name']}, {h['model']['dtype']}" for h in headers}
    commits = {
        h["git"]["commit"][:12] + " with changes" * h["git"]["dirty"] for h in headers if h["git"]
    }
    versions = {f"{n} {h['versions'][n]}" for h in headers for n in ("torch", "transformers")}
    started = sorted(h["started"] for h in headers)
    lines = [
        f"- Model: {', '.join(sorted(model))}; {', '.join(sorted(versions))}; commit "
        f"{', '.join(sorted(commits))}; {started[0]} to {started[-1]}."
    ]
    for label, title in ((MASK_FORM, "package defaults"), (PAPER, "paper preset")):
        found = {
            ", ".join(f"{k}={v}" for k, v in h["method"]["resolved"].items() if k != "token_budget")
            for h in headers
            if h["method"]["label"] == label
        }
        lines += [f"- FlexiCache, {title} of this run: `{text}`" for text in sorted(found)]
    return "\n".join(lines) + "\n"


def verdicts(every: list[Rows]) -> list[Row]:
    """FlexiCache's package defaults against the project's targets, at each budget."""
    at = {(rows.label, rows.budget): rows for rows in every}
    table: list[Row] = []

    def judge(
        target: str,
        rows: Rows,
        label: str | None,
        name: str,
        combine: Callable[[Any, Any], Any],
        least: float | None,
        most: float | None,
        tasks: Sequence[str] | None = None,
    ) -> None:
        other = at.get((label, rows.budget)) if label else None
        if other is None:
            return
        ours, theirs = rows.on(tasks), other.on(tasks)
        estimate, count = paired(ours, theirs, name, combine)
        if not count:
            return
        shared = [key for key in ours.rows if key in theirs.rows]
        table.append(
            {
                "target": target,
                "budget": rows.budget,
                "documents": count,
                "value": estimate,
                "attended": _attended(ours, shared),
                "its attended": _attended(theirs, shared),
                "holds": _holds(estimate, least, most),
            }
        )

    def labels(name: str) -> list[str]:
        title = METHODS[name].title
        found = (label for label, _ in at if label == title or label.startswith(f"{title} ("))
        return list(dict.fromkeys(found))

    defaults = [rows for rows in every if rows.label == MASK_FORM]
    for rows in defaults:
        oracle = METHODS["oracle"].title
        judge("top-1 over the oracle's >= 0.97", rows, oracle, "top1", np.divide, 0.97, None)
    for rows in defaults:
        for label in labels("quest"):
            judge(f"top-1 less {label}'s >= -0.01", rows, label, "top1", np.subtract, -0.01, None)
    for method in ("lserve", "snapkv", "h2o", "streamingllm"):
        for label in labels(method):
            for rows in defaults:
                target = f"long answers: KL less {label}'s < 0"
                judge(target, rows, label, "kl", np.subtract, None, 0.0, LONG)
    for rows in defaults:
        judge("KL over the paper preset's <= 0.6", rows, PAPER, "kl", np.divide, None, 0.6)
    return table


def _attended(rows: Rows, keys: Sequence[tuple[str, str, str]]) -> float:
    return float(np.mean([rows.rows[key]["tokens"]["attended"] for key in keys]))


def _holds(estimate: Estimate, least: float | None, most: float | None) -> str:
    """Whether the value meets its bound, and whether the whole interval does."""

    def meets(value: float) -> bool:
        return (least is None or value >= least) and (most is None or value <= most)

    if not meets(estimate.value):
        return "no" if meets(estimate.low) or meets(estimate.high) else "no, clearly"
    whole = meets(estimate.low) and meets(estimate.high) and not math.isnan(estimate.low)
    return "yes, clearly" if whole else "yes"


def show_verdicts(table: list[Row]) -> str:
    head = ["target", "budget", "documents", "value", "attended / its", "holds"]
    rows = []
    for row in table:
        attended = f"{number(row['attended'], 0)} / {number(row['its attended'], 0)}"
        cells = [row["target"], str(row["budget"]), str(row["documents"])]
        rows.append([*cells, interval(row["value"], 3), attended, row["holds"]])
    return markdown(head, rows)


def answers(folder: Path) -> str:
    """Scores of generated answers, one table for each suite and protocol."""
    cells = collect([folder])
    parts = []
    for name in dict.fromkeys(cell.group for cell in cells):
        group = Group(name, [cell for cell in cells if cell.group == name], RESAMPLES)
        head = ["method", "budget", "rows", *group.tasks, "mean", "over dense's"]
        head += ["attended", "resident", "moved", "metadata", "device"]
        rows = []
        for method in group.methods:
            found = {cell.task: cell for cell in group.of(method)}
            first, tokens = next(iter(found.values())), group.tokens(method)
            scores = [found[t].score if t in found else None for t in group.tasks]
            known = [score for score in scores if score is not None]
            row = [first.label, str(first.budget or "–")]
            row += [str(sum(len(cell.answers) for cell in found.values()))]
            row += [number(score) for score in [*scores, sum(known) / len(known)]]
            row += [interval(group.retention(method))]
            row += [number(tokens.get(name), 0) for name in ("attended", "resident")]
            row += [number(tokens.get("moved"), 1)]
            row += [f"{number(100 * tokens.get(n, math.nan), 1)} %" for n in ("metadata", "device")]
            rows.append(row)
        parts.append(markdown(head, rows))
    return "\n".join(parts)
