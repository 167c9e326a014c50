"""`evaluate.Metric` as used here: a score per row, and a summary of the rows.

The classes are instantiated directly. `evaluate.load` would look their script up on the Hub.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import datasets
import evaluate

Rows = list[dict[str, float]]


class RowMetric(evaluate.Metric):
    """One task's metric; `config_name` is the task.

    `compute(predictions=[...], references=[[...], ...])` returns the scores in percent, rounded as
    the benchmark prints them. `rows` gives the unrounded fractions per row, for paired statistics.
    """

    tasks: ClassVar[Sequence[str]]
    description: ClassVar[str]
    digits: ClassVar[int]

    def __init__(self, config_name: str, **kwargs: Any) -> None:
        if config_name not in self.tasks:
            known = ", ".join(self.tasks)
            raise ValueError(f"no task {config_name!r} in {type(self).__name__}; known: {known}")
        if kwargs.get("num_process", 1) == 1:
            kwargs.setdefault("keep_in_memory", True)
        super().__init__(config_name=config_name, **kwargs)

    @property
    def main(self) -> str:
        """Key of the score that tables print."""
        return "score"

    @abstractmethod
    def row(
        self, prediction: str, references: Sequence[str], classes: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Scores of one prediction, as fractions; the best over `references`."""

    def rows(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        classes: Sequence[Sequence[str] | None] | None = None,
    ) -> Rows:
        """One dict of fractions per row. `classes`: the label set of each row, where it has one."""
        labels = classes or [None] * len(predictions)
        return [self.row(*row) for row in zip(predictions, references, labels, strict=True)]

    def summarise(self, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Mean of every key in percent, rounded to `digits`.

        Raises:
            ValueError: there are no rows.
        """
        if not rows:
            raise ValueError(f"no rows to score for {self.config_name}")
        means = {key: 100 * sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        return {key: round(value, self.digits) for key, value in self.derive(means).items()}

    def derive(self, means: dict[str, float]) -> dict[str, float]:
        """Adds what is computed from the means rather than from rows."""
        return means

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        features = {"predictions": text, "references": datasets.Sequence(text)}
        return evaluate.MetricInfo(
            description=self.description,
            citation="",
            inputs_description="predictions: texts; references: a list of texts for each row",
            features=datasets.Features(features),
        )

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        classes: Sequence[Sequence[str] | None] | None = None,
    ) -> dict[str, float]:
        return self.summarise(self.rows(predictions, references, classes))
