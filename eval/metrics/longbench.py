"""LongBench v1 metrics (arXiv 2308.14508): one per dataset, best over the references."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from eval.metrics.base import RowMetric
from eval.metrics.similarity import edit_ratio, rouge_l_summary, words_zh
from eval.metrics.text import normalise_zh, qa_f1, token_f1


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Token F1 over jieba words without punctuation."""
    bags = [
        [word for word in map(normalise_zh, words_zh(text)) if word]
        for text in (prediction, reference)
    ]
    return token_f1(*bags)


def rouge_zh(prediction: str, reference: str) -> float:
    """ROUGE-L over jieba words."""
    return rouge_l_summary(" ".join(words_zh(prediction)), " ".join(words_zh(reference)))


def share_of_numbers(prediction: str, gold: str) -> float:
    """Share of the integers in `prediction` that are `gold`; 0 without any."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def _first_number(pattern: str) -> Callable[[str, str], float]:
    def score(prediction: str, reference: str) -> float:
        return share_of_numbers(prediction, re.findall(pattern, reference)[0])

    return score


def code_similarity(prediction: str, reference: str) -> float:
    """Edit similarity of the first line that is neither fence nor comment."""
    lines = prediction.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return edit_ratio(next(code, ""), reference)


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (number of class names in `prediction`) if the right one is among them.

    The official code removes names that are part of the right one from the list it iterates over,
    so the name after a removed one is never looked at; scores depend on it.
    """
    found = [name for name in classes if name in prediction]
    position = 0
    while position < len(found):
        if found[position] in reference and found[position] != reference:
            found.remove(found[position])
        position += 1
    return 1 / len(found) if reference in found else 0.0


Pairwise = Callable[[str, str], float]
_ENGLISH_QA = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique")
METRICS: Mapping[str, Pairwise | None] = {  # None: needs the classes
    **dict.fromkeys(_ENGLISH_QA, qa_f1),
    "multifieldqa_zh": qa_f1_zh,
    "dureader": rouge_zh,
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), rouge_l_summary),
    "vcsum": rouge_zh,
    "trec": None,
    "triviaqa": qa_f1,
    "samsum": rouge_l_summary,
    "lsht": None,
    "passage_count": share_of_numbers,
    "passage_retrieval_en": _first_number(r"Paragraph (\d+)"),
    "passage_retrieval_zh": _first_number(r"段落(\d+)"),
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}
FIRST_LINE_ONLY = ("trec", "triviaqa", "samsum", "lsht")
BUCKETS = ("0-4k", "4-8k", "8k+")


def bucket(length: int) -> str:
    """LongBench-E's length bucket of a row with this `length` field."""
    return BUCKETS[0 if length < 4000 else 1 if length < 8000 else 2]


class LongBenchMetric(RowMetric):
    """Score of one LongBench dataset: `round(100 * mean, 2)`."""

    tasks: ClassVar[Sequence[str]] = tuple(METRICS)
    description: ClassVar[str] = "LongBench v1 (arXiv 2308.14508)"
    digits: ClassVar[int] = 2

    def row(
        self, prediction: str, references: Sequence[str], classes: Sequence[str] | None = None
    ) -> dict[str, float]:
        if self.config_name in FIRST_LINE_ONLY:
            prediction = prediction.lstrip("\n").split("\n")[0]
        pairwise = METRICS[self.config_name]
        if pairwise is None:
            if not classes:
                raise ValueError(
                    f"{self.config_name} needs `classes`: give the row's all_classes field"
                )
            scores = [classification(prediction, gold, classes) for gold in references]
        else:
            scores = [pairwise(prediction, gold) for gold in references]
        return {"score": max([0.0, *scores])}
