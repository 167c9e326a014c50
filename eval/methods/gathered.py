"""Second implementations that gather or evict for real, to check the mask forms against.

They share nothing with the mask forms but the method's parameters, and take unpadded rows only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from .attention import Attention
from .base import MaskSession
from .cache import AttendingLayer
from .quest import Quest
from .snapkv import SnapKV
from .tova import TOVA


class GatheredLayer(AttendingLayer):
    """Keys and values `[B, H, S, D]` that may be fewer than the tokens seen."""

    def __init__(self, index: int, method: Any) -> None:
        super().__init__()
        self.index, self.method, self.seen = index, method, 0

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += key.shape[2]
        if self.is_initialized and self.keys.shape[1] != key.shape[1]:  # expanded to query heads
            groups = self.keys.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return super().store(key, value)

    def get_seq_length(self) -> int:
        return self.seen

    @torch.no_grad()
    def attend(
        self,
        base: Attention,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        self.pending = False
        if query.shape[2] == self.seen:
            output, _ = base(module, query, key, value, mask, **kwargs)
            self.compress(query, kwargs["scaling"])
            return output
        if query.shape[2] > 1:
            raise NotImplementedError("gathered forms decode one token per forward")
        return self.decode(query, kwargs["scaling"]).transpose(1, 2)

    def compress(self, query: Tensor, scaling: float) -> None:
        """At the end of the prompt, with all its queries `[B, H_q, T, D]`."""

    def decode(self, query: Tensor, scaling: float) -> Tensor:
        """Attention output `[B, H_q, 1, D]` of one token."""
        return self.dense(query, self.keys, self.values, scaling)

    @staticmethod
    def dense(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        groups = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(query, keys, values, scale=scaling)


class GatheredQuest(GatheredLayer):
    def decode(self, query: Tensor, scaling: float) -> Tensor:
        method: Quest = self.method
        page, groups = method.page, query.shape[1] // self.keys.shape[1]
        keys = self.keys.repeat_interleave(groups, 1)  # [B, H_q, T, D]
        values = self.values.repeat_interleave(groups, 1)
        length = keys.shape[2]
        pages = (length + page - 1) // page
        count = max(3, method.budget // page)
        if self.index < method.dense_layers or count >= pages:
            return self.dense(query, keys, values, scaling)
        bounds = torch.stack(
            [
                torch.maximum(query[:, :, 0] * box.amin(2), query[:, :, 0] * box.amax(2)).sum(-1)
                for box in keys.split(page, 2)
            ],
            -1,
        )  # [B, H_q, N]
        if method.last_page == "forced":
            others = bounds[..., :-1].topk(count - 1, -1).indices
            chosen = torch.cat([others, torch.full_like(others[..., :1], pages - 1)], -1)
        else:
            chosen = bounds.topk(count, -1).indices
        at = (chosen[..., None] * page + torch.arange(page)).flatten(2)  # [B, H_q, count * page]
        inside = at < length
        index = at.clamp(max=length - 1)[..., None].expand(-1, -1, -1, keys.shape[-1])
        return F.scaled_dot_product_attention(
            query,
            keys.gather(2, index),
            values.gather(2, index),
            attn_mask=inside[:, :, None],
            scale=scaling,
        )


class GatheredSnapKV(GatheredLayer):
    def compress(self, query: Tensor, scaling: float) -> None:
        method: SnapKV = self.method
        length, window = self.keys.shape[2], method.window
        if length < method.budget:
            return
        groups = query.shape[1] // self.keys.shape[1]
        keys = self.keys.repeat_interleave(groups, 1)
        values = self.values.repeat_interleave(groups, 1)
        scores = query[:, :, -window:] @ keys.transpose(2, 3) * scaling
        scores[..., -window:] += torch.full((window, window), -torch.inf).triu(1)
        weights = scores.softmax(-1)[..., :-window].sum(2)  # [B, H_q, T - w]
        if method.group == "mean":
            weights = weights.unflatten(1, (-1, groups)).mean(2)
            keys, values = self.keys, self.values
        pool = F.max_pool1d if method.pooling == "max" else F.avg_pool1d
        pooled = pool(weights, method.kernel, padding=method.kernel // 2, stride=1)
        kept = pooled.topk(method.budget - window, -1).indices
        kept = torch.cat(
            [kept, torch.arange(length - window, length).expand(*kept.shape[:2], -1)], -1
        )
        index = kept[..., None].expand(-1, -1, -1, keys.shape[-1])
        self.keys, self.values = keys.gather(2, index), values.gather(2, index)


class GatheredTOVA(GatheredLayer):
    def compress(self, query: Tensor, scaling: float) -> None:
        self._cut(query[:, :, -1:], scaling)

    def decode(self, query: Tensor, scaling: float) -> Tensor:
        output = super().decode(query, scaling)
        self._cut(query, scaling)
        return output

    def _cut(self, query: Tensor, scaling: float) -> None:
        if self.keys.shape[2] <= self.method.budget:
            return
        keys = self.keys.repeat_interleave(query.shape[1] // self.keys.shape[1], 1)
        weights = (query @ keys.transpose(2, 3) * scaling).softmax(-1).mean((1, 2))  # [B, S]
        kept = weights.topk(self.method.budget, -1).indices.sort(-1).values
        index = kept[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[-1])
        self.keys, self.values = self.keys.gather(2, index), self.values.gather(2, index)


LAYERS: dict[type, type[GatheredLayer]] = {
    Quest: GatheredQuest,
    SnapKV: GatheredSnapKV,
    TOVA: GatheredTOVA,
}


def gathered_cache(session: MaskSession) -> DynamicCache:
    """A cache for one prompt that gathers what the session's method selects."""
    cache = DynamicCache(config=session.model.config)
    layer = LAYERS[type(session.method)]
    cache.layers = [layer(index, session.method) for index in range(len(cache.layers))]
    return cache
