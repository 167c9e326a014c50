"""LongBench v1 (arXiv 2308.14508): 21 datasets, 13 of them also in the E variant (`<name>_e`).

Generation lengths, chat-template rule, truncation and stop rule are the benchmark's. The wording of
the prompts is ours (see `longbench_prompts`); give `--prompts` its own dataset2prompt.json for
scores comparable with published ones.
"""

from __future__ import annotations

from functools import partial

from eval.tasks.base import Example, Prompt, Request, Task, cut_middle, fill
from eval.tasks.files import load_rows
from eval.tasks.longbench_prompts import TEMPLATES

MAX_NEW_TOKENS = {
    "narrativeqa": 128,
    "qasper": 128,
    "multifieldqa_en": 64,
    "multifieldqa_zh": 64,
    "hotpotqa": 32,
    "2wikimqa": 32,
    "musique": 32,
    "dureader": 128,
    "gov_report": 512,
    "qmsum": 512,
    "multi_news": 512,
    "vcsum": 512,
    "trec": 64,
    "triviaqa": 32,
    "samsum": 128,
    "lsht": 64,
    "passage_count": 32,
    "passage_retrieval_en": 32,
    "passage_retrieval_zh": 32,
    "lcc": 64,
    "repobench-p": 64,
}
NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
ENGLISH_AND_CODE = tuple(name for name in MAX_NEW_TOKENS if name not in CHINESE)  # the paper's 16
WITH_E = tuple(n for n in ENGLISH_AND_CODE if n not in ("narrativeqa", "musique", "qmsum"))
RESERVE = 500  # the benchmark's max_length is the model's context less this


def build_prompt(template: str, context: str, question: str, *, chat: bool) -> Prompt:
    """The template's parts up to and after `{context}`."""
    before, _, after = template.partition("{context}")
    return Prompt(context, fill(after, input=question), lead=before, chat=chat)


def _load(name: str, dataset: str, request: Request) -> list[Example]:
    template = request.prompts.get(dataset, TEMPLATES[dataset])
    chat = dataset not in NO_CHAT
    return [
        Example(
            id=str(row.get("_id") or index),
            prompt=build_prompt(template, row["context"], row["input"], chat=chat),
            references=list(row["answers"]),
            document_id=str(row.get("_id") or index),
            classes=row.get("all_classes"),
            length=row.get("length"),
        )
        for index, row in enumerate(load_rows(request.source, "longbench", name))
    ]


def _task(name: str) -> Task:
    dataset = name.removesuffix("_e")
    return Task(
        suite="longbench",
        name=name,
        metric=dataset,
        max_new_tokens=MAX_NEW_TOKENS[dataset],
        load=partial(_load, name, dataset),
        truncate=cut_middle(RESERVE),
        min_new_tokens=int(dataset == "samsum"),
        stop_at_newline=dataset == "samsum",
    )


TASKS = {name: _task(name) for name in (*MAX_NEW_TOKENS, *(f"{name}_e" for name in WITH_E))}
