"""Two runs, or two methods, on the rows that both have."""

from __future__ import annotations

from pathlib import Path

from eval.report.bootstrap import difference
from eval.report.collect import Cell, collect, pair_scores, pair_values
from eval.report.tables import interval, markdown, number


def compare(first: str, second: str, resamples: int = 2000) -> str:
    """A table of differences (second - first) with paired intervals.

    Each side is a result folder, or `folder:method@budget`. Whole folders are compared method by
    method; a method on both sides is compared with the other, whatever they are called.

    Raises:
        ValueError: nothing in common.
    """
    left, right = _side(first), _side(second)
    named = ":" in (first.replace(str(_folder(first)), "", 1))
    rows = []
    for cell in left:
        for other in right:
            same = (cell.group, cell.task) == (other.group, other.task)
            if same and (named or cell.method == other.method):
                rows.append(_row(cell, other, resamples))
    if not rows:
        raise ValueError(f"{first} and {second} have no task and method in common")
    head = ["task", "first", "second", "rows", "score", "score", "difference", "KL", "KL"]
    return markdown([*head, "difference"], rows)


def _folder(spec: str) -> Path:
    """The folder of a spec: all of it if that exists, else what comes before the last colon."""
    folder = spec.rpartition(":")[0]
    return Path(folder) if folder and not Path(spec).is_dir() else Path(spec)


def _side(spec: str) -> list[Cell]:
    folder = _folder(spec)
    if not folder.is_dir():
        raise FileNotFoundError(f"{spec} is neither a result folder nor folder:method")
    method = spec[len(str(folder)) + 1 :] if str(folder) != spec else ""
    cells = collect([folder])
    found = [cell for cell in cells if method in ("", cell.method)]
    if not found:
        known = ", ".join(dict.fromkeys(cell.method for cell in cells))
        raise ValueError(f"no method {method!r} in {folder}; it holds {known}")
    return found


def _row(cell: Cell, other: Cell, resamples: int) -> list[str]:
    scores, kl = pair_scores(other, cell), pair_values(other, cell, "kl")
    return [
        f"{cell.group} {cell.task}",
        cell.method,
        other.method,
        str(scores.rows or kl.rows),
        number(cell.score),
        number(other.score),
        interval(difference([scores] if scores.rows else [], resamples), 2),
        number(_mean(cell), 4),
        number(_mean(other), 4),
        interval(difference([kl] if kl.rows else [], resamples), 4),
    ]


def _mean(cell: Cell) -> float | None:
    values = cell.values("kl")
    return sum(values.values()) / len(values) if values else None
