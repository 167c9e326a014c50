"""Files of predictions: the official formats of the suites and our own, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OFFICIAL_LEVAL_KINDS = ("f1", "rouge", "exam")  # the rest goes to judges


@dataclass(frozen=True)
class Prediction:
    """One prediction with what is needed to score it."""

    id: str
    prediction: str
    references: list[str]
    classes: list[str] | None = None
    length: int | None = None


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file.

    Raises:
        ValueError: a line is not a JSON object; the message names file and line.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a {type(row).__name__}, expected an object")
            yield row


def read_predictions(path: str | Path) -> list[Prediction]:
    """Predictions in L-Eval's format (`<model>_pred`, `gt`), LongBench's (`pred`, `answers`),
    RULER's (`pred`, `outputs`) or our own (`prediction`, `references`).

    L-Eval rows for judges (`evaluation` is `human` or `LLM`) and our header lines are left out.

    Raises:
        ValueError: a row has none of these forms.
    """
    found = []
    for number, row in enumerate(read_jsonl(path)):
        if row.get("kind") == "header":
            continue
        if row.get("evaluation", "f1") not in OFFICIAL_LEVAL_KINDS:
            continue
        found.append(_parse(row, number, path))
    return found


def _parse(row: dict[str, Any], number: int, path: str | Path) -> Prediction:
    name = str(row.get("id", row.get("_id", number)))
    if "prediction" in row and "references" in row:
        classes, length = row.get("classes"), row.get("length")
        return Prediction(name, row["prediction"], row["references"], classes, length)
    if "pred" in row and "answers" in row:
        classes, length = row.get("all_classes"), row.get("length")
        return Prediction(name, row["pred"], row["answers"], classes, length)
    if "pred" in row and "outputs" in row:
        return Prediction(name, row["pred"], row["outputs"])
    key = next((key for key in row if key.endswith("_pred")), None)
    if key is not None and "gt" in row:
        return Prediction(name, row[key], [row["gt"]])
    raise ValueError(
        f"{path}, row {number + 1}: fields are {', '.join(row)}; expected prediction and "
        "references, or an official format: <model>_pred and gt (L-Eval), pred and answers "
        "(LongBench), pred and outputs (RULER)"
    )
