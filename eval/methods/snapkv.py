"""SnapKV: the prompt is compressed once, by what its last tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Method, Selector
from .ledger import Footprint
from .views import Prompt, Step


@dataclass(frozen=True)
class SnapKV(Method):
    """Keep the last `window` prompt tokens and those with the highest pooled attention from them,
    `budget` in all; every generated token stays.

    `group` "query" is the official rule, a set per query head over a cache expanded to query
    heads; "mean" averages the group and selects per KV head (kvpress).
    """

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    group: Literal["query", "mean"] = "query"

    name: ClassVar[str] = "snapkv"
    title: ClassVar[str] = "SnapKV"
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"
    gqa: ClassVar[str] = "query head (group='mean': KV head, mean of the softmax weights)"
    accounting: ClassVar[str] = (
        "budget = kept prompt tokens per selecting head, generated tokens on top; resident counts "
        "the union over the group (the official cache stores one copy per query head)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.window < self.budget:
            raise ValueError(
                f"window is {self.window}, expected 1 to {self.budget - 1}: it is kept inside the "
                f"budget of {self.budget} tokens"
            )
        if self.kernel % 2 == 0 or self.kernel < 1:
            raise ValueError(f"kernel is {self.kernel}, expected an odd number")
        if self.pooling not in ("max", "avg") or self.group not in ("query", "mean"):
            raise ValueError(
                f"pooling is {self.pooling!r} and group is {self.group!r}, expected 'max' or "
                "'avg' and 'query' or 'mean'"
            )

    def notes(self) -> list[str]:
        return [] if self.group == "query" else ["KV head"]

    def selector(self, model: Any) -> Selector:
        return SnapKVSelector(self)


@dataclass(frozen=True)
class SnapKVSelector(Selector):
    method: SnapKV

    def begin(self, prompt: Prompt) -> Tensor:
        """The alive prompt tokens, bool `[H, T]`; fixed from here on."""
        method, length = self.method, prompt.length
        if length <= method.budget:
            return torch.ones(prompt.keys.shape[:2], dtype=torch.bool, device=prompt.keys.device)
        weights = prompt.weights(length - method.window)
        if method.group == "mean":
            weights = prompt.per_group(weights).mean(1)
        scores = pooled(weights.sum(1)[:, : length - method.window], method.kernel, method.pooling)
        kept = scores.topk(method.budget - method.window, -1).indices
        alive = torch.zeros(len(scores), length, dtype=torch.bool, device=scores.device)
        alive.scatter_(-1, kept, True)[:, length - method.window :] = True
        return alive

    def select(self, step: Step, state: Tensor) -> Tensor:
        return F.pad(state, (0, step.length - state.shape[-1]), value=True)

    def footprint(self, step: Step, state: Tensor, mask: Tensor) -> Footprint:
        union = mask.view(step.keys.shape[0], -1, step.length).any(1)
        return Footprint(resident=union.sum() / len(union))


def pooled(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """`[H, T]` smoothed along T at stride 1; the average counts the padding at the ends."""
    pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
    return pool(scores, kernel, stride=1, padding=kernel // 2)
