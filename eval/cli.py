"""Command line: score | run | report | compare, as `python -m eval` or below `flexicache eval`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

Subparsers = Any  # argparse keeps the type private


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds `eval` to another program's subparsers.

    After parsing, `args.run(args)` runs the chosen command and returns the exit status.
    """
    help_text = "accuracy against dense: LongBench, L-Eval, RULER, your own rows"
    parser: argparse.ArgumentParser = subparsers.add_parser("eval", help=help_text)
    add_commands(parser)
    return parser


def add_commands(parser: argparse.ArgumentParser) -> None:
    """The four commands as subparsers of `parser`."""
    commands = parser.add_subparsers(dest="eval_command", required=True, metavar="COMMAND")
    _add_score(commands)
    _add_run(commands)
    _add_report(commands)
    _add_compare(commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; bad input is reported on one line, with status 2."""
    parser = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    add_commands(parser)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_score(commands: Subparsers) -> None:
    parser = commands.add_parser("score", help="score a file of predictions; no model is loaded")
    parser.add_argument("--suite", required=True, choices=("longbench", "leval", "ruler", "custom"))
    parser.add_argument(
        "--task", required=True, help="task name (LongBench-E: NAME_e); custom: a metric name"
    )
    parser.add_argument(
        "--predictions", required=True, metavar="FILE.jsonl", help="official format, or our own"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=_score)


def _score(args: argparse.Namespace) -> int:
    from eval.scoring import score_file

    score = score_file(args.suite, args.task, args.predictions)
    if args.json:
        print(json.dumps(score.as_dict()))
        return 0
    print(f"{score.suite} {score.task}: {score.score} ({score.main}, {score.n} rows)")
    others = {**score.scores, **(score.buckets or {})}
    for name, value in others.items():
        if name != score.main:
            print(f"  {name} {value}")
    return 0


def _add_run(commands: Subparsers) -> None:
    parser = commands.add_parser("run", help="generate with every method and score; resumable")
    add = parser.add_argument
    add("--model", default="embedded", help="Hub id or folder; `embedded`; `stand-in:TYPE`")
    add("--suite", required=True, choices=("longbench", "leval", "ruler", "custom"))
    add("--tasks", required=True, help="names with commas; `all`; `paper`; custom: files")
    add(
        "--methods",
        required=True,
        help="names with commas; quest(last_page=ranked)@512 has options and its own budget",
    )
    add("--budgets", default="1024", help="tokens per head, with commas")
    add("--out", required=True, metavar="DIR", help="result folder; run again to go on")
    add("--protocol", default="A", choices=("A", "B"), help="A: question prefilled; B: decoded")
    add("--limit", type=int, help="rows per task, evenly spread (default: all)")
    add("--skip", type=int, default=0, help="documents to pass over, e.g. those of the profile")
    add("--samples", type=int, default=20, help="rows of generated tasks")
    add("--context", type=int, help="model context in tokens (default: the model's)")
    add("--max-new-tokens", type=int, help="cap on the task's own generation length")
    add("--fidelity-steps", type=int, default=0, help="teacher-forced steps (0: none)")
    add("--no-generation", action="store_true", help="only the teacher-forced measure")
    add("--no-replay", action="store_true", help="prefill for every method anew: less memory")
    add("--batch-size", type=int, default=1, help="rows at once, protocol A only")
    add("--seed", type=int, default=42)
    add("--data", metavar="DIR", help="official files (default: $FLEXICACHE_DATA, else the Hub)")
    add("--prompts", metavar="FILE", help="LongBench's dataset2prompt.json instead of our wording")
    add("--profile", metavar="PATH", help="head profile for methods with a `profile` option")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    add("--device", help="default: an accelerator if there is one; auto: all, one model over them")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from eval.runner import run
    from eval.settings import Settings

    return run(Settings.from_args(args))


def _add_report(commands: Subparsers) -> None:
    parser = commands.add_parser("report", help="tables and plots of a result folder")
    parser.add_argument("results", metavar="DIR", nargs="+", help="result folders of `run`")
    parser.add_argument("--out", metavar="DIR", help="default: DIR/report of the first folder")
    parser.add_argument("--resamples", type=int, default=2000, help="bootstrap resamples")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from eval.report import write_report

    print(write_report(args.results, args.out, args.resamples))
    return 0


def _add_compare(commands: Subparsers) -> None:
    parser = commands.add_parser("compare", help="two runs, or two methods of one, row by row")
    parser.add_argument("first", metavar="DIR[:METHOD@BUDGET]")
    parser.add_argument("second", metavar="DIR[:METHOD@BUDGET]")
    parser.add_argument("--resamples", type=int, default=2000, help="bootstrap resamples")
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    from eval.report import compare

    print(compare(args.first, args.second, args.resamples))
    return 0
