"""Score predictions that already exist; no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.metrics import get_metric
from eval.metrics.base import RowMetric, Rows
from eval.predictions import Prediction, read_predictions


@dataclass(frozen=True)
class Score:
    """Scores of one task, in percent. `buckets` is filled for LongBench-E (`<task>_e`)."""

    suite: str
    task: str
    n: int
    main: str
    scores: dict[str, float]
    buckets: dict[str, float] | None = None

    @property
    def score(self) -> float:
        """The one that tables print."""
        return self.scores[self.main]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "score": self.score}


def task_metric(suite: str, task: str) -> RowMetric:
    """The metric of a task; LongBench-E tasks (`<task>_e`) have that of their base task."""
    return get_metric(suite, task.removesuffix("_e") if suite == "longbench" else task)


def row_scores(metric: RowMetric, predictions: Sequence[Prediction]) -> Rows:
    """Unrounded fractions per row."""
    return metric.rows(
        [row.prediction for row in predictions],
        [row.references for row in predictions],
        [row.classes for row in predictions],
    )


def score_predictions(suite: str, task: str, predictions: Sequence[Prediction]) -> Score:
    """The official score of `predictions`.

    Raises:
        ValueError: no rows, an unknown task, or a LongBench-E row without its length.
    """
    metric = task_metric(suite, task)
    rows = row_scores(metric, predictions)
    buckets = None
    if suite == "longbench" and task.endswith("_e"):
        buckets = _buckets(metric, predictions, rows)
    return Score(suite, task, len(rows), metric.main, metric.summarise(rows), buckets)


def score_file(suite: str, task: str, path: str | Path) -> Score:
    """`score_predictions` of a file in any format of `eval.predictions`."""
    return score_predictions(suite, task, read_predictions(path))


def _buckets(metric: RowMetric, predictions: Sequence[Prediction], rows: Rows) -> dict[str, float]:
    from eval.metrics.longbench import BUCKETS, bucket

    grouped: dict[str, Rows] = {name: [] for name in BUCKETS}
    for prediction, row in zip(predictions, rows):
        if prediction.length is None:
            raise ValueError(f"row {prediction.id} has no length, which LongBench-E needs")
        grouped[bucket(prediction.length)].append(row)
    return {name: metric.summarise(rows)["score"] for name, rows in grouped.items() if rows}
