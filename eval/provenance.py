"""The first line of every result file: all that is needed to repeat it."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eval.settings import Settings, file_record

SCHEMA = 1
PACKAGES = (
    "flexicache_hf",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "evaluate",
    "rouge",
    "rouge_score",
    "jieba",
    "fuzzywuzzy",
    "numpy",
)
_PATHS = ("model", "out", "data", "profile", "prompts")
# A file goes on only if these are what they were; limits, batch size and paths may change.
IDENTITY = ("suite", "task", "measure", "protocol", "method", "model", "rules")


def header(settings: Settings, **identity: Any) -> dict[str, Any]:
    """A header line. `identity` fills the fields of `IDENTITY`."""
    return {
        "kind": "header",
        "schema": SCHEMA,
        **identity,
        "settings": _portable(settings),
        "prompts": file_record(settings.prompts) if settings.prompts else None,
        "versions": versions(),
        "git": git_state(),
        "machine": platform.platform(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _portable(settings: Settings) -> dict[str, Any]:
    """The settings without what only this machine knows."""
    found = {k: v for k, v in asdict(settings).items() if k not in _PATHS}
    return found | {"tasks": [Path(task).name for task in settings.tasks]}


def versions() -> dict[str, str | None]:
    """Versions of everything that can change a score."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of this checkout and whether files differ from it; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def check_same(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises ValueError, naming the field, if `found` was written by a run of something else."""
    for name in IDENTITY:
        old, new = _essence(name, found), _essence(name, expected)
        if old != new:
            raise ValueError(
                f"{path}: {name} is {old}, this run has {new}; give another --out, or move the "
                "file away"
            )


def _essence(name: str, line: dict[str, Any]) -> Any:
    """A field of a header; of a method what it does, not how it is described."""
    value = line.get(name)
    if name == "method" and value:
        same = {k: value[k] for k in ("name", "options")}
        return same | {"resolved": value.get("resolved") or {}}  # older files have none
    return value
