"""Scissorhands, as we read it: tokens that keep receiving little attention are dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Method, Selector
from .ledger import Footprint
from .tova import Alive
from .views import Prompt, Step


@dataclass(frozen=True)
class Scissorhands(Method):
    """When a head holds more than `budget` tokens it drops `drop` of them (None: half the budget):
    those whose attention was most often below the average 1/t during the last `history` queries.
    The last `recent` are safe. At the end of the prompt it is cut to the budget.

    There is no official code; `history` and `recent` are unverified, and the paper's larger budgets
    for later layers are left out.
    """

    history: int = 400
    recent: int = 10
    drop: int | None = None

    name: ClassVar[str] = "scissorhands"
    title: ClassVar[str] = "Scissorhands, our reading"
    paper: ClassVar[str] = "https://arxiv.org/abs/2305.17118"
    gqa: ClassVar[str] = "KV head; softmax weights averaged over the group (our choice)"
    accounting: ClassVar[str] = (
        "budget = most tokens kept between steps; attended = resident swing between budget - drop "
        "and budget, and the current token"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent < self.budget:
            raise ValueError(
                f"recent is {self.recent}, expected 0 to {self.budget - 1}: part of the budget"
            )
        if self.drop is not None and not 0 < self.drop <= self.budget - self.recent:
            raise ValueError(
                f"drop is {self.drop}, expected 1 to {self.budget - self.recent}: the budget less "
                "the recent tokens"
            )
        if self.history < 1:
            raise ValueError(f"history is {self.history}, expected at least 1 query")

    @property
    def dropped(self) -> int:
        """Tokens that go at once."""
        half = max(1, min(self.budget // 2, self.budget - self.recent))
        return half if self.drop is None else self.drop

    def selector(self, model: Any) -> Selector:
        return ScissorhandsSelector(self)


@dataclass
class Importance(Alive):
    """`mask` `[H_kv, T]`; `low` are the last queries' rows of "below average", bool `[H_kv, t]`."""

    low: list[Tensor] = field(default_factory=list)

    def cut(self, target: int, recent: int) -> None:
        """Drop down to `target` tokens a head."""
        length = self.mask.shape[-1]
        counts = torch.zeros_like(self.mask, dtype=torch.int)
        for row in self.low:
            counts[:, : row.shape[-1]] += row
        counts[:, length - recent :] = -1
        keep = counts.masked_fill(~self.mask, torch.iinfo(torch.int).max)
        best = keep.sort(dim=-1, stable=True).indices[:, :target]
        self.mask = torch.zeros_like(self.mask).scatter_(-1, best, True) & self.mask


@dataclass(frozen=True)
class ScissorhandsSelector(Selector):
    method: Scissorhands

    def begin(self, prompt: Prompt) -> Importance:
        method, length = self.method, prompt.length
        state = Importance(torch.ones_like(prompt.keys[..., 0], dtype=torch.bool))
        start = max(0, length - method.history)
        weights = prompt.per_group(prompt.weights(start)).mean(1)  # [H_kv, n, T]
        attended = torch.arange(start + 1, length + 1, device=weights.device)
        low = weights < 1 / attended[:, None]
        seen = torch.arange(length, device=weights.device) < attended[:, None]
        state.low = list((low & seen).unbind(1))
        if length > method.budget:
            state.cut(method.budget, method.recent)
        return state

    def select(self, step: Step, state: Importance) -> Tensor:
        return state.grow(step.length)

    def after(self, step: Step, state: Importance, weights: Tensor) -> None:
        method = self.method
        held = state.mask.sum(-1, keepdim=True)
        state.low.append((step.per_group(weights).mean(1) < 1 / held) & state.mask)
        state.low = state.low[-method.history :]
        if int(held[0]) > method.budget:
            state.cut(method.budget - method.dropped, method.recent)

    def footprint(self, step: Step, state: Importance, mask: Tensor) -> Footprint:
        held = mask.sum() / len(mask)
        return Footprint(resident=held, metadata=held)
