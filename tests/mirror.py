"""The mask reference: a dense cache that is fed and changed alike, seeing only attended pages.

What a decode step attends is read from the cache itself, layer by layer; the model then computes
the same forward again on a plain dense cache, with that as its mask, and the logits must agree.
Which pages ought to be chosen is for other tests (test_sparse_reference.py, test_stateful.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from helpers import cache_argument
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from flexicache_hf import FlexiCacheDynamicCache
from flexicache_hf.integration.attention import NAMES
from flexicache_hf.integration.layer import FlexiCacheLayer
from flexicache_hf.pages.step import Step


class ReportingLayer(FlexiCacheLayer):
    """Says which tokens a sparse step attends: `seen` `[B, H_kv, q, C]` over columns."""

    seen: Tensor | None = None

    def _sparse(self, queries: Tensor, step: Step, scaling: float, *args):
        self.seen = self._attended(queries, step, scaling)
        return super()._sparse(queries, step, scaling, *args)

    def _attended(self, queries: Tensor, step: Step, scaling: float) -> Tensor:
        columns, size = self.shared.table.columns, self.shared.config.page_size
        stored = torch.ones(len(queries), columns, dtype=torch.bool)
        for row, ranges in enumerate(self.shared.table.padding):
            for begin, end in ranges:
                stored[row, begin:end] = False
        position = stored.cumsum(1) - 1
        page = (position // size).masked_fill(~stored, -2)
        causal = position[:, None] <= position[:, -queries.shape[3] :, None]  # [B, q, C]
        chosen = torch.zeros(*queries.shape[:2], columns, dtype=torch.bool)
        for group, store in zip(self.groups, (self.stable, self.unstable), strict=True):
            if store is self.unstable is not None:
                part = group.of_batch(queries).flatten(2, 3)
                pages = store.select(part, step, scaling)
            elif store is not None:
                pages = store.working_set.pages
            else:
                continue
            chosen[:, group.heads] = (pages[..., None] == page[:, None, None]).any(2)
        return chosen[:, :, None] & causal[:, None]


class DenseTwin(DynamicCache):
    """A DynamicCache that also can do what ours can and transformers' own layers cannot all."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.config, self.rows, self.records = config, 0, False

    def update(self, key_states, *args, **kwargs):
        self.rows = len(key_states)
        return super().update(key_states, *args, **kwargs)

    def reset(self):
        """transformers' sliding and linear layers would keep the sizes of what they held."""
        records = self.records
        self.__init__(self.config)
        if records:
            self.activate_past_recording()

    def activate_past_recording(self):
        self.records = True
        super().activate_past_recording()

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        self.reorder_cache(indices)  # the one change of rows that linear layers know
        self.rows = len(indices)


class MirroredCache(FlexiCacheDynamicCache):
    """Has a dense twin, `dense`, to which every change is made as well."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.dense = DenseTwin(model.config)
        for layer in self._tiered():
            layer.__class__ = ReportingLayer


def _on_both(name: str):
    def change(self, *args):
        getattr(FlexiCacheDynamicCache, name)(self, *args)
        getattr(self.dense, name)(*args)

    return change


for _name in (
    "crop",
    "reset",
    "reorder_cache",
    "batch_repeat_interleave",
    "batch_select_indices",
    "activate_past_recording",
):
    setattr(MirroredCache, _name, _on_both(_name))


class Mirrored:
    """While open, every forward of `model` with a MirroredCache is checked.

    Attributes:
        tolerance: of logits, absolute and relative; 0 for bit for bit.
        sparse: forwards compared in which some layer saw less than all.
        most: the most layers that did so in one forward.
        calls: what every attention of the forward saw, in order; None for everything.
        twin: the same forward runs again, on the dense cache.
    """

    def __init__(self, model: Any, tolerance: float) -> None:
        self.model, self.tolerance = model, tolerance
        self.sparse = self.most = 0
        self.calls: list[Tensor | None] = []
        self.twin = False

    def __enter__(self):
        known = AttentionInterface._global_mapping
        self.functions = {name: known[name] for name in NAMES.values()}
        for name, function in self.functions.items():
            AttentionInterface.register(name, partial(self._attention, function))
        self.mine = set(self.model.modules())
        self.hooks = [
            self.model.register_forward_pre_hook(lambda *_: self.calls.clear()),
            self.model.register_forward_hook(self._compare, with_kwargs=True),
        ]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()
        for name, function in self.functions.items():
            AttentionInterface.register(name, function)

    @torch.no_grad()
    def _compare(self, model, args, kwargs, output):
        name = cache_argument(model)
        cache = kwargs.get(name)
        if not isinstance(cache, MirroredCache):
            return
        count = sum(seen is not None for seen in self.calls)
        self.sparse += count > 0
        self.most = max(self.most, count)
        self.twin = True
        try:
            twin = type(model).forward(model, *args, **{**kwargs, name: cache.dense})
        finally:
            self.twin = False
        assert not self.calls
        found, expected = output.logits, twin.logits
        if (mask := kwargs.get("attention_mask")) is not None:
            kept = mask[:, -found.shape[1] :].bool()
            found, expected = found[kept], expected[kept]
        torch.testing.assert_close(found, expected, rtol=self.tolerance, atol=self.tolerance)
        assert cache.get_seq_length() == cache.dense.get_seq_length()

    def _attention(self, function, module, query, key, value, mask=None, **kwargs):
        mask = kwargs.pop("attention_mask", mask)
        layer = kwargs.get("flexi_layer") or getattr(key, "_flexi_layer", None)
        if module not in self.mine:
            return function(module, query, key, value, mask, **kwargs)
        if not self.twin:
            if layer is not None:
                layer.seen = None
            out = function(module, query, key, value, mask, **kwargs)
            self.calls.append(getattr(layer, "seen", None))
            return out
        seen = self.calls.pop(0)
        if seen is not None:
            seen = seen.repeat_interleave(query.shape[1] // seen.shape[1], 1)
            least = torch.finfo(query.dtype).min
            mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, least)
        return function(module, query, key, value, mask, **kwargs)
