"""The results in docs/results: one command runs everything, one writes tables and plots.

    python scripts/results.py run --out runs/results --processes 2
    python scripts/results.py report runs/results --out docs/results

`run` is a list of `python -m eval run` commands, one a task (`list` prints them), shared out to
processes of one thread each. It can be stopped and started again. `report` fills the places marked
in README.md and leaves the text around them alone.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from results_report import write

LEVAL = (
    "patent_summ",
    "gov_report_summ",
    "paper_assistant",
    "review_summ",
    "legal_contract_qa",
    "financial_qa",
)
LONGBENCH = ("gov_report", "multi_news", "qasper", "hotpotqa", "multifieldqa_en", "samsum")
SHORT_ANSWERS = ("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "triviaqa")
LONG = {"leval": LEVAL[:2], "longbench": LONGBENCH[:1]}
PROFILED = {"leval": 2}  # documents that the embedded model's profile was made of

FIELD = (
    "dense",
    "flexicache-mask",
    "flexicache-mask(preset=paper)",
    "oracle",
    "random",
    "streaming-pages",
    "quest",
    "quest(last_page=ranked)",
    "lserve",
    "duoattention",
    "snapkv",
    "streamingllm",
    "h2o",
    "tova",
    "infinigen",
)
AT_512 = ("flexicache@512", "shadowkv@512", "infllm@512", "scissorhands@512")
ABLATIONS = tuple(
    f"flexicache-mask({options})@512"
    for options in (
        "digest=minmax",
        "digest=cuboid_mean",
        "digests_per_page=2",
        "group_reduction=softmax_sum",
        "sink_pages=0",
        "recent_pages=1",
        "first_rank=decode",
        "rerank_interval=0",
        "rerank_interval=4",
        "unstable=all",
        "unstable=none",
        "unstable=random",
        "unstable=most-stable",
        "preset=paper,rerank_interval=0",
        "preset=paper,unstable=none",
    )
)
LONG_STEPS = (
    "dense",
    "flexicache-mask",
    "flexicache-mask(preset=paper)",
    "flexicache-mask(rerank_interval=0)",
    "flexicache-mask(unstable=none)",
    "oracle",
    "quest",
    "lserve",
    "snapkv",
    "streamingllm",
    "h2o",
)
ANSWERED = ("dense", "flexicache", "quest", "lserve", "snapkv", "h2o", "streamingllm")


@dataclass(frozen=True)
class Sizes:
    """What a run costs: documents a task, teacher-forced steps, prompt length."""

    context: int = 2560
    documents: int = 1
    steps: int = 48
    long_steps: int = 256
    answered: int = 5  # documents of each short-answer task
    budgets: str = "256,512,1024"
    model: str = "embedded"
    data: str | None = None
    gates: str | None = None  # table of gates, for another model than the embedded one
    profile: str | None = None  # and its head profile


@dataclass(frozen=True)
class Job:
    """One `python -m eval run`; `cost` is a guess in seconds of one core, to begin with the longest
    ones. Jobs of a later `stage` find what earlier ones kept."""

    part: str
    suite: str
    task: str
    methods: tuple[str, ...]
    limit: int
    options: tuple[str, ...]
    cost: float
    stage: int = 0

    def command(self, out: Path, sizes: Sizes) -> list[str]:
        command = [sys.executable, "-m", "eval", "run", "--device", "cpu", "--suite", self.suite]
        gates = f"(gates={sizes.gates})" if sizes.gates else ""
        methods = [m + gates * (m in ("lserve", "duoattention")) for m in self.methods]
        command += ["--tasks", self.task, "--methods", ",".join(methods)]
        command += ["--model", sizes.model, "--context", str(sizes.context)]
        command += ["--limit", str(self.limit), "--skip", str(PROFILED.get(self.suite, 0))]
        command += [*self.options, "--out", str(out / self.part)]
        command += ["--data", sizes.data.format(suite=self.suite)] if sizes.data else []
        return command + (["--profile", sizes.profile] if sizes.profile else [])


def jobs(sizes: Sizes) -> list[Job]:
    """Everything that docs/results holds."""
    found = []

    def fidelity(part: str, suite: str, task: str, methods: Sequence[str], steps: int) -> None:
        options: tuple[str, ...] = ("--no-generation", "--fidelity-steps", str(steps))
        budgets = sizes.budgets if part == "main" else "512"
        rows = sum(1 if "@" in m or m == "dense" else budgets.count(",") + 1 for m in methods)
        cost = sizes.documents * (30 + rows * steps * 0.07)
        stage = int(part == "ablations")
        options += ("--budgets", budgets)
        found.append(Job(part, suite, task, tuple(methods), sizes.documents, options, cost, stage))

    for suite, tasks in (("leval", LEVAL), ("longbench", LONGBENCH)):
        for task in tasks:
            fidelity("main", suite, task, FIELD + AT_512, sizes.steps)
            if suite == "leval":
                fidelity("ablations", suite, task, ABLATIONS, sizes.steps)
            if task in LONG[suite]:
                fidelity("long", suite, task, LONG_STEPS, sizes.long_steps)
    for task in SHORT_ANSWERS:
        options, cost = ("--budgets", "512"), 60.0 * sizes.answered
        found.append(Job("answers", "longbench", task, ANSWERED, sizes.answered, options, cost))
    return sorted(found, key=lambda job: (job.stage, -job.cost))


def run(out: Path, processes: int, sizes: Sizes) -> int:
    """All jobs, `processes` at a time; the number of those that failed."""
    logs, begun = out / "logs", time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    share_dense(out)
    every = jobs(sizes)
    whole, done = sum(job.cost for job in every), 0.0
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}

    def one(job: Job) -> tuple[Job, int]:
        log = logs / f"{job.part}-{job.suite}-{job.task}.log"
        with log.open("w", encoding="utf-8") as file:
            command = job.command(out, sizes)
            return job, subprocess.run(
                command, env=environment, stdout=file, stderr=file
            ).returncode

    failed = 0
    for stage in sorted({job.stage for job in every}):
        with ThreadPoolExecutor(processes) as pool:
            futures = [pool.submit(one, job) for job in every if job.stage == stage]
            for job, status in (future.result() for future in as_completed(futures)):
                done += job.cost
                spent = time.monotonic() - begun
                left = spent * (whole - done) / done
                state = "ok" if status == 0 else f"failed ({status}), see {logs}"
                print(
                    f"{job.part} {job.suite} {job.task}: {state}; "
                    f"{spent / 60:.0f} min, about {left / 60:.0f} left",
                    flush=True,
                )
                failed += status != 0
    return failed


def share_dense(out: Path) -> None:
    """Ablations are on the prompts of the main table, whose dense continuations serve them too."""
    (out / "main" / "dense").mkdir(parents=True, exist_ok=True)
    link = out / "ablations" / "dense"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(Path("..") / "main" / "dense")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("run", "list"):
        add = commands.add_parser(name).add_argument
        add("--out", type=Path, default=Path("runs/results"))
        add("--processes", type=int, default=2, help="jobs at a time")
        for field, value in vars(Sizes()).items():
            kind = str if value is None else type(value)
            option = f"--{field.replace('_', '-')}"
            add(option, default=value, type=kind)
    report = commands.add_parser("report")
    report.add_argument("results", type=Path, help="folder of `run`")
    report.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    if args.what == "report":
        print(write(args.results, args.out))
        return 0
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    if args.what == "list":
        for job in jobs(sizes):
            print(shlex.join(["python", *job.command(args.out, sizes)[1:]]))
        return 0
    return run(args.out, args.processes, sizes)


if __name__ == "__main__":
    sys.exit(main())
