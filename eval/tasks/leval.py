"""L-Eval (arXiv 2307.11088): 20 tasks; a row of the data is a document with several questions.

Open-ended prompts are those of the benchmark's published Llama-2 predictions, with the length
instruction. Of the closed-ended ones the roles and the order are the benchmark's, the wording is
ours. Rows that only a judge can score (`evaluation` is `human` or `LLM`) are left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from eval.metrics.leval import KINDS
from eval.tasks.base import Example, Prompt, Request, Task, Truncate
from eval.tasks.files import load_rows

MAX_NEW_TOKENS = 512
RESERVE = 512  # the benchmark's max_length is the model's context less this
WORD_STEP = 250

LEAD = "Document is as follows. "
OPEN_SYSTEM = (
    "Now you are given a very long document. Please follow the instruction after this document. "
    "These instructions may include summarizing a document, answering questions based on the "
    "document, or writing a required paragraph."
)
CLOSED_SYSTEMS = {  # wording ours
    "gsm100": (
        "Below are questions with worked answers. Answer the last question in the same way and "
        'end with "The answer is _ .".'
    ),
    "topic_retrieval_longchat": (
        "Below is the record of an earlier conversation between you and a user about several "
        "topics. Remember the topics and their order."
    ),
    "coursera": (
        "Below is a very long document and a multiple-choice question about it. One or several "
        "options are correct: give the letters of all of them."
    ),
    "codeU": (
        "Below is a code base and a call. Work out what is printed when it runs, and end with "
        '"The final output is _ .".'
    ),
    "sci_fi": (
        "Below is a science-fiction story and a statement. Say True or False by the story alone, "
        "not by what you know of the real world."
    ),
}
CHOICE_SYSTEM = (
    "Below is a very long document and a question about it with four options. One option is "
    "correct: give its letter alone."
)
FACT_SYSTEM = "Say True or False by what you know of the real world."
SHORT = {  # the request for a bare answer, wording ours
    "coursera": "Give the letters alone, without an explanation.",
    "sci_fi": "Answer True or False, without an explanation.",
}


def build_prompt(task: str, document: str, instruction: str, reference: str) -> Prompt:
    """The prompt of one question."""
    if KINDS[task] != "exam":
        words = len(reference.split())
        question = f" Instruction: {instruction} \nAnswer this question with {words} words."
        return Prompt(document, question, LEAD, OPEN_SYSTEM)
    system = CLOSED_SYSTEMS.get(task, CHOICE_SYSTEM)
    if task in ("gsm100", "codeU", "topic_retrieval_longchat"):
        return Prompt(document, f"\n\n{instruction}", system=system)
    ask = SHORT.get(task, "Give the letter alone, without an explanation.")
    question = f" \nQuestion: {instruction}. {ask}"
    return Prompt(document, question, LEAD, system, cue="Answer:")


def cut_words(tokenizer: Any, document: str, limit: int, *, keep_end: bool = False) -> str:
    """L-Eval's truncation: whole words off the end (off the start with `keep_end`).

    While the document has more than `limit` tokens it becomes its first `limit - n` words, n rising
    by 250 from 0. Only the document counts, so the prompt can end a little above the limit.
    """
    words, count, dropped = document.split(" "), limit, 0
    while count and len(tokenizer(document, verbose=False).input_ids) > limit:
        # The benchmark would go on to a negative number of words: from there on we halve.
        count = limit - dropped if dropped < limit else count // 2
        document = " ".join(words[-count:] if keep_end else words[:count]) if count else ""
        dropped += WORD_STEP
    return document


def _truncate(task: str) -> Truncate:
    def truncate(prompt: Prompt, request: Request) -> Prompt:
        limit = request.context - RESERVE
        kept = cut_words(request.tokenizer, prompt.document, limit, keep_end=task == "codeU")
        return replace(prompt, document=kept)

    return truncate


def _load(task: str, request: Request) -> list[Example]:
    group = "Exam" if KINDS[task] == "exam" else "Generation"
    examples = []
    for number, row in enumerate(load_rows(request.source, "leval", task, group)):
        if row["evaluation"] not in ("f1", "rouge", "exam"):
            continue
        for index, (instruction, output) in enumerate(zip(row["instructions"], row["outputs"])):
            fact = None
            if task == "sci_fi":
                statement = instruction.rpartition("True or False?")[0] or instruction
                question = f"{statement}True or False? {SHORT[task]}"
                fact = Prompt("", question, system=FACT_SYSTEM, cue="Answer:")
            examples.append(
                Example(
                    id=f"{number}-{index}",
                    prompt=build_prompt(task, row["input"], instruction, output),
                    references=[output],
                    document_id=str(number),
                    fact=fact,
                )
            )
    return examples


TASKS = {
    name: Task("leval", name, name, MAX_NEW_TOKENS, partial(_load, name), _truncate(name))
    for name in KINDS
}
PAPER_TASKS = (  # FlexiCache's nine
    "financial_qa",
    "gov_report_summ",
    "legal_contract_qa",
    "meeting_summ",
    "news_summ",
    "paper_assistant",
    "patent_summ",
    "review_summ",
    "tv_show_summ",
)
