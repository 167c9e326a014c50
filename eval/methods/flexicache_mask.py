"""FlexiCache in mask form: which pages each head attends, without moving any of them.

Written from the paper's semantics and apart from the package's cache, which it checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .base import Method, Selector
from .heads import unstable_heads
from .ledger import Footprint
from .pages import Digest, DigestKind, count_pages, pages_of, to_tokens, top_pages
from .views import Prompt, Step

UNSTABLE = ("profile", "none", "all", "random", "most-stable")


@dataclass(frozen=True)
class FlexiCacheMask(Method):
    """Every head attends K = budget / page pages by the bound of its pages' digests. Unstable heads
    choose at every step. Stable heads choose at s = 1 and when s is a multiple of `period`; that
    step still attends the old set, and pages opened since the last choice come on top of K.

    The defaults are the paper's. The last page is always in and is one of the K, as are the first
    `sink_pages` and the last `recent_pages`. `digests` > 1 digests parts of a page, which scores as
    its best part. `reduction` over the group is the max of the raw scores, or the sum of their
    softmax over pages. `first_set` "prompt" lets stable heads serve s = 1 from the last prompt
    query's choice, and what s = 1 chooses from s = 2.

    `unstable` "profile" takes the heads of `profile` (a file or directory); "random" and
    "most-stable" take as many ("most-stable" needs the profile's stability matrix, "random" without
    a profile takes `fraction` of the heads).
    """

    page: int = 16
    period: int = 16
    unstable: Literal["profile", "none", "all", "random", "most-stable"] = "profile"
    profile: str | None = None
    fraction: float = 0.25
    digest: DigestKind = "min-max"
    digests: int = 1
    reduction: Literal["max", "softmax-sum"] = "max"
    sink_pages: int = 0
    recent_pages: int = 1
    first_set: Literal["step", "prompt"] = "step"
    seed: int = 0

    name: ClassVar[str] = "flexicache-mask"
    paper: ClassVar[str] = "https://arxiv.org/abs/2511.00868"
    gqa: ClassVar[str] = "KV head; max of the raw bounds over the group"
    accounting: ClassVar[str] = (
        "attended = budget, plus pages opened since the last ranking for stable heads; resident = "
        "T for unstable heads and the attended tokens for stable ones; moved = newly promoted "
        "pages; metadata digests/page of dense KV"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        pages = pages_of(self.budget, self.page)
        for name, allowed in (
            ("unstable", UNSTABLE),
            ("digest", ("min-max", "cuboid-mean")),
            ("reduction", ("max", "softmax-sum")),
            ("first_set", ("step", "prompt")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {allowed}")
        if self.period < 1:
            raise ValueError(f"period is {self.period}, expected at least 1 step")
        if self.recent_pages < 1 or self.sink_pages < 0:
            raise ValueError(
                f"recent_pages is {self.recent_pages} and sink_pages is {self.sink_pages}, expected"
                " at least 1 (the current page) and at least 0"
            )
        if self.recent_pages + self.sink_pages > pages:
            raise ValueError(
                f"{self.sink_pages} sink and {self.recent_pages} recent pages do not fit into the "
                f"{pages} pages of the budget {self.budget}"
            )
        if self.digests < 1 or self.page % self.digests:
            raise ValueError(
                f"digests is {self.digests}, expected a divisor of the page size {self.page}"
            )

    @property
    def label(self) -> str:
        return f"FlexiCache mask ({self.unstable} unstable)"

    def selector(self, model: Any) -> Selector:
        heads = unstable_heads(model.config, self.unstable, self.profile, self.fraction, self.seed)
        return FlexiCacheSelector(self, heads)


@dataclass
class Ranking:
    """The stable heads' set, bool `[H_kv, N]` over the `N` pages there were when it was chosen."""

    pages: Tensor

    def at(self, count: int) -> Tensor:
        """The set over `count` pages: those opened since are all in."""
        opened = self.pages.new_ones(len(self.pages), count - self.pages.shape[-1])
        return torch.cat([self.pages, opened], -1)


@dataclass
class FlexiCacheState:
    digest: Digest
    serving: Ranking | None = None  # what stable heads attend
    promoted: int | Tensor = 0  # tokens promoted by the current step, over all stable heads


@dataclass(frozen=True)
class FlexiCacheSelector(Selector):
    method: FlexiCacheMask
    unstable: Tensor  # bool [L, H_kv]

    def begin(self, prompt: Prompt) -> FlexiCacheState:
        state = FlexiCacheState(Digest(self.method.page // self.method.digests, self.method.digest))
        state.digest.update(prompt.keys)
        if self.method.first_set == "prompt":
            query = prompt.per_group(prompt.query[:, -1])
            state.serving = Ranking(self.rank(query, state.digest, prompt.length, prompt.scaling))
        return state

    def select(self, step: Step, state: FlexiCacheState) -> Tensor:
        method = self.method
        pages = count_pages(step.length, method.page)
        unstable = self.unstable[step.layer].to(step.keys.device)
        ranks = step.index == 1 or step.index % method.period == 0
        state.digest.update(step.keys)
        state.promoted = 0

        if state.serving is not None and not ranks and not unstable.any():
            return to_tokens(state.serving.at(pages), method.page, step.length)
        query = step.per_group(step.query)
        best = self.rank(query, state.digest, step.length, step.scaling)
        if state.serving is None:
            state.serving = Ranking(best)
        served = state.serving.at(pages)
        if ranks:
            state.promoted = (best & ~served)[~unstable].sum() * method.page
            state.serving = Ranking(best)  # serves from the next step on
        return to_tokens(torch.where(unstable[:, None], best, served), method.page, step.length)

    def rank(self, query: Tensor, digest: Digest, length: int, scaling: float) -> Tensor:
        """The K best of all pages, bool `[H_kv, N]`, for queries `[H_kv, g, D]`."""
        method = self.method
        pages = count_pages(length, method.page)
        scored = min(digest.pages // method.digests, pages - 1)  # full, and not the last
        scores = digest.scores(query)[..., : scored * method.digests]
        scores = scores.unflatten(-1, (scored, method.digests)).amax(-1)
        if method.reduction == "softmax-sum":
            scores = torch.softmax(scores * scaling, -1).sum(1)
        else:
            scores = scores.amax(1)
        scores = torch.cat([scores, scores.new_zeros(len(scores), pages - scored)], -1)
        at = torch.arange(pages, device=scores.device)
        forced = (at < method.sink_pages) | (at >= pages - method.recent_pages)
        return top_pages(scores, method.budget // method.page, forced)

    def footprint(self, step: Step, state: FlexiCacheState, mask: Tensor) -> Footprint:
        unstable = self.unstable[step.layer].to(mask.device)
        resident = torch.where(unstable, step.length, mask.sum(-1)).float().mean()
        moved = state.promoted / len(unstable)
        return Footprint(resident, moved, metadata=2 * state.digest.pages * step.keys.shape[-1])
