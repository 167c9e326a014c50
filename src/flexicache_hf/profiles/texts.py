"""Documents and questions to generate about: L-Eval or LongBench files, a dataset, own prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUMMARISE = "Summarise the text above in detail."


@dataclass(frozen=True)
class Text:
    """One prompt: a document, which may be cut to length, and what is asked about it."""

    task: str
    name: str  # unique within the task
    document: str
    instruction: str = ""


def data_dir() -> Path | None:
    """Folder with `leval/` and `longbench/`: `$FLEXICACHE_DATA`, else `../shared/data` beside the
    checkout; None where neither exists."""
    if home := os.environ.get("FLEXICACHE_DATA"):
        return Path(home)
    beside = Path(__file__).parents[3] / "shared" / "data"
    return beside if beside.is_dir() else None


def leval(folder: Path, tasks: Iterable[str]) -> Iterator[Text]:
    """Every document of the named L-Eval tasks (`<task>.jsonl`) with its first instruction."""
    for task in tasks:
        for index, row in enumerate(_rows(folder, task)):
            yield Text(task, f"{index:04d}", row["input"], row["instructions"][0])


def longbench(folder: Path, tasks: Iterable[str]) -> Iterator[Text]:
    """Every row of the named LongBench datasets (`<task>.jsonl`); rows without an input ask for a
    summary."""
    for task in tasks:
        for index, row in enumerate(_rows(folder, task)):
            yield Text(task, f"{index:04d}", row["context"], row["input"] or SUMMARISE)


def own_prompts(files: Iterable[Path]) -> Iterator[Text]:
    """`.jsonl` rows `{"prompt" or "document", "instruction"?, "task"?}`, or one text per file."""
    for file in files:
        if file.suffix != ".jsonl":
            yield Text(file.stem, "0000", file.read_text())
            continue
        for index, line in enumerate(file.read_text().splitlines()):
            row = json.loads(line)
            document = row.get("document", row.get("prompt"))
            if not isinstance(document, str):
                raise ValueError(
                    f"{file}, line {index + 1}: found the keys {sorted(row)}, expected a text "
                    'under "prompt" or "document"'
                )
            yield Text(
                row.get("task", file.stem), f"{index:04d}", document, row.get("instruction", "")
            )


def dataset(name: str, split: str, column: str, config: str | None = None) -> Iterator[Text]:
    """Rows of a dataset on the Hub or on disk, streamed with `datasets`."""
    from datasets import load_dataset

    rows = load_dataset(name, config, split=split, streaming=True)
    for index, row in enumerate(rows):
        if column not in row:
            raise ValueError(
                f"dataset {name} has the columns {sorted(row)}, not {column!r}; pass --text-column"
            )
        yield Text(name.split("/")[-1], f"{index:04d}", row[column])


def prompt_ids(tokenizer: Any, text: Text, max_tokens: int) -> list[int]:
    """Token ids of the prompt, in the chat template where the tokenizer has one.

    The document's end is cut (as L-Eval does) so that the prompt has at most `max_tokens` tokens.
    """
    document = tokenizer(text.document, add_special_tokens=False)["input_ids"]
    frame = len(_framed(tokenizer, "", text.instruction))
    room = max_tokens - frame
    if room < 1:
        raise ValueError(
            f"the instruction of {text.task}/{text.name} alone has {frame} tokens, more than "
            f"max_tokens = {max_tokens}; allow longer prompts"
        )
    for _ in range(4):  # cutting between tokens may change how the text is split: check, shrink
        cut = text.document if len(document) <= room else tokenizer.decode(document[:room])
        ids = _framed(tokenizer, cut, text.instruction)
        if len(ids) <= max_tokens:
            return ids
        room -= len(ids) - max_tokens
    return ids[:max_tokens]


def select(
    texts: Iterable[Text], tokenizer: Any, per_task: int, *, skip: int = 0, min_tokens: int = 0
) -> list[Text]:
    """The first `per_task` documents of every task after `skip` others, counting only documents of
    at least `min_tokens` tokens. Every task's first document comes first, then the second ones, so
    that an unfinished run covers the tasks evenly."""
    found: dict[str, list[Text]] = {}
    for text in texts:
        chosen = found.setdefault(text.task, [])
        if len(chosen) < skip + per_task and (
            min_tokens == 0 or len(tokenizer(text.document)["input_ids"]) >= min_tokens
        ):
            chosen.append(text)
    kept = [chosen[skip:] for chosen in found.values()]
    rounds = range(max(map(len, kept), default=0))
    return [chosen[i] for i in rounds for chosen in kept if i < len(chosen)]


def _framed(tokenizer: Any, document: str, instruction: str) -> list[int]:
    content = f"{document}\n\n{instruction}" if instruction else document
    if tokenizer.chat_template is None:
        return list(tokenizer(content)["input_ids"])
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rows(folder: Path, task: str) -> Iterator[dict[str, Any]]:
    path = folder / f"{task}.jsonl"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.jsonl"))
        raise FileNotFoundError(f"no {path.name} in {folder}, which has the tasks {known}")
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)
