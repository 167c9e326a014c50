"""RULER's qa tasks: a real question, its documents, and others of the same data set around them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from eval.tasks.base import Example, Prompt, Request
from eval.tasks.haystack import Sample, fit

NEW_TOKENS = 32


class Item(NamedTuple):
    question: str
    answers: list[str]
    gold: list[str]  # documents


def question_answering(file: str, request: Request) -> list[Example]:
    """Examples from SQuAD's (`squad.json`, v2 dev) or HotpotQA's (`hotpotqa.json`, dev distractor)
    own file in `request.source`.

    Raises:
        FileNotFoundError: it is not there. RULER's package ships both.
    """
    path = Path(request.source or "") / file
    if request.source is None or not path.is_file():
        raise FileNotFoundError(
            f"no {file} in {request.source or 'the data folder'}: point --data at a folder with it"
        )
    items = list((_squad if "squad" in file else _hotpot)(json.loads(path.read_text("utf-8"))))
    pool = list(dict.fromkeys(document for item in items for document in item.gold))
    examples = []
    for index, item in enumerate(items[: request.samples]):
        others = [document for document in pool if document not in item.gold]
        sample = fit(partial(_build, item, others), request, NEW_TOKENS, index)
        examples.append(Example(str(index), sample.prompt, sample.references, str(index)))
    return examples


def _build(item: Item, others: list[str], rng: random.Random, units: int) -> Sample:
    if units > len(others):
        raise ValueError(f"{units} other documents wanted, but there are {len(others)}")
    documents = [*item.gold, *rng.sample(others, units)]
    rng.shuffle(documents)
    text = "\n\n".join(f"Document {number}:\n{d}" for number, d in enumerate(documents, 1))
    ask = "Answer the question from the documents, with the answer alone."
    question = f"\n\n{ask}\n\nQuestion: {item.question}"
    return Sample(Prompt(text, question, f"{ask}\n\n", cue="Answer:"), item.answers)


def _squad(data: dict[str, Any]) -> Iterator[Item]:
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible"):
                    answers = list(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                    yield Item(qa["question"], answers, [paragraph["context"]])


def _hotpot(data: list[dict[str, Any]]) -> Iterator[Item]:
    for row in data:
        documents = [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]]
        yield Item(row["question"], [row["answer"]], documents)
