"""Controls at page granularity: the oracle, chance, and first-and-last pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Method, Selector
from .pages import count_pages, pages_of, to_tokens, top_pages
from .views import Step


@dataclass(frozen=True)
class _Pages(Method):
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        pages_of(self.budget, self.page)

    paper: ClassVar[str] = "https://arxiv.org/abs/2511.00868"
    accounting: ClassVar[str] = "attended = budget (the last page may be partial); resident = T"

    @property
    def count(self) -> int:
        return self.budget // self.page


@dataclass(frozen=True)
class _ControlSelector(Selector):
    method: Any

    def select(self, step: Step, state: Any) -> Tensor:
        pages = self.method.choose(step, count_pages(step.length, self.method.page))
        return to_tokens(pages, self.method.page, step.length)


@dataclass(frozen=True)
class Oracle(_Pages):
    """The K pages with the most true attention mass, chosen anew at every step: what any page
    selection of the same budget is measured against."""

    name: ClassVar[str] = "oracle"
    title: ClassVar[str] = "oracle pages"
    gqa: ClassVar[str] = "KV head; softmax weights summed over the group"

    def selector(self, model: Any) -> Selector:
        return _ControlSelector(self)

    def choose(self, step: Step, pages: int) -> Tensor:
        mass = step.per_group(step.weights()).sum(1)
        padded = F.pad(mass, (0, pages * self.page - step.length))
        return top_pages(padded.unflatten(-1, (pages, self.page)).sum(-1), self.count)


@dataclass(frozen=True)
class Random(_Pages):
    """The last page and K - 1 others drawn anew at every step and KV head."""

    seed: int = 0

    name: ClassVar[str] = "random"
    title: ClassVar[str] = "random pages"
    gqa: ClassVar[str] = "KV head"

    def selector(self, model: Any) -> Selector:
        return _ControlSelector(self)

    def choose(self, step: Step, pages: int) -> Tensor:
        # Seeded by place rather than drawn from one stream: a prompt repeats its own draws.
        place = (self.seed * 1_000_003 + step.layer) * 1_000_003 + step.length
        draws = torch.rand(
            step.keys.shape[0], pages, generator=torch.Generator().manual_seed(place)
        )
        last = torch.arange(pages) == pages - 1
        return top_pages(draws, self.count, last).to(step.keys.device)


@dataclass(frozen=True)
class StreamingPages(_Pages):
    """The first `sink_pages` and the most recent ones: StreamingLLM's set in whole pages."""

    sink_pages: int = 1

    name: ClassVar[str] = "streaming-pages"
    title: ClassVar[str] = "first + last pages"
    gqa: ClassVar[str] = "all heads share"
    accounting: ClassVar[str] = "attended = resident = budget (the last page may be partial)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sink_pages < self.count:
            raise ValueError(
                f"sink_pages is {self.sink_pages}, expected fewer than the {self.count} pages of "
                f"the budget {self.budget}"
            )

    def selector(self, model: Any) -> Selector:
        return _StreamingPagesSelector(self)

    def choose(self, step: Step, pages: int) -> Tensor:
        at = torch.arange(pages, device=step.keys.device)
        kept = (at < self.sink_pages) | (at >= pages - (self.count - self.sink_pages))
        return kept.expand(step.keys.shape[0], -1)


class _StreamingPagesSelector(_ControlSelector):
    def footprint(self, step: Step, state: Any, mask: Tensor) -> Any:
        return super().footprint(step, state, mask)._replace(resident=mask[0].sum())
