"""FlexiCache through the package's own cache, the one users run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache
from flexicache_hf.integration.layer import FlexiCacheLayer
from flexicache_hf.models.kv_heads import kv_heads

from .base import Method, Session
from .ledger import Tokens
from .pages import count_pages
from .unstable import CHOICES, Choice, choose_unstable


@dataclass(frozen=True)
class FlexiCacheMethod(Method):
    """What the real cache and the mask form have in common: FlexiCacheConfig's choices by name.

    `preset` is the package's default configuration or the paper's; None in a field leaves it as the
    preset has it. `rerank_interval` 0 ranks at the first step only (the "no re-rank" ablation).
    `unstable`, `profile`, `fraction` and `seed` choose the heads, see `choose_unstable`.
    """

    preset: Literal["default", "paper"] = "default"
    page_size: int = 16
    rerank_interval: int = 16
    digest: str | None = None
    digests_per_page: int | None = None
    group_reduction: str | None = None
    sink_pages: int | None = None
    recent_pages: int | None = None
    first_rank: str | None = None
    stagger: bool | None = None
    unstable: Choice = "profile"
    profile: str | None = None
    fraction: float = 0.25
    seed: int = 0

    paper: ClassVar[str] = "https://arxiv.org/abs/2511.00868"
    gqa: ClassVar[str] = "KV head; max of the raw bounds over the group"
    accounting: ClassVar[str] = (
        "attended = budget, plus pages opened since the last ranking for stable heads; resident = "
        "T for unstable heads and the attended tokens for stable ones; moved = newly promoted "
        "pages; metadata = digests of all heads' full pages"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset not in ("default", "paper"):
            raise ValueError(f"preset is {self.preset!r}, expected 'default' or 'paper'")
        if self.unstable not in CHOICES:
            raise ValueError(f"unstable is {self.unstable!r}, expected one of {CHOICES}")
        _ = self.config  # validates the rest

    @property
    def config(self) -> FlexiCacheConfig:
        names = (
            "digest",
            "digests_per_page",
            "group_reduction",
            "sink_pages",
            "recent_pages",
            "first_rank",
            "stagger",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        make = FlexiCacheConfig.paper if self.preset == "paper" else FlexiCacheConfig
        return make(
            token_budget=self.budget,
            page_size=self.page_size,
            rerank_interval=self.rerank_interval or None,
            **given,
        )

    def resolved(self) -> dict[str, Any]:
        return asdict(self.config)

    def notes(self) -> list[str]:
        notes = [] if self.preset == "default" else [self.preset]
        if self.unstable != "profile":
            notes.append(f"{self.unstable} unstable")
        if self.rerank_interval == 0:
            notes.append("no re-rank")
        return notes


@dataclass(frozen=True)
class FlexiCache(FlexiCacheMethod):
    """`flexicache_hf.FlexiCacheDynamicCache`, tiers and transfers included."""

    name: ClassVar[str] = "flexicache"
    title: ClassVar[str] = "FlexiCache"

    @property
    def replays(self) -> bool:
        return False  # the cache builds its tiers in the prompt's own forward

    def session(self, model: Any) -> Session:
        return FlexiCacheSession(self, model)


class FlexiCacheSession(Session):
    method: FlexiCacheMethod
    _newest: FlexiCacheDynamicCache | None = None

    def _enter(self, stack: ExitStack) -> None:
        method = self.method
        self._profile = choose_unstable(
            self.model, method.unstable, method.profile, method.fraction, method.seed
        )
        self._open = True
        stack.callback(setattr, self, "_open", False)
        config = self.model.config.get_text_config(decoder=True)
        stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)

    def new_cache(self, prompt: Any = None) -> FlexiCacheDynamicCache:
        if prompt is not None:
            self._refuse_unless_replays()
        if not getattr(self, "_open", False):
            raise RuntimeError("new_cache() outside the session: use it inside `with session`")
        self._newest = FlexiCacheDynamicCache(
            self.model.config, self._profile, config=self.method.config
        )
        return self._newest

    def tokens(self, cache: FlexiCacheDynamicCache | None = None) -> Tokens:
        """From the cache's own counters. Lengths include padding; steps beyond the counters'
        window (4096) are left out."""
        cache = cache or self._newest
        if cache is None:
            raise RuntimeError("tokens() before new_cache(): there is nothing to account for")
        page, pages = self.method.page_size, self.method.config.pages
        tiered = [i for i, layer in enumerate(cache.layers) if isinstance(layer, FlexiCacheLayer)]
        text = self.model.config.get_text_config(decoder=True)
        heads = sum(kv_heads(text, index) for index in tiered)
        unstable = sum(len(cache.profile.unstable_in(index)) for index in tiered)
        steps = cache.stats().steps
        length = cache.get_seq_length() - sum(step.tokens for step in steps)
        columns: dict[str, list[float]] = {name: [] for name in Tokens.__dataclass_fields__}
        for step in steps:
            length += step.tokens
            if not step.decode:
                continue
            rows = cache.layers[tiered[0]].rows
            total = count_pages(length, page)
            free = total * page - length  # slots of the newest page that no token fills yet
            held = step.attended / rows + unstable * (total - min(pages, total))
            attended = step.attended / rows / heads * page - free
            columns["attended"].append(attended)
            columns["union"].append(attended)
            columns["resident"].append(held / heads * page - free)
            columns["moved"].append(step.promoted / rows / heads * page)
            digests = length // page * self.method.config.digests_per_page
            columns["metadata"].append(digests / length)
            columns["length"].append(length)
        return Tokens(**{name: tuple(column) for name, column in columns.items()})
