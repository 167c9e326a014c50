"""Token accounting of a method: what each decode step attends, keeps, moves and stores besides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Number = float | Tensor


class Footprint(NamedTuple):
    """One step at one layer, per KV head of that layer."""

    resident: Number  # tokens whose KV is on the device during the step
    moved: Number = 0.0  # tokens copied host -> device because of this step
    metadata: Number = 0.0  # numbers kept besides KV (a token's KV is 2 D numbers)


@dataclass(frozen=True)
class Tokens:
    """Per decode step, averaged over layers, rows and heads. Prefill is not counted.

    Layers that keep transformers' own cache (sliding windows, ...) are left out.
    """

    attended: tuple[float, ...]  # positions in the softmax, per query head
    union: tuple[float, ...]  # positions that any query head of the group attends, per KV head
    resident: tuple[float, ...]  # device tokens, per KV head
    moved: tuple[float, ...]  # host -> device tokens, per KV head
    metadata: tuple[float, ...]  # metadata bytes / dense KV bytes
    length: tuple[float, ...]  # T, the current token included

    @property
    def steps(self) -> int:
        return len(self.length)

    def mean(self) -> dict[str, float]:
        """Every column averaged over the steps; empty before the first step."""
        if not self.steps:
            return {}
        return {name: sum(column) / self.steps for name, column in vars(self).items()}


@dataclass
class Ledger:
    """Sums by decode step; plain data, so that it is copied along with its cache."""

    sums: list[dict[str, Number]] = field(default_factory=list)

    def add(self, step: int, mask: Tensor, groups: int, length: int, footprint: Footprint) -> None:
        """Book one layer and row: `mask` is what step `step` (from 1) attended, `[H_q, T]`."""
        while len(self.sums) < step:
            self.sums.append(dict.fromkeys((*Tokens.__dataclass_fields__, "count"), 0.0))
        heads = mask.shape[0]
        entry: dict[str, Number] = {
            "attended": mask.sum() / heads,
            "union": mask.unflatten(0, (-1, groups)).any(1).sum() * groups / heads,
            "resident": footprint.resident,
            "moved": footprint.moved,
            "metadata": footprint.metadata,
            "length": length,
            "count": 1,
        }
        sums = self.sums[step - 1]
        for name, value in entry.items():
            sums[name] = sums[name] + value

    def tokens(self) -> Tokens:
        def column(name: str) -> tuple[float, ...]:
            return tuple(float(torch.as_tensor(s[name] / s["count"])) for s in self.sums)

        return Tokens(**{name: column(name) for name in Tokens.__dataclass_fields__})
