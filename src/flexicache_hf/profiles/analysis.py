"""From recorded page sets to a head profile, with the evidence for and against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .profile import HeadProfile, vote_facts
from .records import Record, load_record
from .stability import (
    WINDOW,
    SplitHalf,
    StabilityVote,
    TaskOverlap,
    offset_curves,
    split_half,
    task_overlap,
    window_rco,
    window_stability,
)

SAME = ("model_id", "revision", "model_type", "num_layers", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Analysis:
    """What one K and page size say about the heads of a model."""

    profile: HeadProfile
    curves: Tensor  # [W - 1, L, H_kv] mean RCO against offset; NaN where not measured
    overlap: TaskOverlap | None  # None for a single task
    between_windows: SplitHalf
    between_documents: SplitHalf | None  # None for a single document
    documents: int


def load_records(folder: Path) -> list[Record]:
    """All records under `folder`, by task and name.

    Raises:
        FileNotFoundError: there is none.
    """
    paths = sorted(folder.rglob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no records under {folder}; make some with `profile collect`")
    return [load_record(path) for path in paths]


def analyse(
    records: Sequence[Record],
    *,
    top_k: int,
    page_size: int = 16,
    window: int = WINDOW,
    unstable_fraction: float = 0.25,
) -> Analysis:
    """Vote over the windows of all records; every window has one voice, whatever its task.

    Args:
        records: of one model, made with one setting.
        top_k: K, at most the recorded one.
        page_size: one of the recorded ones.
        window: W.
        unstable_fraction: M as a share of the measured heads.

    Raises:
        ValueError: records that do not belong together, a K or page size that was not recorded, or
            no window that counts.
    """
    info = _common_info(records, top_k, page_size)
    layers, heads = info["num_layers"], info["num_kv_heads"]
    measured = len(records[0].layers) * heads
    count = round(unstable_fraction * measured)
    if not 0 < count < measured:
        raise ValueError(
            f"unstable_fraction {unstable_fraction} makes {count} of {measured} heads unstable; "
            "choose one that leaves both kinds"
        )
    ballots: dict[str, StabilityVote] = {}
    everything = StabilityVote(layers, heads, count)
    windows, groups = [], []
    for index, record in enumerate(records):
        found = _all_layers(record, top_k, page_size, window, layers)
        scores = window_stability(found)
        everything.add(scores)
        ballots.setdefault(record.task, StabilityVote(layers, heads, count)).add(scores)
        windows.append(found)
        groups += [index] * len(found)
    named = tuple(sorted(everything.unstable_heads()))
    sets = {
        task: tuple(sorted(ballot.unstable_heads()))
        for task, ballot in ballots.items()
        if ballot.num_windows
    }
    joined = torch.cat(windows)
    scores = window_stability(joined)
    profile = HeadProfile(
        **{name: info[name] for name in SAME},
        unstable_heads=named,
        provenance=_provenance(records, unstable_fraction),
        tasks=tuple(ballots),
        top_k_pages=top_k,
        page_size=page_size,
        window=window,
        task_heads=sets,
        **vote_facts(everything),
    )
    documents = len(set(groups))
    return Analysis(
        profile=profile,
        curves=offset_curves(joined),
        overlap=task_overlap(sets, measured) if len(sets) > 1 else None,
        between_windows=split_half(scores, count),
        between_documents=split_half(scores, count, groups=groups) if documents > 1 else None,
        documents=documents,
    )


def _all_layers(record: Record, top_k: int, page_size: int, window: int, layers: int) -> Tensor:
    """`window_rco` with a place for every layer of the model; NaN where a layer has no record."""
    pages = record.pages[page_size][..., :top_k]
    found = window_rco(pages, record.num_pages[page_size], window)
    spread = torch.full((*found.shape[:2], layers, found.shape[3]), torch.nan, dtype=found.dtype)
    spread[:, :, list(record.layers)] = found
    return spread


def _common_info(records: Sequence[Record], top_k: int, page_size: int) -> dict[str, Any]:
    if not records:
        raise ValueError("no records given; make some with `profile collect`")
    first = records[0]
    for record in records:
        for name in (*SAME, "settings"):
            if record.info[name] != first.info[name]:
                raise ValueError(
                    f"records differ in {name}: {first.task}/{first.name} has "
                    f"{first.info[name]!r}, {record.task}/{record.name} has "
                    f"{record.info[name]!r}; keep such records in folders of their own"
                )
        if record.layers != first.layers:
            raise ValueError(f"records differ in layers: {first.layers} and {record.layers}")
    settings = first.info["settings"]
    if page_size not in settings["page_sizes"]:
        raise ValueError(f"page_size {page_size} was not recorded, only {settings['page_sizes']}")
    if not 1 <= top_k <= settings["top_k"]:
        raise ValueError(
            f"top_k is {top_k}, but the records hold {settings['top_k']} pages of every step; "
            "choose at most that, or collect again with a larger --top-k"
        )
    return first.info


def _provenance(records: Sequence[Record], fraction: float) -> dict[str, Any]:
    tokens = [record.info["prompt_tokens"] for record in records]
    settings = records[0].info["settings"]
    return {
        "documents": len(records),
        "prompt_tokens": f"{min(tokens)} to {max(tokens)}",
        "decode_steps": settings["steps"],
        "unstable_fraction": fraction,
    }
