"""What a task is: examples with a prompt in parts, and the rules to run and score them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.metrics.base import RowMetric


@dataclass(frozen=True)
class Prompt:
    """A prompt in the parts that the protocols and chat templates need.

    The user's turn is `lead + document + question`. Protocol A prefills all of it; protocol B
    caches everything before the question, then decodes the rest token by token.
    """

    document: str
    question: str  # everything after the document
    lead: str = ""  # everything before it
    system: str = ""
    cue: str = ""  # start of the answer, already written for the model
    chat: bool = True  # wrap in the tokenizer's chat template, if it has one

    @property
    def text(self) -> str:
        """The user's turn."""
        return self.lead + self.document + self.question


@dataclass(frozen=True)
class Example:
    """One prompt with what is needed to score the answer."""

    id: str
    prompt: Prompt
    references: list[str]
    document_id: str  # equal for questions about the same document
    classes: list[str] | None = None
    length: int | None = None
    fact: Prompt | None = None  # L-Eval's sci_fi: a second query, without the document


@dataclass(frozen=True)
class Request:
    """How a task's examples are made.

    source: folder with files in the suite's official schema; None: the Hub.
    context: the model's context in tokens; truncation and generated tasks follow from it.
    samples: rows for generated tasks; other tasks give all they have.
    prompts: templates by task, replacing ours (LongBench's own `dataset2prompt.json`).
    """

    tokenizer: Any
    context: int
    source: str | None = None
    samples: int = 20
    seed: int = 42
    prompts: dict[str, str] = field(default_factory=dict)


Truncate = Callable[[Prompt, Request], Prompt]


@dataclass(frozen=True)
class Task:
    """One task of a suite. `name` is unique in its suite; `metric` names the suite's metric."""

    suite: str
    name: str
    metric: str
    max_new_tokens: int
    load: Callable[[Request], list[Example]]
    truncate: Truncate
    min_new_tokens: int = 0
    stop_at_newline: bool = False

    def examples(self, request: Request, limit: int | None = None, skip: int = 0) -> list[Example]:
        """Examples with truncated prompts; `limit` takes that many, evenly spread over the task
        without its first `skip` documents."""
        rows = self.load(request)
        skipped = set(list(dict.fromkeys(row.document_id for row in rows))[:skip])
        rows = [row for row in rows if row.document_id not in skipped]
        return [
            replace(example, prompt=self.truncate(example.prompt, request))
            for example in spread(rows, limit)
        ]

    def scorer(self) -> RowMetric:
        from eval.metrics import get_metric

        return get_metric(self.suite, self.metric)


def spread(rows: Sequence[Example], limit: int | None) -> list[Example]:
    """`limit` rows at equal distances; all of them for None or a limit beyond their number."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[index * len(rows) // limit] for index in range(limit)]


def fill(template: str, **values: str) -> str:
    """Replaces every `{name}` once; braces in the values stay as they are, unlike `str.format`."""
    parts: list[str] = []
    rest = template
    while True:
        places = {name: rest.find("{" + name + "}") for name in values}
        found = {name: place for name, place in places.items() if place >= 0}
        if not found:
            return "".join([*parts, rest])
        name = min(found, key=found.__getitem__)
        parts += [rest[: found[name]], values[name]]
        rest = rest[found[name] + len(name) + 2 :]


def untouched(prompt: Prompt, request: Request) -> Prompt:
    """No truncation: generated prompts have the right length already."""
    return prompt


def cut_middle(reserve: int) -> Truncate:
    """LongBench's rule: more than `context - reserve` tokens lose their middle.

    The unwrapped prompt counts; a chat template then adds its own tokens. Both halves are decoded
    without special tokens and joined.
    """

    def truncate(prompt: Prompt, request: Request) -> Prompt:
        tokenizer, limit = request.tokenizer, request.context - reserve
        ids = tokenizer(prompt.text, verbose=False).input_ids
        if len(ids) <= limit:
            return prompt
        half = max(1, limit // 2)
        halves = (ids[:half], ids[-half:])
        text = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in halves)
        # A question longer than the half that is kept leaves no document at all.
        start = max(0, len(text) - len(prompt.question))
        return replace(prompt, lead="", document=text[:start], question=text[start:])

    return truncate
