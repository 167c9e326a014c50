"""Metrics of the benchmarks, on the libraries their authors used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eval.metrics.base import RowMetric

__all__ = ["get_metric"]


def get_metric(suite: str, task: str) -> RowMetric:
    """The official metric of `task` in `suite` (`longbench`, `leval`, `ruler`), or, for the suite
    `custom`, the metric called `task`.

    Raises:
        ValueError: unknown suite or task; the message lists the known ones.
    """
    from eval.metrics.custom import CustomMetric
    from eval.metrics.leval import LEvalMetric
    from eval.metrics.longbench import LongBenchMetric
    from eval.metrics.ruler import RulerMetric

    suites = {
        "custom": CustomMetric,
        "leval": LEvalMetric,
        "longbench": LongBenchMetric,
        "ruler": RulerMetric,
    }
    if suite not in suites:
        raise ValueError(f"suite is {suite!r}, expected one of {', '.join(suites)}")
    return suites[suite](task)
