"""Markdown and CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.report.bootstrap import Estimate, average, difference, retention
from eval.report.collect import DENSE, Cell, methods_of, pair_scores, pair_values


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; all columns but the first are right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    """Fixed digits; a dash for what is undefined."""
    if value is None or math.isnan(value):
        return "–"
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no negative zero


def interval(estimate: Estimate, digits: int = 3) -> str:
    """`value [low, high]`; the value alone without an interval."""
    if math.isnan(estimate.low):
        return number(estimate.value, digits)
    low, high = number(estimate.low, digits), number(estimate.high, digits)
    return f"{number(estimate.value, digits)} [{low}, {high}]"


class Group:
    """The cells of one suite and protocol, by method and task."""

    def __init__(self, name: str, cells: Sequence[Cell], resamples: int) -> None:
        self.name = name
        self.cells = {(cell.method, cell.task): cell for cell in cells}
        self.methods = methods_of(cells)
        self.tasks = list(dict.fromkeys(cell.task for cell in cells))
        self.resamples = resamples

    def of(self, method: str) -> list[Cell]:
        return [self.cells[method, t] for t in self.tasks if (method, t) in self.cells]

    def with_dense(self, method: str, measure: str) -> list[tuple[Cell, Cell]]:
        """The method's cells and dense's, on tasks for which both have `measure`."""
        pairs = [(c, self.cells.get((DENSE, c.task))) for c in self.of(method)]
        return [(c, d) for c, d in pairs if d and getattr(c, measure) and getattr(d, measure)]

    def retention(self, method: str, task: str | None = None) -> Estimate:
        pairs = [
            pair_scores(cell, dense)
            for cell, dense in self.with_dense(method, "answers")
            if task in (None, cell.task)
        ]
        return retention(pairs, self.resamples)

    def mean_of(self, method: str, name: str, task: str | None = None) -> Estimate:
        """`kl` or `top1` over the tasks; needs no dense rows."""
        cells = [c for c in self.of(method) if c.fidelity and task in (None, c.task)]
        return average([pair_values(cell, cell, name) for cell in cells], self.resamples)

    def added_nll(self, method: str) -> Estimate:
        pairs = [pair_values(c, d, "nll") for c, d in self.with_dense(method, "fidelity")]
        return difference(pairs, self.resamples)

    def tokens(self, method: str) -> dict[str, float]:
        """Accounting averaged over tasks."""
        found = [tokens for cell in self.of(method) if (tokens := cell.tokens())]
        names = found[0] if found else {}
        return {name: sum(tokens[name] for tokens in found) / len(found) for name in names}


def overview(group: Group) -> str:
    """One row a method: scores, retention, tokens and bytes, fidelity."""
    head = ["method", "budget", "rows", "mean score", "retention", "attended", "resident"]
    head += ["moved/step", "metadata", "device bytes", "KL to dense", "top-1", "NLL - dense"]
    rows = []
    for method in group.methods:
        cells, tokens = group.of(method), group.tokens(method)
        scores = [cell.score for cell in cells if cell.score is not None]
        count = sum(len(cell.answers or cell.fidelity) for cell in cells)
        row = [cells[0].label, str(cells[0].budget or "–"), str(count)]
        row += [number(sum(scores) / len(scores) if scores else None)]
        row += [interval(group.retention(method))]
        row += [number(tokens.get(name), 0) for name in ("attended", "resident")]
        row += [number(tokens.get("moved"), 1)]
        row += [_percent(tokens.get(name)) for name in ("metadata", "device")]
        row += [interval(group.mean_of(method, "kl"), 4)]
        row += [interval(group.mean_of(method, "top1"))]
        row += [number(group.added_nll(method).value, 4)]
        rows.append(row)
    return markdown(head, rows)


def per_task(group: Group, what: str) -> str:
    """One row a method, one column a task; `what` is `score`, `retention` or `kl`."""
    rows = []
    for method in group.methods:
        cells = {cell.task: cell for cell in group.of(method)}
        first = next(iter(cells.values()))
        row = [first.label, str(first.budget or "–")]
        for task in group.tasks:
            if task not in cells:
                row.append("–")
            elif what == "score":
                row.append(number(cells[task].score))
            elif what == "retention":
                row.append(interval(group.retention(method, task)))
            else:
                row.append(interval(group.mean_of(method, "kl", task), 4))
        rows.append(row)
    return markdown(["method", "budget", *group.tasks], rows)


def csv_rows(group: Group) -> list[dict[str, Any]]:
    """One row for every method and task, all that the tables hold."""
    found = []
    for method in group.methods:
        for cell in group.of(method):
            kept = group.retention(method, cell.task)
            kl, top1 = (group.mean_of(method, name, cell.task) for name in ("kl", "top1"))
            dense = group.cells.get((DENSE, cell.task))
            found.append(
                {
                    "group": group.name,
                    "task": cell.task,
                    "method": method,
                    "label": cell.label,
                    "budget": cell.budget,
                    "rows": len(cell.answers) or len(cell.fidelity),
                    "score": cell.score,
                    "dense_score": dense.score if dense else None,
                    **_columns("retention", kept),
                    **_columns("kl", kl),
                    **_columns("top1", top1),
                    **cell.tokens(),
                }
            )
    return found


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _columns(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
