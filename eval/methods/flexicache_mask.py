"""FlexiCache in mask form: which pages each head attends, without moving any of them.

Written from the paper's semantics and apart from the package's cache, which it checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flexicache_hf import FlexiCacheConfig

from .base import Selector
from .flexicache import FlexiCacheMethod
from .ledger import Footprint
from .pages import Digest, count_pages, to_tokens, top_pages
from .unstable import choose_unstable
from .views import Prompt, Step


@dataclass(frozen=True)
class FlexiCacheMask(FlexiCacheMethod):
    """Every head attends K pages by the scores of their digests. Unstable heads choose at every
    step. Stable heads choose at s = 1 and when s (s + layer, staggered) is a multiple of the
    interval; that step still attends the old set, and pages opened since the last choice come on
    top of K. The first working set is the first step's own, or the last prompt query's.
    """

    name: ClassVar[str] = "flexicache-mask"
    title: ClassVar[str] = "FlexiCache, mask form"

    def selector(self, model: Any) -> Selector:
        profile = choose_unstable(model, self.unstable, self.profile, self.fraction, self.seed)
        unstable = torch.zeros(profile.num_layers, profile.num_kv_heads, dtype=torch.bool)
        for layer, head in profile.unstable_heads:
            unstable[layer, head] = True
        return FlexiCacheSelector(self.config, unstable)


@dataclass
class FlexiCacheState:
    digest: Digest
    serving: Tensor | None = None  # what stable heads attend: pages at its choice, bool [H_kv, N]
    promoted: int | Tensor = 0  # tokens promoted by the current step, over all stable heads

    def served(self, count: int) -> Tensor:
        """The serving set over `count` pages: those opened since are all in."""
        assert self.serving is not None
        opened = self.serving.new_ones(len(self.serving), count - self.serving.shape[-1])
        return torch.cat([self.serving, opened], -1)


@dataclass(frozen=True)
class FlexiCacheSelector(Selector):
    config: FlexiCacheConfig
    unstable: Tensor  # bool [L, H_kv], H_kv of the layer that has most

    def begin(self, prompt: Prompt) -> FlexiCacheState:
        config = self.config
        state = FlexiCacheState(Digest(config.page_size // config.digests_per_page, config.digest))
        state.digest.update(prompt.keys)
        if config.first_rank == "prefill":
            query = prompt.per_group(prompt.query[:, -1])
            state.serving = self.rank(query, state.digest, prompt.length, prompt.scaling)
        return state

    def ranks(self, step: int, layer: int) -> bool:
        """Whether stable heads choose at decode step `step`."""
        interval = self.config.rerank_interval
        offset = layer if self.config.stagger else 0
        return step == 1 or (interval is not None and (step + offset) % interval == 0)

    def select(self, step: Step, state: FlexiCacheState) -> Tensor:
        page = self.config.page_size
        pages = count_pages(step.length, page)
        unstable = self.unstable[step.layer, : len(step.keys)].to(step.keys.device)
        ranks = self.ranks(step.index, step.layer)
        state.digest.update(step.keys)
        state.promoted = 0

        if not ranks and not unstable.any():
            return to_tokens(state.served(pages), page, step.length)
        best = self.rank(step.per_group(step.query), state.digest, step.length, step.scaling)
        if state.serving is None:
            state.serving = best
        served = state.served(pages)
        if ranks:
            state.promoted = (best & ~served)[~unstable].sum() * page
            state.serving = best  # from the next step on
        return to_tokens(torch.where(unstable[:, None], best, served), page, step.length)

    def rank(self, query: Tensor, digest: Digest, length: int, scaling: float) -> Tensor:
        """The K best of all pages, bool `[H_kv, N]`, for queries `[H_kv, g, D]`."""
        config, parts = self.config, self.config.digests_per_page
        pages = count_pages(length, config.page_size)
        scored = min(digest.pages // parts, pages - 1)  # full, and not the newest
        scores = digest.scores(query)[..., : scored * parts].unflatten(-1, (scored, parts)).amax(-1)
        if config.group_reduction == "softmax_sum":
            scores = torch.softmax(scores * scaling, -1).sum(1)
        else:
            scores = scores.amax(1)
        scores = torch.cat([scores, scores.new_zeros(len(scores), pages - scored)], -1)
        at = torch.arange(pages, device=scores.device)
        forced = (at < config.kept_sink) | (at >= pages - config.kept_recent)
        return top_pages(scores, config.pages, forced)

    def footprint(self, step: Step, state: FlexiCacheState, mask: Tensor) -> Footprint:
        unstable = self.unstable[step.layer, : len(step.keys)].to(mask.device)
        resident = torch.where(unstable, step.length, mask.sum(-1)).float().mean()
        moved = state.promoted / len(unstable)
        digests = step.length // self.config.page_size * self.config.digests_per_page
        return Footprint(resident, moved, metadata=2 * digests * step.keys.shape[-1])
