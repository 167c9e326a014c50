"""Result folders as cells: one method on one task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.metrics import get_metric
from eval.report.bootstrap import Paired, pair
from eval.results import find

DENSE = "dense"
TOKEN_COLUMNS = ("attended", "resident", "moved", "metadata", "length")


@dataclass
class Cell:
    """Rows of one method on one task. `group` is suite and protocol, `method` the file's name."""

    group: str
    task: str
    method: str
    label: str
    budget: int | None
    metric: str
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    fidelity: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def scorer(self) -> Any:
        return get_metric(self.group.rpartition("-")[0], self.metric)

    @property
    def score(self) -> float | None:
        """The official score; None without answers."""
        if not self.answers:
            return None
        metric = self.scorer
        return float(
            metric.summarise([row["scores"] for row in self.answers.values()])[metric.main]
        )

    def main_scores(self) -> dict[str, float]:
        """The printed measure of every row, in percent."""
        main = self.scorer.main
        return {name: 100 * row["scores"][main] for name, row in self.answers.items()}

    def values(self, name: str) -> dict[str, float]:
        """`kl`, `top1` or `nll` of every row."""
        return {key: row[name] for key, row in self.fidelity.items()}

    def tokens(self) -> dict[str, float]:
        """Mean accounting over rows that had decode steps, and `device`: the device bytes of KV and
        metadata over those of dense KV."""
        rows = [r["tokens"] for r in (self.answers or self.fidelity).values() if r["tokens"]]
        if not rows:
            return {}
        found = {name: sum(r[name] for r in rows) / len(rows) for name in TOKEN_COLUMNS}
        device = sum(r["resident"] / r["length"] + r["metadata"] for r in rows) / len(rows)
        return found | {"device": device}

    @property
    def documents(self) -> dict[str, str]:
        rows = {**self.answers, **self.fidelity}
        return {name: row["document_id"] for name, row in rows.items()}


def collect(folders: Iterable[str | Path]) -> list[Cell]:
    """All cells of one or more result folders, sorted by group.

    Raises:
        ValueError: two folders hold the same method on the same task.
    """
    cells: dict[tuple[str, str, str], Cell] = {}
    for folder in folders:
        own: dict[tuple[str, str, str], Cell] = {}
        for group, task, file in find(folder):
            header, rows = file.header(), file.rows()
            if header is None or not rows:
                continue
            key = (group, task, file.method)
            if key in cells:
                raise ValueError(
                    f"{folder} has {file.method} on {task} again: report on one of them"
                )
            method = header["method"]
            cell = own.setdefault(
                key,
                Cell(
                    *key,
                    label=method["label"],
                    budget=None if file.method == DENSE else method["options"].get("budget"),
                    metric=header["rules"]["metric"],
                ),
            )
            setattr(cell, file.measure, rows)
        cells |= own
    return sorted(cells.values(), key=lambda cell: cell.group)


def methods_of(cells: Sequence[Cell]) -> list[str]:
    """Method names in table order: dense, then by label and budget."""
    order = sorted(cells, key=_table_order)
    return list(dict.fromkeys(cell.method for cell in order))


def _table_order(cell: Cell) -> tuple[bool, str, int, str]:
    return cell.method != DENSE, cell.label.casefold(), cell.budget or 0, cell.method


def pair_scores(cell: Cell, other: Cell) -> Paired:
    return pair(cell.main_scores(), other.main_scores(), cell.documents)


def pair_values(cell: Cell, other: Cell, name: str) -> Paired:
    return pair(cell.values(name), other.values(name), cell.documents)
