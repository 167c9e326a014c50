"""FlexiCache, written a second time as simply as possible: dense keys, Python loops and masks.

Nothing here shares code with the package. Everything stays in one dense cache; which tokens a head
may attend to is decided page by page, by the rules of docs/design.md. It is slow, and the measure
that the package is tested against.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "reference_pages"


@dataclass
class Reference:
    """State of one generation: chosen pages per (layer, row, KV head), and who ranked when."""

    unstable: set[tuple[int, int]]
    pages: int
    page_size: int
    interval: int | None
    sink: int
    recent: int
    first_rank: str
    stagger: bool
    digest: str = "minmax"
    softmax_sum: bool = False
    parts: int = 1
    chosen: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    ranked_at: dict[tuple[int, int, int], int] = field(default_factory=dict)  # pages at that time
    prompt: dict[tuple[int, int], int] = field(default_factory=dict)
    log: list[tuple[int, int, int, int]] = field(default_factory=list)  # (layer, row, head, step)

    @classmethod
    def like(cls, config: Any, unstable: Any) -> Reference:
        return cls(
            set(unstable),
            config.token_budget // config.page_size,
            config.page_size,
            config.rerank_interval,
            config.sink_pages,
            config.recent_pages,
            config.first_rank,
            config.stagger,
            config.digest,
            config.group_reduction == "softmax_sum",
            config.digests_per_page,
        )

    def page_score(self, queries: Tensor, keys: Tensor) -> list[float]:
        """Per query, the score of the best sub-page; keys `[P, D]`."""
        best = [-math.inf] * len(queries)
        for block in keys.split(self.page_size // self.parts):
            for i, q in enumerate(queries):
                best[i] = max(best[i], self.block_score(q, block))
        return best

    def block_score(self, q: Tensor, block: Tensor) -> float:
        """sum_d max(q_d lower_d, q_d upper_d), or the mean product and 1.5 standard deviations."""
        if self.digest == "mean_spread":
            spread = (q * block.std(0, correction=0)).norm()
            return (q @ block.mean(0) + 1.5 * spread).item()
        lower, upper = block.min(0).values, block.max(0).values
        if self.digest == "cuboid_mean":
            centre = (lower + upper) / 2
            radius = (block - centre).abs().mean(0)
            lower, upper = centre - radius, centre + radius
        return torch.maximum(q * lower, q * upper).sum().item()

    def rank(self, queries: Tensor, keys: Tensor, scaling: float) -> list[int]:
        """K pages for `queries` `[G, D]` and the tokens `[T, D]` so far; the newest is the last."""
        total = -(-len(keys) // self.page_size)
        newest = total - 1
        if total <= self.pages:
            return list(range(total))
        size = self.page_size
        scores = [self.page_score(queries, keys[p * size : (p + 1) * size]) for p in range(newest)]
        if self.softmax_sum:
            table = (torch.tensor(scores, dtype=torch.float64) * scaling).softmax(0).sum(1)
        else:
            table = torch.tensor(scores, dtype=torch.float64).amax(1)
        recent = min(self.recent, self.pages)
        sink = min(self.sink, self.pages - recent)
        forced = set(range(sink)) | set(range(max(newest - recent + 1, 0), newest))
        others = sorted(set(range(newest)) - forced, key=lambda p: -table[p].item())
        return sorted(forced | set(others[: self.pages - 1 - len(forced)]) | {newest})

    def due(self, step: int, layer: int) -> bool:
        if step == 1:
            return True
        if self.interval is None:
            return False
        return (step + (layer if self.stagger else 0)) % self.interval == 0

    def visible(
        self, layer: int, row: int, head: int, queries: Tensor, keys: Tensor, scaling: float
    ):
        """Token mask `[T]` of a decode step; changes the state as the paper says."""
        length = len(keys)
        total = -(-length // self.page_size)
        step = length - self.prompt[layer, row]
        at = (layer, row, head)
        if (layer, head) in self.unstable:
            pages = set(self.rank(queries, keys, scaling))
        else:
            if at not in self.chosen:  # nobody chose yet: this step ranks before it attends
                self.choose(at, queries, keys, scaling, step)
                pages = set(self.chosen[at])
            else:
                pages = set(self.chosen[at]) | set(range(self.ranked_at[at], total))
                if self.due(step, layer):
                    self.choose(at, queries, keys, scaling, step)
        mask = torch.zeros(length, dtype=torch.bool)
        for page in pages:
            mask[page * self.page_size : (page + 1) * self.page_size] = True
        return mask

    def choose(
        self, at: tuple[int, int, int], queries: Tensor, keys: Tensor, scaling: float, step: int
    ):
        self.chosen[at] = self.rank(queries, keys, scaling)
        self.ranked_at[at] = -(-len(keys) // self.page_size)
        if step:
            self.log.append((*at, step))

    def prompt_end(
        self, layer: int, row: int, queries: Tensor, keys: Tensor, scaling: float
    ) -> None:
        """A dense forward ended; queries `[H, G, D]` of its last token, keys `[H, T, D]`."""
        self.prompt[layer, row] = keys.shape[1]
        for head in range(len(keys)):
            self.chosen.pop((layer, row, head), None)
            if (layer, head) not in self.unstable and self.first_rank == "prefill":
                self.choose((layer, row, head), queries[head], keys[head], scaling, 0)


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    state: Reference | None = getattr(key, "_reference", None)
    if state is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    layer, heads, new = module.layer_idx, key.shape[1], query.shape[2]
    grouped = query.unflatten(1, (heads, -1))
    stored = torch.ones(len(key), key.shape[2], dtype=torch.bool)
    if attention_mask is not None:
        stored = attention_mask[:, 0, -1].expand(len(key), -1)
    if new > 1 or key.shape[2] == 1:
        for row in range(len(key)):
            state.prompt_end(layer, row, grouped[row, :, :, -1], key[row][:, stored[row]], scaling)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    mask = torch.zeros(len(key), heads, 1, key.shape[2], dtype=torch.bool)
    for row in range(len(key)):
        for head in range(heads):
            tokens = key[row, head][stored[row]]
            mask[row, head, 0, stored[row]] = state.visible(
                layer, row, head, grouped[row, head, :, 0], tokens, scaling
            )
    mask = mask.repeat_interleave(query.shape[1] // heads, 1)
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class ReferenceCache(DynamicCache):
    """A dense cache that hands `state` to the reference attention."""

    def __init__(self, model: Any, state: Reference) -> None:
        super().__init__(config=model.config)
        self.state = state

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        marked = keys.view_as(keys)
        marked._reference = self.state
        return marked, values


@contextmanager
def reference_attention(model: Any):
    """The model attends by the reference inside; use a `ReferenceCache`."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
