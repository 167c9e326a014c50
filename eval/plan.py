"""What a run has to do: rows by task, method and measure, less what is done already."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval import models
from eval.encode import Encoded, encode, stop_ids
from eval.methods import Method
from eval.provenance import header
from eval.results import ResultFile
from eval.settings import Settings, method_key, method_label, method_record
from eval.tasks import Example, Request, Task, get_task


@dataclass(frozen=True)
class Context:
    """The model under evaluation and this process's place among `world` processes."""

    settings: Settings
    model: Any
    tokenizer: Any
    rank: int = 0
    world: int = 1

    def encode(self, example: Example) -> Encoded:
        return encode(example.prompt, self.tokenizer)

    def stop(self, task: Task) -> set[int]:
        return stop_ids(self.model, self.tokenizer, newline=task.stop_at_newline)

    def new_tokens(self, task: Task) -> int:
        return min(task.max_new_tokens, self.settings.max_new_tokens or task.max_new_tokens)


@dataclass(frozen=True)
class Measure:
    """One measure's result file, its header, and the ids of the rows still to do."""

    name: str
    file: ResultFile
    header: dict[str, Any]
    todo: frozenset[str]


@dataclass(frozen=True)
class Unit:
    """One method on one task."""

    method: Method
    measures: tuple[Measure, ...]

    @property
    def label(self) -> str:
        return f"{method_label(self.method)} {self.method.budget}"

    def wanted(self, example: Example) -> list[Measure]:
        return [measure for measure in self.measures if example.id in measure.todo]


@dataclass(frozen=True)
class TaskPlan:
    """The rows of one task that some method still needs; methods share their prompts' prefill."""

    task: Task
    units: tuple[Unit, ...]
    examples: list[Example]

    @property
    def rows(self) -> int:
        pairs = ((unit, example) for unit in self.units for example in self.examples)
        return sum(len(unit.wanted(example)) for unit, example in pairs)

    def share(self, rank: int, world: int) -> TaskPlan:
        """The part of process `rank`: whole documents, so that protocol B can share a prefill."""
        documents = list(dict.fromkeys(example.document_id for example in self.examples))
        own = set(documents[rank::world])
        return replace(self, examples=[e for e in self.examples if e.document_id in own])


def plan(context: Context) -> list[TaskPlan]:
    """Everything still to do, task by task, methods in the order they were asked for."""
    settings = context.settings
    request = Request(
        context.tokenizer,
        settings.context or models.context_length(context.model),
        settings.source(),
        settings.samples,
        settings.seed,
        settings.templates(),
    )
    plans = []
    for task in (get_task(settings.suite, name) for name in settings.tasks):
        examples = task.examples(request, settings.limit, settings.skip)
        ids = frozenset(example.id for example in examples)
        units = []
        for method in settings.build_methods(task.name):
            measures = [_measure(m, method, task, request, ids, context) for m in settings.measures]
            open_ones = tuple(measure for measure in measures if measure.todo)
            units += [Unit(method, open_ones)] * bool(open_ones)
        wanted = [e for e in examples if any(unit.wanted(e) for unit in units)]
        plans += [TaskPlan(task, tuple(units), wanted)] * bool(units)
    return plans


def _measure(
    name: str, method: Method, task: Task, request: Request, ids: frozenset[str], context: Context
) -> Measure:
    settings = context.settings
    folder = Path(settings.out) / f"{settings.suite}-{settings.protocol}" / task.name
    file = ResultFile(folder, method_key(method), name)
    line = header(
        settings,
        suite=task.suite,
        task=task.name,
        measure=name,
        protocol=settings.protocol,
        method=method_record(method),
        model=models.identity(context.model),
        rules=_rules(name, task, request, context),
    )
    return Measure(name, file, line, ids - file.rows().keys())


def _rules(measure: str, task: Task, request: Request, context: Context) -> dict[str, Any]:
    """What decides a row's content beside method and model."""
    rules: dict[str, Any] = {
        "metric": task.metric,
        "context": request.context,
        "official_prompt": task.metric in request.prompts,
        "seed": request.seed,
        "samples": request.samples if task.suite == "ruler" else None,
    }
    if measure == "answers":
        return rules | {"max_new_tokens": context.new_tokens(task)}
    return rules | {"fidelity_steps": context.settings.fidelity_steps}
