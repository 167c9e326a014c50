"""Paired bootstrap over documents: questions about one document are not independent rows.

Documents are drawn within their task, so a task with one document allows no interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVELS = (2.5, 97.5)  # a 95 % interval
Array = NDArray[np.float64]


class Estimate(NamedTuple):
    """A value with its interval; NaN where undefined."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """Sums of two measures over the rows of each document, rows that both have: `[D]` each."""

    first: Array
    second: Array
    count: Array

    @property
    def rows(self) -> int:
        return int(self.count.sum())


def pair(
    first: Mapping[str, float], second: Mapping[str, float], documents: Mapping[str, str]
) -> Paired:
    """Rows by id, joined; `documents` gives each row's document."""
    shared = [row for row in first if row in second]
    names = {name: index for index, name in enumerate(dict.fromkeys(documents[r] for r in shared))}
    sums = np.zeros((3, len(names)))
    for row in shared:
        sums[:, names[documents[row]]] += first[row], second[row], 1
    return Paired(*sums)


def resample(pairs: Sequence[Paired], resamples: int, seed: int = 0) -> tuple[Array, Array]:
    """Means of both measures, `[tasks, resamples + 1]` each; column 0 is of the data itself."""
    rng = np.random.default_rng(seed)
    firsts, seconds = [], []
    for paired in pairs:
        size = len(paired.count)
        drawn = (
            rng.integers(size, size=(resamples, size)) if size else np.zeros((resamples, 0), int)
        )
        index = np.concatenate([np.arange(size)[None], drawn])
        with np.errstate(invalid="ignore"):
            count = paired.count[index].sum(1)
            firsts.append(paired.first[index].sum(1) / count)
            seconds.append(paired.second[index].sum(1) / count)
    return np.array(firsts), np.array(seconds)


def retention(pairs: Sequence[Paired], resamples: int) -> Estimate:
    """Mean over tasks of first / second; tasks on which the second scores 0 are left out."""
    first, second = resample(pairs, resamples)
    defined = second[:, 0] > 0 if len(pairs) else np.zeros(0, bool)
    if not defined.any():
        return Estimate(np.nan, np.nan, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(second > 0, first / second, 0.0)[defined]
        # A resample in which the second scores 0 on a task leaves that task out.
        kept = [paired for paired, counts in zip(pairs, defined) if counts]
        return _estimate(ratios.sum(0) / (second[defined] > 0).sum(0), kept)


def difference(pairs: Sequence[Paired], resamples: int) -> Estimate:
    """Mean over tasks of first - second."""
    if not pairs:
        return Estimate(np.nan, np.nan, np.nan)
    first, second = resample(pairs, resamples)
    return _estimate((first - second).mean(0), pairs)


def average(pairs: Sequence[Paired], resamples: int) -> Estimate:
    """Mean over tasks of the first measure."""
    if not pairs:
        return Estimate(np.nan, np.nan, np.nan)
    return _estimate(resample(pairs, resamples)[0].mean(0), pairs)


def _estimate(values: Array, pairs: Sequence[Paired]) -> Estimate:
    several = len(values) > 1 and min(len(paired.count) for paired in pairs) > 1
    low, high = np.nanpercentile(values[1:], LEVELS) if several else (np.nan, np.nan)
    return Estimate(float(values[0]), float(low), float(high))
