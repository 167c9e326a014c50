"""RULER (arXiv 2404.06654) and two plain needle tasks, generated to fill the model's context.

The single-answer needle template is RULER's as its published samples show it; other wording, the
key words and the filler text are ours. Prompts and answers together have `Request.context` tokens.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from eval.tasks.base import Example, Prompt, Request, Task, untouched
from eval.tasks.haystack import NOISE, Builder, Sample, fit, insert_at, prose, words
from eval.tasks.ruler_lists import cwe, fwe, vt
from eval.tasks.ruler_qa import question_answering

DEPTHS = [step / 39 for step in range(40)]


@dataclass(frozen=True)
class Niah:
    """A needle variant: what fills the haystack, what keys and values are, and how many."""

    haystack: str  # noise | prose | needles
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1


NIAH = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("prose"),
    "niah_single_3": Niah("prose", value="uuid"),
    "niah_multikey_1": Niah("prose", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuid", value="uuid"),
    "niah_multivalue": Niah("prose", values=4),
    "niah_multiquery": Niah("prose", keys=4, asked=4),
}


def _draw(kind: str, rng: random.Random) -> str:
    if kind == "word":
        return words(rng, 1)[0]
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randint(1_000_000, 9_999_999))


def niah(variant: Niah, source: str | None, rng: random.Random, units: int) -> Sample:
    """A needle sample with `units` lines or sentences of haystack."""

    def needle(key: str, value: str) -> str:
        return f"One of the special magic {variant.value}s for {key} is: {value}."

    keys = [_draw(variant.key, rng) for _ in range(variant.keys)]
    pairs = [(key, _draw(variant.value, rng)) for key in keys for _ in range(variant.values)]
    needles = [needle(*pair) for pair in pairs]
    if variant.haystack == "prose":
        text = prose(source)
        lines = [text[index % len(text)] for index in range(units)]
        depths = rng.sample(DEPTHS, len(needles))
    else:
        other = variant.haystack == "needles"
        lines = [
            needle(_draw(variant.key, rng), _draw(variant.value, rng)) if other else NOISE
            for _ in range(units)
        ]
        depths = [rng.random() for _ in needles]
    joint = " " if variant.haystack == "prose" else "\n"
    asked = keys[: variant.asked]
    references = [value for key, value in pairs if key in asked]
    kind, names = variant.value, _listed(asked)
    if len(references) == 1:
        lead = (
            f"A special magic {kind} is hidden within the following text. Make sure to memorize "
            f"it. I will quiz you about the {kind} afterwards.\n"
        )
        question = f"\nWhat is the special magic {kind} for {names} mentioned in the provided text?"
        cue = f"The special magic {kind} for {names} mentioned in the provided text is"
    else:
        lead = (
            f"Some special magic {kind}s are hidden within the following text. Make sure to "
            f"memorize them. I will quiz you about the {kind}s afterwards.\n"
        )
        question = (
            f"\nWhat are all the special magic {kind}s for {names} mentioned in the provided text?"
        )
        cue = f"The special magic {kind}s for {names} mentioned in the provided text are"
    document = joint.join(insert_at(lines, needles, depths))
    return Sample(Prompt(document, question, lead, cue=cue), references)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def passkey(depth: float, rng: random.Random, units: int) -> Sample:
    """A five-digit key in noise, at a given depth. Wording ours."""
    key = str(rng.randint(10_000, 99_999))
    needle = f"The pass key is {key}. Remember it: {key} is the pass key."
    document = "\n".join(insert_at([NOISE] * units, [needle], [depth]))
    lead = "A pass key is hidden in the following text. Find it and remember it.\n"
    return Sample(Prompt(document, "\nWhat is the pass key?", lead, cue="The pass key is"), [key])


def needle(source: str | None, depth: float, rng: random.Random, units: int) -> Sample:
    """One odd fact in real text, after a full stop near the given depth. Wording ours."""
    place, thing = words(rng, 2)
    best = f"The best thing to do in {place.title()} is"
    fact = f"{best} to eat a sandwich near the {thing} fountain."
    text = prose(source)
    lines = [text[index % len(text)] for index in range(units)]
    document = " ".join(insert_at(lines, [fact], [depth]))
    question = f"\n\nWhat is the best thing to do in {place.title()}, by the text above?"
    return Sample(Prompt(document, question, cue=best), [f"{thing} fountain"])


def _generate(
    builder: Callable[[Request, float], Builder], new_tokens: int, request: Request
) -> list[Example]:
    examples = []
    for index in range(request.samples):
        depth = index / max(1, request.samples - 1)
        sample = fit(builder(request, depth), request, new_tokens, index)
        examples.append(Example(str(index), sample.prompt, sample.references, str(index)))
    return examples


def _task(name: str, new_tokens: int, builder: Callable[[Request, float], Builder]) -> Task:
    load = partial(_generate, builder, new_tokens)
    return Task("ruler", name, name, new_tokens, load, untouched)


def _niah_task(name: str, variant: Niah) -> Task:
    return _task(name, 128, lambda request, depth: partial(niah, variant, request.source))


TASKS = {
    **{name: _niah_task(name, variant) for name, variant in NIAH.items()},
    "vt": _task("vt", 30, lambda request, depth: vt),
    "cwe": _task("cwe", 120, lambda request, depth: cwe),
    "fwe": _task("fwe", 50, lambda request, depth: fwe),
    "qa_1": Task("ruler", "qa_1", "qa_1", 32, partial(question_answering, "squad.json"), untouched),
    "qa_2": Task(
        "ruler", "qa_2", "qa_2", 32, partial(question_answering, "hotpotqa.json"), untouched
    ),
    "passkey": _task("passkey", 16, lambda request, depth: partial(passkey, depth)),
    "needle": _task("needle", 32, lambda request, depth: partial(needle, request.source, depth)),
}
