"""TOVA: the state is cut to a fixed size after every forward, by the last query's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Method, Selector
from .ledger import Footprint
from .views import Prompt, Step


@dataclass(frozen=True)
class TOVA(Method):
    """One set per layer: the `budget` tokens with the highest weight, averaged over all heads.

    Neither first nor recent tokens are protected. A step attends the state and its own token, and
    drops one afterwards.
    """

    name: ClassVar[str] = "tova"
    title: ClassVar[str] = "TOVA"
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06104"
    gqa: ClassVar[str] = "layer; softmax weights, mean over all query heads"
    accounting: ClassVar[str] = "budget = tokens kept between steps; attended = resident = budget+1"

    def selector(self, model: Any) -> Selector:
        return TOVASelector(self)


@dataclass
class Alive:
    """Positions never dropped so far, bool `[T]` or `[H, T]`."""

    mask: Tensor

    def grow(self, length: int) -> Tensor:
        """A new token is alive."""
        self.mask = F.pad(self.mask, (0, length - self.mask.shape[-1]), value=True)
        return self.mask


@dataclass(frozen=True)
class TOVASelector(Selector):
    method: TOVA

    def begin(self, prompt: Prompt) -> Alive:
        alive = torch.ones(prompt.length, dtype=torch.bool, device=prompt.keys.device)
        return Alive(keep(prompt.weights(prompt.length - 1)[:, 0], alive, self.method.budget))

    def select(self, step: Step, state: Alive) -> Tensor:
        return state.grow(step.length).expand(step.keys.shape[0], -1)

    def after(self, step: Step, state: Alive, weights: Tensor) -> None:
        state.mask = keep(weights, state.mask, self.method.budget)

    def footprint(self, step: Step, state: Alive, mask: Tensor) -> Footprint:
        return Footprint(resident=mask[0].sum())


def keep(weights: Tensor, alive: Tensor, capacity: int) -> Tensor:
    """The `capacity` alive tokens with the highest mean of `weights` `[H_q, T]`, bool `[T]`."""
    mean = weights.mean(0).masked_fill(~alive, -1)
    best = mean.topk(min(capacity, len(mean))).indices
    return torch.zeros_like(alive).index_fill_(0, best, True) & alive
