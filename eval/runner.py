"""Runs methods over tasks. Every row is written as soon as it is done, so a run can be resumed.

`accelerate launch --multi_gpu -m eval run ...` spreads the documents over processes, which write
files of their own. With `--device cpu` it does the same without a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eval import models
from eval.decode import Stream, complete, complete_batch
from eval.encode import Encoded, encode
from eval.fidelity import DenseReference, compare, dense_reference
from eval.methods import Session
from eval.methods.base import MaskSession
from eval.plan import Context, Unit, plan
from eval.settings import Settings
from eval.tasks import Example, Task

Row = dict[str, Any]
FACT_TOKENS = 64


def run(settings: Settings) -> int:
    """Does what is not done yet of `settings`; returns the exit status."""
    from accelerate import PartialState

    methods = settings.build_methods()
    state = PartialState(cpu=settings.device == "cpu" or not torch.accelerator.is_available())
    device = settings.device or str(state.device)
    model, tokenizer = models.load(settings.model, settings.dtype, device)
    context = Context(settings, model, tokenizer, state.process_index, state.num_processes)
    units = plan(context, methods)
    state.wait_for_everyone()  # all have read what is done before anyone writes
    mine = [unit.share(context.rank, context.world) for unit in units]
    total = sum(unit.rows for unit in mine)
    with tqdm(total=total, unit="row", disable=context.rank > 0, mininterval=1) as progress:
        for _, group in groupby(mine, key=lambda unit: unit.method):
            run_method([unit for unit in group if unit.examples], context, progress)
    state.wait_for_everyone()
    if context.rank == 0:
        print(f"{sum(unit.rows for unit in units)} rows done; results in {settings.out}")
    return 0


def run_method(units: Sequence[Unit], context: Context, progress: Any) -> None:
    """The rows of one method; `progress` is told of each."""
    if not units:
        return
    for unit in units:
        for measure in unit.measures:
            measure.file.begin(measure.header, context.rank)
        if any(measure.name == "fidelity" for measure in unit.measures):
            progress.set_description(f"dense reference {unit.task.name}")
            for example in unit.examples:  # by the plain model, outside the method's session
                _reference(unit.task, context.encode(example), context)
    torch.manual_seed(context.settings.seed)
    with units[0].method.session(context.model) as session:
        for unit in units:
            progress.set_description(f"{unit.measures[0].file.method} {unit.task.name}")
            run_rows = _batches if context.settings.batch_size > 1 else _one_by_one
            for name, row in run_rows(unit, session, context):
                measure = next(m for m in unit.measures if m.name == name)
                measure.file.append(row, context.rank)
                progress.update()


@dataclass
class Prefill:
    """The tokens `ids` in a cache, with the logits `[V]` after them."""

    ids: list[int]
    stream: Stream
    logits: Tensor

    @classmethod
    def of(cls, ids: list[int], session: Session, context: Context) -> Prefill:
        several = isinstance(session, MaskSession)
        stream = Stream(context.model, session.new_cache(), several_steps=several)
        return cls(ids, stream, stream.prefill(ids))

    def branch(self) -> Stream:
        """A stream that goes on from a copy of the cache."""
        stream = self.stream
        cache = copy.deepcopy(stream.cache)
        return Stream(stream.model, cache, stream.length, stream.several_steps)


def _one_by_one(unit: Unit, session: Session, context: Context) -> Iterator[tuple[str, Row]]:
    """Every measure of every row. Protocol B's document is prefilled once for its questions."""
    held: Prefill | None = None
    for example in unit.examples:
        coded = context.encode(example)
        end = coded.split if context.settings.protocol == "B" else len(coded.ids)
        if held is None or held.ids != coded.ids[:end]:
            held = Prefill.of(coded.ids[:end], session, context)
        for measure in unit.wanted(example):
            stream, logits = held.branch(), held.logits
            if end < len(coded.ids):
                logits = stream.feed(coded.ids[end:])[-1]
            head = _head(example, coded)
            if measure.name == "fidelity":
                body = _fidelity(unit.task, coded, stream, context)
            else:
                body = _answer(unit.task, example, stream, logits, session, context)
            yield measure.name, {**head, **body, "tokens": session.tokens(stream.cache).mean()}


def _head(example: Example, coded: Encoded) -> Row:
    return {
        "id": example.id,
        "document_id": example.document_id,
        "prompt_tokens": len(coded.ids),
    }


def _fidelity(task: Task, coded: Encoded, stream: Stream, context: Context) -> Row:
    reference = _reference(task, coded, context)
    found = compare(stream, reference)
    kl = [round(value, 6) + 0.0 for value in found.kl]  # no negative zeros
    return {**found.means(), "steps": reference.steps, "kl_steps": kl}


def _reference(task: Task, coded: Encoded, context: Context) -> DenseReference:
    folder = Path(context.settings.out) / "dense"
    steps = context.settings.fidelity_steps
    return dense_reference(context.model, coded.ids, steps, context.stop(task), folder)


def _answer(
    task: Task, example: Example, stream: Stream, logits: Tensor, session: Session, context: Context
) -> Row:
    limit = context.new_tokens(task)
    ids = complete(stream, logits, context.stop(task), limit, task.min_new_tokens)
    return _scored(task, example, ids, session, context)


def _scored(
    task: Task, example: Example, ids: list[int], session: Session, context: Context
) -> Row:
    """An answer in the form that `score` reads, with its scores as fractions."""
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
    prompt = Prefill.of(encode(example.fact, context.tokenizer).ids, session, context)
    ids = complete(prompt.stream, prompt.logits, context.stop(task), FACT_TOKENS)
    return str(context.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _batches(unit: Unit, session: Session, context: Context) -> Iterator[tuple[str, Row]]:
    """Answers with several rows in one cache, rows of like length together (protocol A)."""
    size = context.settings.batch_size
    coded = [(context.encode(example), example) for example in unit.examples]
    coded.sort(key=lambda pair: len(pair[0].ids))
    for start in range(0, len(coded), size):
        group = coded[start : start + size]
        cache = session.new_cache()
        answers = complete_batch(
            context.model,
            cache,
            [encoded.ids for encoded, _ in group],
            context.stop(unit.task),
            context.new_tokens(unit.task),
            unit.task.min_new_tokens,
        )
        tokens = session.tokens(cache).mean()
        for (encoded, example), ids in zip(group, answers):
            body = _scored(unit.task, example, ids, session, context)
            row = {**_head(example, encoded), **body, "tokens": tokens, "batch": len(group)}
            yield "answers", row
