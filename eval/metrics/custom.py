"""Metrics for the user's own rows, chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from eval.metrics.base import RowMetric
from eval.metrics.similarity import edit_ratio, rouge_l_summary
from eval.metrics.text import normalise, qa_f1


def exact(prediction: str, reference: str) -> float:
    """Equal after `normalise`."""
    return float(normalise(prediction) == normalise(reference))


def contains(prediction: str, reference: str) -> float:
    """The reference is in the prediction, ignoring case."""
    return float(reference.lower() in prediction.lower())


METRICS: Mapping[str, Callable[[str, str], float]] = {
    "f1": qa_f1,
    "exact": exact,
    "contains": contains,
    "rouge_l": rouge_l_summary,
    "edit": edit_ratio,
}


class CustomMetric(RowMetric):
    """`f1`, `exact`, `contains`, `rouge_l` or `edit`; the best over the references."""

    tasks: ClassVar[Sequence[str]] = tuple(METRICS)
    description: ClassVar[str] = "one plain metric for the user's own rows"
    digits: ClassVar[int] = 2

    def row(
        self, prediction: str, references: Sequence[str], classes: Sequence[str] | None = None
    ) -> dict[str, float]:
        metric = METRICS[self.config_name]
        return {"score": max(metric(prediction, gold) for gold in references)}
