"""`profile="auto"`: learn which heads are unstable while generating (paper, section 3, online).

The cache starts with every head unstable: all pages on the device, ranked at every step, so nothing
is lost while nothing is known. Windows of 16 decode steps vote exactly as recorded generations do
(`stability.py`). After enough windows the heads are assigned, and at the next forward each layer
hands its stable heads' pages to the host and goes on.

What it costs: until then the device holds a dense cache and its digests, and every step ranks once
more, without forced pages, and copies K page numbers per head to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import FlexiCacheConfig
from ..models.kv_heads import kv_heads
from ..pages.ranking import select_pages
from ..pages.step import Step
from .default_rule import FRACTION
from .profile import HeadProfile
from .stability import WINDOW, StabilityVote, window_rco, window_stability


def while_learning(config: FlexiCacheConfig) -> FlexiCacheConfig:
    """How pages are digested and scored until the heads are known: as profiles are recorded, so
    that a learned profile means the same. The hand-over makes the digests anew."""
    return config.replace(digest="minmax", digests_per_page=1, group_reduction="max")


class HeadLearner:
    """Page sets of the decode steps under way, and the vote of the windows they fill.

    Args:
        config: K, page size and digest of the cache that learns.
        model_config: what the profile will be for.
        layers: model layers that are tiered, in order.
        heads: KV heads of each of them.
    """

    def __init__(
        self,
        config: FlexiCacheConfig,
        model_config: Any,
        layers: Sequence[int],
        heads: Sequence[int],
    ) -> None:
        if config.pages < 2:
            raise ValueError(
                f"token_budget is {config.token_budget}, expected at least two pages "
                f"({2 * config.page_size}) to learn heads with profile='auto'"
            )
        if len(set(heads)) > 1:
            raise ValueError(
                f"layers have {sorted(set(heads))} KV heads, expected one number for all of them "
                "to learn heads with profile='auto': give a profile instead"
            )
        # the published rule: pages that are forced into every set would look stable
        self.rule = while_learning(config).replace(sink_pages=0, recent_pages=1)
        self.model_config = model_config
        self.layers = list(layers)
        text = model_config.get_text_config(decoder=True)
        self.shape = text.num_hidden_layers, kv_heads(text)
        self.vote = StabilityVote(*self.shape, round(FRACTION * sum(heads)))
        self.restart()

    @property
    def ready(self) -> bool:
        """Enough windows have voted."""
        return self.vote.num_windows >= self.rule.auto_windows

    def restart(self) -> None:
        """The next step does not continue the last one: rows changed places, or were cut."""
        self.step: Step | None = None
        self.sets: dict[int, Tensor] = {}  # ordinal -> [B, H, K] of the current step
        self.window: list[Tensor] = []  # [L_tiered, B, H, K] per step
        self.totals: list[tuple[int, ...]] = []  # pages per row, per step

    def observe(self, ordinal: int, scores: Tensor, step: Step) -> None:
        """A layer ranked all its heads.

        Args:
            scores: `[B, H, N]`, owned by this call.
            step: the decode step it did so in.
        """
        if step.columns != 1 or min(step.settled) < self.rule.pages:
            self.restart()  # several tokens at once, or a row that K pages cover: not comparable
            return
        if step is not self.step:
            if self.step is not None and step.start != self.step.lengths:
                self.restart()
            self.step, self.sets = step, {}
        newest = step.newest_pages(scores.device)[:, None].expand(-1, scores.shape[1], -1)
        chosen = torch.cat([select_pages(scores, step.settled, self.rule), newest], -1)
        self.sets[ordinal] = chosen.to("cpu", torch.int32)
        if len(self.sets) == len(self.layers):
            self.window.append(torch.stack([self.sets[i] for i in range(len(self.layers))]))
            self.totals.append(step.pages)
        if len(self.window) == WINDOW:
            self._count()
            self.restart()

    def _count(self) -> None:
        pages = torch.stack(self.window)  # [W, L_tiered, B, H, K]
        for row in range(pages.shape[2]):
            totals = torch.tensor([each[row] for each in self.totals])
            measured = window_stability(window_rco(pages[:, :, row], totals))
            stability = measured.new_full((len(measured), *self.shape), torch.nan)
            stability[:, self.layers, : pages.shape[3]] = measured
            self.vote.add(stability)

    def profile(self) -> HeadProfile:
        """What was learned so far."""
        return HeadProfile.from_vote(
            self.model_config,
            self.vote,
            top_k_pages=self.rule.pages,
            page_size=self.rule.page_size,
            source="learned while generating",
        )
