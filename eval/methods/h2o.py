"""H2O: heavy hitters by accumulated attention, and recent tokens; the rest is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Method, Selector
from .ledger import Footprint
from .tova import Alive
from .views import Prompt, Step


@dataclass(frozen=True)
class H2O(Method):
    """The real-drop form: attention is accumulated over all prompt queries and every step, and
    after each forward only the heaviest tokens and the recent ones survive, half the budget each
    unless `heavy` says otherwise. Survivors keep their sums and their positions.

    The original has no GQA; our rule is the sum over the group, one set per KV head.
    """

    heavy: int | None = None

    name: ClassVar[str] = "h2o"
    title: ClassVar[str] = "H2O"
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    gqa: ClassVar[str] = "KV head; accumulated softmax weights summed over the group (our choice)"
    accounting: ClassVar[str] = (
        "budget = heavy + recent tokens kept between steps; attended = resident = budget + 1; "
        "metadata one number per kept token"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heavy is not None and not 0 <= self.heavy < self.budget:
            raise ValueError(
                f"heavy is {self.heavy}, expected 0 to {self.budget - 1}: it is part of the budget"
            )

    @property
    def recent(self) -> int:
        return self.budget - (self.budget // 2 if self.heavy is None else self.heavy)

    def selector(self, model: Any) -> Selector:
        return H2OSelector(self)


@dataclass
class Heavy(Alive):
    """`mask` `[H_kv, T]` and the attention received so far, float32 `[H_kv, T]`."""

    received: Tensor

    def drop(self, budget: int, recent: int) -> None:
        length = self.mask.shape[-1]
        if length <= budget:
            return
        self.mask[:, : length - recent] &= _heaviest(
            self.received[:, : length - recent], self.mask[:, : length - recent], budget - recent
        )


@dataclass(frozen=True)
class H2OSelector(Selector):
    method: H2O

    def begin(self, prompt: Prompt) -> Heavy:
        received = prompt.received.clone()  # a recorded prompt serves several caches
        state = Heavy(torch.ones_like(received, dtype=torch.bool), received)
        state.drop(self.method.budget, self.method.recent)
        return state

    def select(self, step: Step, state: Heavy) -> Tensor:
        return state.grow(step.length)

    def after(self, step: Step, state: Heavy, weights: Tensor) -> None:
        state.received = F.pad(state.received, (0, step.length - state.received.shape[-1]))
        state.received += step.per_group(weights).sum(1)
        state.drop(self.method.budget, self.method.recent)

    def footprint(self, step: Step, state: Heavy, mask: Tensor) -> Footprint:
        held = mask.sum() / len(mask)
        return Footprint(resident=held, metadata=held)


def _heaviest(received: Tensor, alive: Tensor, count: int) -> Tensor:
    """Bool `[H, T]` of the `count` alive tokens that received most."""
    best = received.masked_fill(~alive, -1).topk(min(count, received.shape[-1]), -1).indices
    return torch.zeros_like(alive).scatter_(-1, best, True)
