"""Everything that can be chosen about the cache, validated in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

Digest = Literal["minmax", "cuboid_mean", "mean_spread"]
GroupReduction = Literal["max", "softmax_sum"]
FirstRank = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class FlexiCacheConfig:
    """How pages are made, ranked and moved. `FlexiCacheConfig.paper()` is the published method.

    Attributes:
        token_budget: tokens each KV head attends to in a decode step; a multiple of `page_size`.
        page_size: tokens per page (paper: 16).
        rerank_interval: decode steps between two rankings of a stable head (paper: 16). None ranks
            at the first decode step only (the paper's "no re-rank" ablation).
        digest: what summarises a page for ranking, two vectors each: element-wise `minmax` (paper,
            section 3); `cuboid_mean` (ArkVale): box centre minus/plus the mean absolute deviation
            from it; `mean_spread`: mean and variance. Only the first is a bound.
        digests_per_page: sub-pages summarised apart; a page scores as its best sub-page. More rank
            better and cost proportionally more metadata. Must divide `page_size`.
        group_reduction: how the scores of the query heads that share a KV head become one: `max` of
            raw scores (paper) or `softmax_sum`.
        sink_pages: first pages that every ranking keeps, inside the budget (paper: 0).
        recent_pages: last pages that every ranking keeps, inside the budget. The newest page always
            counts as one (paper: 1).
        first_rank: who chooses the first working set. `prefill`: the last prompt token, while the
            layer's keys are still on the device, so nothing has to come back; `decode`: the first
            decode step, which then waits for its pages (paper).
        stagger: rank layer l when (s + l) % rerank_interval == 0, so that the traffic of a step is
            even; False ranks all layers at the same step (paper).
        verify_tokens: a forward of at most this many tokens during assisted decoding attends
            sparsely, like that many decode steps at once. Longer ones are dense.
        auto_windows: windows of 16 decode steps, over all rows, after which `profile="auto"`
            assigns the heads.
        host_memory_limit: bytes of host memory the cache may allocate; None is no limit.
    """

    token_budget: int = 1024
    page_size: int = 16
    rerank_interval: int | None = 16
    digest: Digest = "mean_spread"
    digests_per_page: int = 1
    group_reduction: GroupReduction = "max"
    sink_pages: int = 1
    recent_pages: int = 3
    first_rank: FirstRank = "prefill"
    stagger: bool = True
    verify_tokens: int = 32
    auto_windows: int = 8
    host_memory_limit: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, "page_size", 1)
        _at_least(self, "token_budget", self.page_size, "at least one page")
        if self.token_budget % self.page_size:
            raise ValueError(
                f"token_budget is {self.token_budget}, expected a multiple of page_size "
                f"({self.page_size}); try {self.token_budget // self.page_size * self.page_size}"
            )
        if self.rerank_interval is not None:
            _at_least(self, "rerank_interval", 1, "or None to rank at the first step only")
        _at_least(self, "digests_per_page", 1)
        if self.page_size % self.digests_per_page:
            raise ValueError(
                f"digests_per_page is {self.digests_per_page}, expected a divisor of page_size "
                f"({self.page_size})"
            )
        _at_least(self, "sink_pages", 0)
        _at_least(self, "recent_pages", 1, "the newest page is always attended")
        _at_least(self, "verify_tokens", 1)
        _at_least(self, "auto_windows", 1)
        if self.host_memory_limit is not None:
            _at_least(self, "host_memory_limit", 0, "bytes, or None for no limit")
        _one_of(self, "digest", ("minmax", "cuboid_mean", "mean_spread"))
        _one_of(self, "group_reduction", ("max", "softmax_sum"))
        _one_of(self, "first_rank", ("prefill", "decode"))

    @classmethod
    def paper(cls, **changes: Any) -> FlexiCacheConfig:
        """The semantics of the authors' code to the letter (docs/design.md lists them)."""
        published: dict[str, Any] = {
            "digest": "minmax",
            "sink_pages": 0,
            "recent_pages": 1,
            "first_rank": "decode",
            "stagger": False,
        }
        return cls(**(published | changes))

    def replace(self, **changes: Any) -> FlexiCacheConfig:
        return replace(self, **changes)

    @property
    def pages(self) -> int:
        """K: pages each KV head attends to."""
        return self.token_budget // self.page_size

    @property
    def kept_recent(self) -> int:
        """Recent pages that fit inside the budget, the newest included."""
        return min(self.recent_pages, self.pages)

    @property
    def kept_sink(self) -> int:
        """Sink pages that fit inside the budget beside the recent ones."""
        return min(self.sink_pages, self.pages - self.kept_recent)


def _at_least(config: FlexiCacheConfig, field: str, least: int, hint: str = "") -> None:
    found = getattr(config, field)
    if not isinstance(found, int) or isinstance(found, bool) or found < least:
        reason = f" ({hint})" if hint else ""
        raise ValueError(f"{field} is {found!r}, expected an integer of at least {least}{reason}")


def _one_of(config: FlexiCacheConfig, field: str, allowed: tuple[str, ...]) -> None:
    found = getattr(config, field)
    if found not in allowed:
        raise ValueError(f"{field} is {found!r}, expected one of {', '.join(allowed)}")
