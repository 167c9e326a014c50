"""Attention over the two tiers of one layer, and the rankings that come with it (paper, section 4).

- A prompt, or any multi-token forward, attends densely to the whole history (`_attend_dense`), with
  the model's own attention function, and then hands every page to the tier its head lives in.
- A decode step stores its token, attends to the selected pages, and ranks what is due
  (`_attend_pages`). While K pages cover every row it attends to all of them through the model's own
  attention function, so results equal the dense cache's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.reference import attend_pages
from ..pages.ranking import is_due
from ..pages.step import Step
from .layer_tiers import Tiers
from .unstable import UnstableHeads

BaseAttention = Callable[..., tuple[Tensor, Tensor | None]]
"""The model's own attention function: `(module, q, k, v, mask, **kwargs) -> (out, weights)`."""


class TierAttention(Tiers):
    """What a layer does with the step that it is in.

    Attributes:
        pending: the step's keys and values `[B, H_kv, q, D]`, not stored yet.
        ignored: keyword arguments of the attention function that it takes no notice of.
    """

    pending: tuple[Tensor, Tensor] | None
    ignored: frozenset[str]

    def _attend_dense(
        self,
        module: torch.nn.Module,
        query: Tensor,
        mask: Tensor | None,
        step: Step,
        base: BaseAttention,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert self.pending is not None
        keys, values = self.pending
        if self.columns:
            past_keys, past_values = self.history(step.start, self.columns, keys, values)
            keys = torch.cat([past_keys, keys], 2)
            values = torch.cat([past_values, values], 2)
            del past_keys, past_values
        if not step.padding_told:
            mask = self._padding_mask(query)  # an own loop that leaves padding to the cache
        out = base(module, query, keys, values, mask, **kwargs)
        with self.changing(), torch.no_grad():
            self.store(keys, values, query, step, attention_scale(query, kwargs))
            self.stored = step.lengths
        return out

    def _attend_pages(
        self,
        module: torch.nn.Module,
        query: Tensor,
        mask: Tensor | None,
        step: Step,
        base: BaseAttention,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert self.pending is not None and self.groups is not None
        keys, values = (new.detach() for new in self.pending)
        stable, unstable = self.groups
        stats = self.shared.stats.current
        with self.changing():
            if self.unstable is not None:
                self.unstable.append(step, unstable.of_batch(keys), unstable.of_batch(values))
            if self.stable is not None:
                stats.device_to_host += self.stable.append(
                    step, stable.of_batch(keys), stable.of_batch(values)
                )
            self.stored = step.lengths

        queries = query.unflatten(1, (keys.shape[1], -1))  # [B, H_kv, G, q, D]
        scaling = attention_scale(query, kwargs)
        early = sorted(self.stable.unranked) if self.stable is not None else []
        if early:
            self._rerank(early, queries, step, scaling)
        columns = self.shared.table.columns
        covered = max(step.pages) <= self.shared.config.pages
        if covered and step.padding_told:
            out, weights = base(
                module, query, *self.history(step.lengths, columns, keys, values), mask, **kwargs
            )
            stats.attended += sum(step.pages) * keys.shape[1]
        else:
            out, weights = self._sparse(queries, step, scaling, kwargs, values.shape[-1]), None
        if self.stable is not None:
            due = [row for row in self._due(step) if row not in early]
            if due:
                self._rerank(due, queries, step, scaling)
        return out, weights

    def _sparse(
        self, queries: Tensor, step: Step, scaling: float, kwargs: dict[str, Any], value_dim: int
    ) -> Tensor:
        """Both groups' attention `[B, q, H_q, D_v]`."""
        assert self.groups is not None
        batch, heads, group, tokens, _ = queries.shape
        softcap, sinks = (
            None if name in self.ignored else kwargs.get(name) for name in ("softcap", "s_aux")
        )
        if sinks is not None:
            sinks = sinks.view(heads, group)
        stats = self.shared.stats.current
        out = None
        for where, store in zip(self.groups, (self.stable, self.unstable), strict=True):
            if store is None:
                continue
            part = where.of_batch(queries)
            if isinstance(store, UnstableHeads):
                keys, values, visible, pages = store.attended(part.flatten(2, 3), step, scaling)
                stats.unstable_ranked += batch * len(where)
            else:
                keys, values, visible, pages = store.attended(step)
            stats.attended += pages * batch * len(where)
            if visible is not None:  # a layer that shares keys may ask with the last tokens only
                visible = visible[:, :, -tokens:]
            chosen_sinks = None if sinks is None else sinks[where.index]
            attended = attend_pages(part, keys, values, visible, scaling, softcap, chosen_sinks)
            if len(where) == heads:
                out = attended
                break
            if out is None:
                out = queries.new_empty(batch, heads, group, tokens, value_dim)
            out[:, where.index] = attended
        assert out is not None
        return out.flatten(1, 2).transpose(1, 2).contiguous()

    def _attend_shared(
        self,
        module: torch.nn.Module,
        query: Tensor,
        mask: Tensor | None,
        base: BaseAttention,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """A layer without keys of its own attends to ours, which this forward has stored.

        Its own queries rank the unstable heads. Of the stable heads it attends to what our queries
        chose; a ranking of this very step serves it already.
        """
        step = self.shared.table.step
        assert step is not None and self.groups is not None and self.is_initialized
        if step.decode and max(step.pages) > self.shared.config.pages:
            heads = sum(map(len, self.groups))
            queries = query.unflatten(1, (heads, -1))
            value_dim = self.value_dim()
            scaling = attention_scale(query, kwargs)
            return self._sparse(queries, step, scaling, kwargs, value_dim), None
        held = self.everything()
        assert held is not None
        return base(module, query, *held, mask, **kwargs)

    def _rerank(self, rows: list[int], queries: Tensor, step: Step, scaling: float) -> None:
        assert self.stable is not None and self.groups is not None
        part = queries[:, self.groups[0].index].flatten(2, 3)
        with self.changing():
            promoted = self.stable.rerank(rows, part, step, scaling)
        stats = self.shared.stats.current
        stats.stable_ranked += len(rows) * len(self.groups[0])
        stats.promoted += promoted
        stats.host_to_device += promoted * self.stable.host.page_bytes

    def _padding_mask(self, query: Tensor) -> Tensor:
        """Additive mask `[B, 1, q, C]` that hides the padding of each row and the future."""
        visible = self.shared.table.visible_columns(query.shape[2]).to(query.device)
        hidden = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        return hidden.masked_fill_(~visible, torch.finfo(query.dtype).min)

    def _due(self, step: Step) -> list[int]:
        config = self.shared.config
        return [
            row
            for row, (before, after) in enumerate(zip(step.steps_before, step.steps, strict=True))
            if is_due(before, after, self.index, config)
        ]


def attention_scale(query: Tensor, kwargs: dict[str, Any]) -> float:
    scaling = kwargs.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)
