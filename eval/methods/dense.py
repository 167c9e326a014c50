"""The reference: everything is attended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Method, Selector
from .views import Step


class DenseSelector(Selector):
    def select(self, step: Step, state: Any) -> Tensor:
        return torch.ones(step.keys.shape[:2], dtype=torch.bool, device=step.keys.device)


@dataclass(frozen=True)
class Dense(Method):
    """The model's full attention, through the same code as every method."""

    name: ClassVar[str] = "dense"
    title: ClassVar[str] = "dense"
    paper: ClassVar[str] = "https://arxiv.org/abs/1706.03762"
    gqa: ClassVar[str] = "none: all positions"
    accounting: ClassVar[str] = "the budget is not used; attended = resident = T"

    def selector(self, model: Any) -> Selector:
        return DenseSelector()
