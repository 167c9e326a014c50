"""Quest: query-aware page selection over a cache that stays on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .base import Method, Selector
from .ledger import Footprint
from .pages import Digest, count_pages, pages_of, to_tokens, top_pages
from .views import Prompt, Step

MIN_PAGES = 3


@dataclass(frozen=True)
class Quest(Method):
    """Every query head attends the K pages with the highest min/max bound of its own query.

    The first two layers are dense. The partial last page has a bound of its own; `last_page`
    "forced" always takes it as one of the K (the deployed kernel), "ranked" lets it compete (the
    accuracy code).
    """

    page: int = 16
    dense_layers: int = 2
    last_page: Literal["forced", "ranked"] = "forced"

    name: ClassVar[str] = "quest"
    title: ClassVar[str] = "Quest"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.10774"
    gqa: ClassVar[str] = "query head; raw bounds, no group combination"
    accounting: ClassVar[str] = (
        "attended = budget (at least 3 pages) outside the dense layers; resident = T; "
        "metadata 1/page of dense KV"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        pages_of(self.budget, self.page)
        if self.last_page not in ("forced", "ranked"):
            raise ValueError(f"last_page is {self.last_page!r}, expected 'forced' or 'ranked'")

    def notes(self) -> list[str]:
        return [] if self.last_page == "forced" else ["last page ranked"]

    def selector(self, model: Any) -> Selector:
        return QuestSelector(self)


@dataclass(frozen=True)
class QuestSelector(Selector):
    method: Quest

    def begin(self, prompt: Prompt) -> Digest:
        digest = Digest(self.method.page)
        digest.update(prompt.keys)
        return digest

    def select(self, step: Step, state: Digest) -> Tensor:
        method = self.method
        pages = count_pages(step.length, method.page)
        count = max(MIN_PAGES, method.budget // method.page)
        state.update(step.keys)
        if step.layer < method.dense_layers or count >= pages:
            return torch.ones(step.keys.shape[:2], dtype=torch.bool, device=step.keys.device)
        scores = state.scores(step.per_group(step.query), step.keys).flatten(0, 1)
        forced = None
        if method.last_page == "forced":
            forced = torch.arange(pages, device=scores.device) == pages - 1
        return to_tokens(top_pages(scores, count, forced), method.page, step.length)

    def footprint(self, step: Step, state: Digest, mask: Tensor) -> Footprint:
        if step.layer < self.method.dense_layers:
            return Footprint(step.length)
        pages = count_pages(step.length, self.method.page)
        return Footprint(step.length, metadata=2 * pages * step.keys.shape[-1])
