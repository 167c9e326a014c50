"""From a method's cache to result rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eval.decode import Stream, complete, complete_batch
from eval.encode import Encoded, encode
from eval.fidelity import DenseReference, compare
from eval.methods import Session
from eval.plan import Context
from eval.tasks import Example, Task

Row = dict[str, Any]
FACT_TOKENS = 64


def head(example: Example, coded: Encoded) -> Row:
    """What every row begins with."""
    return {
        "id": example.id,
        "document_id": example.document_id,
        "prompt_tokens": len(coded.ids),
    }


def fidelity(stream: Stream, reference: DenseReference) -> Row:
    """Means over the steps, and KL of every step."""
    found = compare(stream, reference)
    kl = [round(value, 6) + 0.0 for value in found.kl]  # no negative zeros
    return {**found.means(), "steps": reference.steps, "kl_steps": kl}


def answer(
    task: Task, example: Example, stream: Stream, logits: Tensor, session: Session, context: Context
) -> Row:
    """The greedy answer after `logits` `[V]`, in the form that `score` reads, with its scores as
    fractions."""
    limit = context.new_tokens(task)
    ids = complete(stream, logits, context.stop(task), limit, task.min_new_tokens)
    return _scored(task, example, ids, session, context)


def answer_batch(
    task: Task, rows: list[tuple[Encoded, Example]], session: Session, context: Context
) -> list[Row]:
    """Whole rows of several prompts in one cache, whose accounting they share (protocol A)."""
    cache = session.new_cache()
    answers = complete_batch(
        context.model,
        cache,
        [coded.ids for coded, _ in rows],
        context.stop(task),
        context.new_tokens(task),
        task.min_new_tokens,
    )
    shared = {"tokens": session.tokens(cache).mean(), "batch": len(rows)}
    return [
        {**head(example, coded), **_scored(task, example, ids, session, context), **shared}
        for (coded, example), ids in zip(rows, answers)
    ]


def _scored(
    task: Task, example: Example, ids: list[int], session: Session, context: Context
) -> Row:
    text = context.tokenizer.decode(ids, skip_special_tokens=True)
    if example.fact is not None:
        text += f" [fact: {_fact(task, example, session, context)}]"
    return {
        "prediction": text,
        "references": example.references,
        "classes": example.classes,
        "length": example.length,
        "new_tokens": len(ids),
        "scores": task.scorer().row(text, example.references, example.classes),
    }


def _fact(task: Task, example: Example, session: Session, context: Context) -> str:
    """L-Eval's second query, about the real world: a prompt of its own without the document."""
    assert example.fact is not None
    stream = Stream(context.model, session.new_cache())
    logits = stream.prefill(encode(example.fact, context.tokenizer).ids)
    ids = complete(stream, logits, context.stop(task), FACT_TOKENS)
    return str(context.tokenizer.decode(ids, skip_special_tokens=True)).strip()
