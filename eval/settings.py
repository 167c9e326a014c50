"""What a run is asked to do, checked before any model is loaded."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eval.methods import METHODS, Method, build
from eval.paths import data_root
from eval.tasks import task_names

BUDGET_FREE = ("dense", "duoattention")  # one row, whatever the budgets
USES_PROFILE = ("profile", "most-stable", "random")
_SPEC = re.compile(r"\s*([\w-]+)\s*(?:\(([^)]*)\))?\s*")
_OWN_BUDGET = re.compile(r"@(\d+)\s*$")


@dataclass(frozen=True)
class Settings:
    """The arguments of `run`; see the command line's help.

    `profile` may hold `{task}` and `{budget}`: the paper measured its profiles on another task, for
    the same number of pages.
    """

    model: str
    suite: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    out: str
    protocol: str = "A"
    limit: int | None = None
    skip: int = 0
    samples: int = 20
    context: int | None = None
    max_new_tokens: int | None = None
    fidelity_steps: int = 0
    generation: bool = True
    replay: bool = True
    batch_size: int = 1
    seed: int = 42
    data: str | None = None
    prompts: str | None = None
    profile: str | None = None
    dtype: str = "auto"
    device: str | None = None

    def __post_init__(self) -> None:
        if not (self.generation or self.fidelity_steps):
            raise ValueError("nothing to measure: give --fidelity-steps with --no-generation")
        if self.batch_size > 1 and self.protocol == "B":
            raise ValueError("batch_size is above 1, but protocol B decodes one question at a time")
        if self.batch_size > 1 and self.fidelity_steps:
            raise ValueError("batch_size is above 1, but fidelity is measured row by row")
        for name in ("batch_size", "samples", "limit", "context", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if self.skip < 0:
            raise ValueError(f"skip is {self.skip}, expected a number of documents, at least 0")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Settings:
        values = {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}
        values["generation"] = not args.no_generation
        values["replay"] = not args.no_replay
        values["tasks"] = expand_tasks(args.suite, args.tasks)
        values["methods"] = tuple(split_outside_brackets(args.methods))
        values["budgets"] = tuple(int(budget) for budget in args.budgets.split(","))
        return cls(**values)

    @property
    def measures(self) -> tuple[str, ...]:
        """`answers`, `fidelity`, or both."""
        return ("answers",) * self.generation + ("fidelity",) * bool(self.fidelity_steps)

    def source(self) -> str | None:
        """Folder with the suite's files; None: the Hub."""
        if self.data:
            return self.data
        folder = data_root() / self.suite
        return str(folder) if folder.is_dir() else None

    def templates(self) -> dict[str, str]:
        """The official prompt templates given with `prompts`."""
        if self.prompts is None:
            return {}
        found = json.loads(Path(self.prompts).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all("{context}" in text for text in found.values()):
            raise ValueError(
                f"{self.prompts} is not a dataset2prompt.json: expected an object of templates, "
                "each with {context}"
            )
        return found

    def build_methods(self, task: str) -> list[Method]:
        """Every method at every budget for `task`, dense first if it is among them."""
        built = []
        for spec in sorted(self.methods, key=lambda spec: spec != "dense"):
            spec, own = own_budget(spec)
            name, options = parse_spec(spec)
            budgets = self.budgets if own is None else (own,)
            budgets = budgets[:1] if name in BUDGET_FREE else budgets
            built += [build(name, b, **self._options(name, options, task, b)) for b in budgets]
        return built

    def _options(
        self, name: str, options: dict[str, str], task: str, budget: int
    ) -> dict[str, str]:
        """`options`, with the run's profile for a method that takes one and uses it."""
        takes = name in METHODS and any(f.name == "profile" for f in fields(METHODS[name]))
        if not (self.profile and takes and options.get("unstable", "profile") in USES_PROFILE):
            return options
        path = self.profile.replace("{task}", task).replace("{budget}", str(budget))
        return {"profile": path, **options}


def expand_tasks(suite: str, text: str) -> tuple[str, ...]:
    """Task names of a command-line list; `all` and `paper` (FlexiCache's own selection) expand.

    Raises:
        ValueError: an unknown name.
    """
    if text == "paper" and suite in ("leval", "longbench"):
        from eval.tasks.leval import PAPER_TASKS
        from eval.tasks.longbench import ENGLISH_AND_CODE

        return PAPER_TASKS if suite == "leval" else ENGLISH_AND_CODE
    if suite == "custom":
        return tuple(text.split(","))
    known = task_names(suite)
    if text == "all":
        return tuple(name for name in known if not name.endswith("_e"))
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no task {', '.join(unknown)} in {suite}; known: {', '.join(known)}")
    return names


def split_outside_brackets(text: str) -> list[str]:
    """Parts between the commas that are not in brackets: `a,b(c=1,d=2)` has two."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def own_budget(spec: str) -> tuple[str, int | None]:
    """A method's text without the `@512` at its end, and that budget; None if it has none of its
    own and takes the run's."""
    match = _OWN_BUDGET.search(spec)
    return (spec[: match.start()], int(match[1])) if match else (spec, None)


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of `name(option=value,option=value)`.

    Raises:
        ValueError: it has another form.
    """
    match = _SPEC.fullmatch(spec)
    pairs = [part.split("=", 1) for part in (match[2] or "").split(",") if part] if match else []
    if match is None or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"method is {spec!r}, expected name, name(option=value,...) or either with @budget"
        )
    return match[1], {key.strip(): value.strip() for key, value in pairs}


def changed_options(method: Method) -> dict[str, Any]:
    """Options that are not the default's, less those that every row has its own of."""
    standard = build(method.name, method.budget)
    pairs = {f.name: (getattr(method, f.name), getattr(standard, f.name)) for f in fields(method)}
    return {
        name: own
        for name, (own, usual) in pairs.items()
        if own != usual and name not in ("budget", "profile")
    }


def method_label(method: Method) -> str:
    """Its label, and the options that are not the default's where the label does not show them."""
    usual = build(method.name, method.budget).label
    hidden = []
    for name, value in changed_options(method).items():
        try:
            shown = build(method.name, method.budget, **{name: value}).label != usual
        except ValueError:  # an option that only goes with others
            shown = False
        hidden += [f"{name}={value}"] * (not shown)
    return f"{method.label} ({', '.join(hidden)})" if hidden else method.label


def method_record(method: Method) -> dict[str, Any]:
    """What identifies a method in results."""
    record: dict[str, Any] = {
        "name": method.name,
        "label": method_label(method),
        "paper": method.paper,
        "gqa": method.gqa,
        "accounting": method.accounting,
        "options": asdict(method),
        "resolved": method.resolved(),
    }
    if profile := record["options"].get("profile"):
        record["options"]["profile"] = file_record(profile)
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return plain


def file_record(path: str) -> dict[str, Any]:
    """Name and content hash of a file, or of the JSON files in a folder; a Hub id by name only."""
    source = Path(path)
    files = sorted(source.glob("*.json")) if source.is_dir() else [source]
    if not all(file.is_file() for file in files):
        return {"name": path}
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {"name": source.name, "sha256": digest.hexdigest()}


def method_key(method: Method) -> str:
    """File name of a method: name, budget, and a hash of the options that are not the default's."""
    base = method.name if method.name in BUDGET_FREE else f"{method.name}@{method.budget}"
    changed = changed_options(method)
    if not changed:
        return base
    text = json.dumps(changed, sort_keys=True, default=str)
    return f"{base}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
