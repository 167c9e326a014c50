"""StreamingLLM: attention sinks and a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .base import Method, Selector
from .ledger import Footprint
from .rope import Rope
from .views import Step


@dataclass(frozen=True)
class StreamingLLM(Method):
    """The first `sink` tokens and the last `budget - sink`, the current one included.

    `positions` "slot" (the paper) rotates keys by their place in the cache; "original" keeps the
    rotation of the text position, as kvpress and the streaming heads of LServe do.
    """

    sink: int = 4
    positions: Literal["slot", "original"] = "slot"

    name: ClassVar[str] = "streamingllm"
    title: ClassVar[str] = "StreamingLLM"
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"
    gqa: ClassVar[str] = "all heads share"
    accounting: ClassVar[str] = "attended = resident = budget"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sink < self.budget:
            raise ValueError(
                f"sink is {self.sink}, expected fewer than the budget of {self.budget} tokens"
            )
        if self.positions not in ("slot", "original"):
            raise ValueError(f"positions is {self.positions!r}, expected 'slot' or 'original'")

    def notes(self) -> list[str]:
        return [] if self.positions == "slot" else ["original positions"]

    def selector(self, model: Any) -> Selector:
        return StreamingSelector(self, Rope(model) if self.positions == "slot" else None)


@dataclass(frozen=True)
class StreamingSelector(Selector):
    method: StreamingLLM
    rope: Rope | None

    def select(self, step: Step, state: Any) -> Tensor:
        evicted = step.length - self.method.budget
        if self.rope is not None and evicted > 0 and self.method.sink:
            # Slots are original positions less the evicted tokens for everything in the window,
            # so that only the distance to the sinks shrinks: move the sinks forward instead.
            sinks, rest = step.keys.split((self.method.sink, step.length - self.method.sink), 1)
            step.keys = torch.cat([self.rope.shift(sinks, evicted), rest], 1)
        mask = sink_and_recent(
            step.length, self.method.sink, self.method.budget - self.method.sink, step.keys.device
        )
        return mask.expand(step.keys.shape[0], -1)

    def footprint(self, step: Step, state: Any, mask: Tensor) -> Footprint:
        return Footprint(resident=min(step.length, self.method.budget))


def sink_and_recent(length: int, sink: int, recent: int, device: Any = None) -> Tensor:
    """Bool `[T]`: positions below `sink` and the last `recent`."""
    at = torch.arange(length, device=device)
    return (at < sink) | (at >= length - recent)
