"""RULER's recall (arXiv 2404.06654) and the needle tasks: substring match, ignoring case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from eval.metrics.base import RowMetric

ALL = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
)
ANY = ("qa_1", "qa_2", "passkey", "needle")


def clean(prediction: str) -> str:
    """Stripped, with control characters as line breaks."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


class RulerMetric(RowMetric):
    """Share of the references found in the prediction; any one of them for qa and needle tasks."""

    tasks: ClassVar[Sequence[str]] = (*ALL, *ANY)
    description: ClassVar[str] = "RULER (arXiv 2404.06654)"
    digits: ClassVar[int] = 2

    def row(
        self, prediction: str, references: Sequence[str], classes: Sequence[str] | None = None
    ) -> dict[str, float]:
        text = clean(prediction).lower()
        found = [reference.lower() in text for reference in references]
        if self.config_name in ANY:
            return {"score": float(any(found))}
        return {"score": sum(found) / len(found)}
