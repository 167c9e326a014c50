"""Result files: a header line, then one JSON object a row, appended as rows are done.

`OUT/<suite>-<protocol>/<task>/<method>.<measure>.jsonl`; further processes write
`....rank1.jsonl` and so on beside it. A reader takes all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.provenance import check_same

MEASURES = ("answers", "fidelity")


@dataclass(frozen=True)
class ResultFile:
    """One method's rows on one task."""

    folder: Path
    method: str
    measure: str

    def path(self, rank: int = 0) -> Path:
        part = f".rank{rank}" if rank else ""
        return self.folder / f"{self.method}.{self.measure}{part}.jsonl"

    def paths(self) -> list[Path]:
        """The files of all processes."""
        others = self.folder.glob(f"{self.method}.{self.measure}.rank*.jsonl")
        return sorted(path for path in (self.path(), *others) if path.is_file())

    def rows(self) -> dict[str, dict[str, Any]]:
        """Finished rows by id."""
        lines = (line for path in self.paths() for line in whole_lines(path))
        return {line["id"]: line for line in lines if line.get("kind") != "header"}

    def header(self) -> dict[str, Any] | None:
        """The newest header."""
        lines = (line for path in self.paths() for line in whole_lines(path))
        headers = [line for line in lines if line.get("kind") == "header"]
        return max(headers, key=lambda line: line["started"]) if headers else None

    def begin(self, header: dict[str, Any], rank: int) -> None:
        """Opens the file for this process's rows: a cut-off last line goes, a header comes.

        Raises:
            ValueError: rows of something else are in it.
        """
        for path in self.paths():
            for line in whole_lines(path):
                if line.get("kind") == "header":
                    check_same(path, line, header)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(rank)
        if path.is_file():
            text = path.read_bytes()
            path.write_bytes(text[: text.rfind(b"\n") + 1])
        self.append(header, rank)

    def append(self, line: dict[str, Any], rank: int) -> None:
        with self.path(rank).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a result file; a last line cut off by a killed run is passed over."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)


def find(root: str | Path) -> Iterator[tuple[str, str, ResultFile]]:
    """`(suite-protocol, task, file)` of every result below `root`, in order.

    Raises:
        FileNotFoundError: there are none.
    """
    base = Path(root)
    names = {
        (path.parent, path.name.split(f".{measure}.")[0], measure)
        for measure in MEASURES
        for path in base.glob(f"*/*/*.{measure}.*jsonl")
    }
    if not names:
        raise FileNotFoundError(f"no results in {base}: expected a folder that `run --out` wrote")
    for folder, method, measure in sorted(names):
        yield folder.parent.name, folder.name, ResultFile(folder, method, measure)
