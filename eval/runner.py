"""Runs methods over tasks. Every row is written as soon as it is done, so a run can be resumed.

A prompt is prefilled once, densely, and replayed into every method that leaves the prompt dense.
`accelerate launch --multi_gpu -m eval run ...` spreads the documents over processes, which write
files of their own. With `--device cpu` it does the same without a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eval import models
from eval.answers import answer, answer_batch, fidelity, head
from eval.decode import Stream
from eval.encode import Encoded
from eval.fidelity import DenseReference, ReferenceFile
from eval.methods import Method, Session, build, record
from eval.methods.base import MaskSession
from eval.plan import Context, Measure, TaskPlan, Unit, plan
from eval.settings import Settings
from eval.tasks import Example, Task

Done = tuple[Measure, dict[str, Any]]


def run(settings: Settings) -> int:
    """Does what is not done yet of `settings`; returns the exit status."""
    from accelerate import PartialState

    for name in settings.tasks:
        settings.build_methods(name)  # bad options are refused before the model is loaded
    state = PartialState(cpu=settings.device == "cpu" or not torch.accelerator.is_available())
    device = settings.device or str(state.device)
    model, tokenizer = models.load(settings.model, settings.dtype, device)
    context = Context(settings, model, tokenizer, state.process_index, state.num_processes)
    plans = plan(context)
    for method in {unit.method: None for part in plans for unit in part.units}:
        with method.session(model):  # a method that cannot run fails before the first row
            pass
    state.wait_for_everyone()  # all have read what is done before anyone writes
    mine = [part.share(context.rank, context.world) for part in plans]
    total = sum(part.rows for part in mine)
    with tqdm(total=total, unit="row", disable=context.rank > 0, mininterval=1) as progress:
        for part in mine:
            for unit in part.units if part.examples else ():
                for measure in unit.measures:
                    measure.file.begin(measure.header, context.rank)
            do = _in_batches if settings.batch_size > 1 else _row_by_row
            for measure, row in do(part, context, progress):
                measure.file.append(row, context.rank)
                progress.update()
    state.wait_for_everyone()
    if context.rank == 0:
        print(f"{sum(part.rows for part in plans)} rows done; results in {settings.out}")
    return 0


class Prompts:
    """Prefilled prompts; the dense recording of the newest one serves all methods."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._ids: list[int] = []
        self._recorded: tuple[Any, Tensor] | None = None

    def start(
        self, coded: Encoded, end: int, method: Method, session: Session
    ) -> tuple[Stream, Tensor]:
        """A stream of `method` that holds the whole prompt, and the logits `[V]` after it: up to
        `end` prefilled, or replayed from what `hold` recorded; decoded from there."""
        model, several = self.context.model, isinstance(session, MaskSession)
        if method.replays and self.context.settings.replay:
            assert self._recorded is not None
            prompt, logits = self._recorded
            stream = Stream(model, session.new_cache(prompt), end, several)
        else:
            stream = Stream(model, session.new_cache(), several_steps=several)
            logits = stream.prefill(coded.ids[:end])
        if end < len(coded.ids):
            logits = stream.feed(coded.ids[end:])[-1]
        return stream, logits

    def hold(self, ids: list[int], methods: list[Method]) -> None:
        """Records the prompt `ids` unless it is held or no method replays."""
        replaying = self.context.settings.replay and any(method.replays for method in methods)
        if replaying and (self._recorded is None or self._ids != ids):
            self._recorded = None  # freed before the next one grows
            inputs = torch.tensor([ids], device=self.context.model.device)
            prompt, logits = record(self.context.model, inputs)
            self._ids, self._recorded = ids, (prompt, logits[0].float())


def _row_by_row(part: TaskPlan, context: Context, progress: Any) -> Iterator[Done]:
    """Every method and measure of one row before the next row."""
    prompts = Prompts(context)
    for example in part.examples:
        coded = context.encode(example)
        end = coded.split if context.settings.protocol == "B" else len(coded.ids)
        units = [unit for unit in part.units if unit.wanted(example)]
        prompts.hold(coded.ids[:end], [unit.method for unit in units])
        reference = None
        if any(measure.name == "fidelity" for unit in units for measure in unit.wanted(example)):
            progress.set_description(f"{part.task.name}: dense continuation")
            reference = _reference(part.task, coded, end, prompts, context)
        for unit in units:
            progress.set_description(f"{part.task.name}: {unit.label}")
            yield from _row(unit, part.task, example, coded, end, prompts, reference, context)


def _row(
    unit: Unit,
    task: Task,
    example: Example,
    coded: Encoded,
    end: int,
    prompts: Prompts,
    reference: DenseReference | None,
    context: Context,
) -> Iterator[Done]:
    """The measures of one row, from one prefill."""
    with unit.method.session(context.model) as session:
        start, logits = prompts.start(coded, end, unit.method, session)
        wanted = unit.wanted(example)
        for measure in wanted:
            stream = start if measure is wanted[-1] else _branch(start)
            if measure.name == "fidelity":
                assert reference is not None
                body = fidelity(stream, reference)
            else:
                body = answer(task, example, stream, logits, session, context)
            tokens = session.tokens(stream.cache).mean()
            yield measure, {**head(example, coded), **body, "tokens": tokens}


def _branch(stream: Stream) -> Stream:
    """A stream that goes on from a copy of the cache."""
    cache = copy.deepcopy(stream.cache)
    return Stream(stream.model, cache, stream.length, stream.several_steps)


def _reference(
    task: Task, coded: Encoded, end: int, prompts: Prompts, context: Context
) -> DenseReference:
    """The dense continuation of the whole prompt: from disk, else by the method `dense`."""
    model, stop, steps = context.model, context.stop(task), context.settings.fidelity_steps
    folder = Path(context.settings.out) / "dense"
    file = ReferenceFile.of(folder, model, coded.ids, steps, stop)
    if not file.exists():
        method = build("dense", 1)
        prompts.hold(coded.ids[:end], [method])
        with method.session(model) as session:
            file.make(*prompts.start(coded, end, method, session), steps, stop)
    return file.load(model.device)


def _in_batches(part: TaskPlan, context: Context, progress: Any) -> Iterator[Done]:
    """Answers with several rows in one cache, rows of like length together (protocol A)."""
    size = context.settings.batch_size
    for unit in part.units:
        rows = [(context.encode(e), e) for e in part.examples if unit.wanted(e)]
        rows.sort(key=lambda row: len(row[0].ids))
        (measure,) = unit.measures
        progress.set_description(f"{part.task.name}: {unit.label}")
        with unit.method.session(context.model) as session:
            for first in range(0, len(rows), size):
                batch = rows[first : first + size]
                for row in answer_batch(part.task, batch, session, context):
                    yield measure, row
