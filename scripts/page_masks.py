"""The paper's selection rules for many head sets and budgets at once, as masks over one prompt.

Every row of a batch is another variant: which heads are unstable, and K. All rows share the keys
and values of one dense prefill; the tokens decoded since then are each row's own. Attention is
exact, in float32, over the pages that the row's rules select (section 3 of the paper): every head
ranks at step 1; unstable heads at every step, for that step; stable heads at every 16th, for the
next one. The newest page counts among the K; pages opened since a ranking come on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexicache_hf.models.versions import cache_argument

NAME = "flexicache_page_masks"
PAGE, PERIOD = 16, 16


@dataclass(frozen=True)
class Variant:
    """Unstable heads and K; `pages` None attends to everything."""

    unstable: frozenset[tuple[int, int]] = frozenset()
    pages: int | None = None


class PageMasks:
    """Attention of one decode step for all variants; state between steps.

    Args:
        variants: one per row.
        prompt: per layer the keys and values `[H_kv, P, D]` of the prompt.
    """

    def __init__(self, variants: list[Variant], prompt: list[tuple[Tensor, Tensor]]) -> None:
        heads, tokens, _ = prompt[0][0].shape
        whole = tokens // PAGE * PAGE  # shared by all rows; the rest goes to each row's own tokens
        self.prefix = [(k[:, :whole], v[:, :whole]) for k, v in prompt]
        self.tail = [(k[:, whole:], v[:, whole:]) for k, v in prompt]
        self.bounds = [_bounds(keys) for keys, _ in self.prefix]
        everything = 1 << 30
        self.budget = torch.tensor([v.pages or everything for v in variants]).view(-1, 1, 1)
        self.unstable = [
            torch.tensor([[(layer, h) in v.unstable for h in range(heads)] for v in variants])
            for layer in range(len(prompt))
        ]
        self.chosen: dict[int, Tensor] = {}  # layer -> [R, H_kv, pages at the last ranking]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """`query` `[R, H_q, 1, D]`; `key`, `value` `[R, H_kv, s, D]` since the prompt."""
        rows, heads, step = key.shape[:3]
        keys, values = self.prefix[layer]
        key, value = (
            torch.cat((rest.expand(rows, -1, -1, -1), own), dim=2)
            for rest, own in zip(self.tail[layer], (key, value), strict=True)
        )
        grouped = query.view(rows, heads, -1, query.shape[-1])
        pages = self._pages(layer, grouped, key, step)
        tokens = keys.shape[1] + key.shape[2]
        mask = pages.repeat_interleave(PAGE, dim=-1)[..., :tokens].unsqueeze(2)
        logits = torch.cat((grouped @ keys.mT, grouped @ key.mT), dim=-1) * scale
        weights = logits.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        old, new = weights.split((keys.shape[1], key.shape[2]), dim=-1)
        return (old @ values + new @ value).view(rows, 1, -1, value.shape[-1])

    def _pages(self, layer: int, grouped: Tensor, key: Tensor, step: int) -> Tensor:
        """Attended pages `[R, H_kv, N]`."""
        signed = torch.cat((grouped.clamp(min=0), grouped.clamp(max=0)), dim=-1)
        scores = signed @ self.bounds[layer].mT
        own = key.shape[2]
        total = scores.shape[-1] + -(-own // PAGE)
        if full := own // PAGE:
            scores = torch.cat((scores, signed @ _bounds(key[:, :, : full * PAGE]).mT), dim=-1)
        best = scores.amax(dim=2)[..., : total - 1]
        place = best.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        fresh = _extended(place < self.budget - 1, total)
        if step == 1:
            self.chosen[layer] = fresh
        kept = _extended(self.chosen[layer], total)
        if step > 1 and step % PERIOD == 0:
            self.chosen[layer] = fresh
        return torch.where(self.unstable[layer].unsqueeze(-1), fresh, kept)


@contextmanager
def masked(model: Any, masks: PageMasks) -> Iterator[None]:
    """Within this context the decode steps of `model` attend through `masks`."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        return masks.attend(module.layer_idx, query, key, value, scale), None

    config = model.config.get_text_config(decoder=True)
    base = config._attn_implementation
    AttentionMaskInterface.register(NAME, sdpa_mask)
    ALL_ATTENTION_FUNCTIONS[NAME] = attention
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = base
        del ALL_ATTENTION_FUNCTIONS[NAME]


@torch.no_grad()
def compare_variants(
    model: Any, prompt: Tensor, variants: list[Variant], steps: int
) -> list[tuple[float, float]]:
    """Mean KL(dense || variant) in nats and top-1 agreement, over the dense model's own greedy
    continuation of `prompt` `[1, P]`. The prefill is dense for all and is not counted."""
    name = cache_argument(model)
    cache = DynamicCache(config=model.config)
    logits = model(prompt, **{name: cache}, use_cache=True, logits_to_keep=1).logits
    token = int(logits[0, -1].argmax())
    rows = [Variant(), *variants]
    masks = PageMasks(rows, [(layer.keys[0], layer.values[0]) for layer in cache.layers])
    cache = DynamicCache(config=model.config)
    kl, agreed = torch.zeros(len(variants)), torch.zeros(len(variants))
    with masked(model, masks):
        for step in range(steps):
            ids = torch.full((len(rows), 1), token)
            at = torch.full_like(ids, prompt.shape[1] + step)
            logits = model(ids, position_ids=at, use_cache=True, **{name: cache}).logits
            found = logits[:, -1].float().log_softmax(-1)
            dense, others = found[:1], found[1:]
            kl += (dense.exp() * (dense - others)).sum(-1)
            agreed += dense.argmax(-1) == others.argmax(-1)
            token = int(dense.argmax())
    return [(float(k) / steps, float(a) / steps) for k, a in zip(kl, agreed, strict=True)]


def _bounds(keys: Tensor) -> Tensor:
    """Max, then min of every page: `[..., P, D]` -> `[..., P / 16, 2 D]`."""
    pages = keys.reshape(*keys.shape[:-2], -1, PAGE, keys.shape[-1])
    return torch.cat((pages.amax(dim=-2), pages.amin(dim=-2)), dim=-1)


def _extended(pages: Tensor, total: int) -> Tensor:
    """New pages are attended until the next ranking."""
    return torch.nn.functional.pad(pages, (0, total - pages.shape[-1]), value=True)
