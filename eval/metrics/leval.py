"""L-Eval metrics (arXiv 2307.11088): token F1, ROUGE and exam accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, ClassVar

from eval.metrics.base import RowMetric
from eval.metrics.exam import EXAMS
from eval.metrics.text import qa_f1

_F1 = (
    "financial_qa",
    "legal_contract_qa",
    "multidoc_qa",
    "narrative_qa",
    "natural_question",
    "scientific_qa",
)
_ROUGE = (
    "gov_report_summ",
    "meeting_summ",
    "news_summ",
    "paper_assistant",
    "patent_summ",
    "review_summ",
    "tv_show_summ",
)
KINDS: Mapping[str, str] = {
    **dict.fromkeys(_F1, "f1"),
    **dict.fromkeys(_ROUGE, "rouge"),
    **dict.fromkeys(EXAMS, "exam"),
}
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE_TYPES), use_stemmer=False)


class LEvalMetric(RowMetric):
    """Score of one L-Eval task, to four decimals as the benchmark prints it.

    `rouge` tasks give rouge1, rouge2, rougeL and their geometric mean `geo`, which is the
    benchmark's LEval_score; its leaderboard and most papers print rougeL, and so do our tables.
    rougeLsum is left out: it would need an NLTK sentence splitter and is never printed.
    """

    tasks: ClassVar[Sequence[str]] = tuple(KINDS)
    description: ClassVar[str] = "L-Eval (arXiv 2307.11088)"
    digits: ClassVar[int] = 4

    @property
    def kind(self) -> str:
        """`f1`, `rouge` or `exam`, as in the `evaluation` field of the data."""
        return KINDS[self.config_name]

    @property
    def main(self) -> str:
        return {"f1": "f1", "rouge": "rougeL", "exam": "exam"}[self.kind]

    def row(
        self, prediction: str, references: Sequence[str], classes: Sequence[str] | None = None
    ) -> dict[str, float]:
        if self.kind == "f1":
            return {"f1": max(qa_f1(prediction, gold) for gold in references)}
        if self.kind == "exam":
            exam = EXAMS[self.config_name]
            return {"exam": max(exam(prediction, gold) for gold in references)}
        scores = [_scorer().score(gold, prediction) for gold in references]
        return {kind: max(score[kind].fmeasure for score in scores) for kind in ROUGE_TYPES}

    def derive(self, means: dict[str, float]) -> dict[str, float]:
        if self.kind == "rouge":
            # Of the printed values: with unrounded ones the fourth decimal can differ by one.
            printed = (round(means[kind], self.digits) for kind in ROUGE_TYPES)
            means["geo"] = prod(printed) ** (1 / 3)
        return means
