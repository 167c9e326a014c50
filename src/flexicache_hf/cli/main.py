"""The `flexicache` command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import generate

OPTIONAL = ("flexicache_hf.cli.profile", "eval.cli")
"""Modules with more sub-commands; they need packages that generating does not."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexicache", description="Long-context KV cache for Hugging Face transformers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate.add_parser(commands)
    for name in OPTIONAL:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "add_parser"):  # another project's module may have this name
            module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        print(f"flexicache: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
