"""One tiered layer: what transformers sees as a cache layer, and what calls the attention over it.

`update()` only holds the new keys and values and marks them; everything happens when the attention
function calls `attend()`, which alone knows the query and the mask (`tier_attention.py`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import InterruptedForward
from ..pages.step import Step
from ..tiers.attend import BaseAttention, TierAttention, attention_scale
from .cache_state import Shared
from .checks import check_mask, check_new, check_training
from .compiled import number_of
from .masks import is_causal, read_mask


class FlexiCacheLayer(TierAttention, CacheLayerMixin):
    """Cache layer number `ordinal` among the tiered ones, model layer `index`."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, shared: Shared, ordinal: int, index: int, heads: int) -> None:
        super().__init__()
        self.shared, self.ordinal, self.index = shared, ordinal, index
        self.config_heads = heads
        self.number = number_of(self)
        self.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlexiCacheLayer:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        shared_with_the_model = {"module": self.module, "base": self.base}
        for name, value in vars(self).items():
            if name in ("pending", "unanswered") and value is not None:
                value = tuple(tensor.detach() for tensor in value)
            setattr(copied, name, shared_with_the_model.get(name) or copy.deepcopy(value, memo))
        copied.number = number_of(copied)
        return copied

    def clear(self) -> None:
        """Hold nothing."""
        self.pending: tuple[Tensor, Tensor] | None = None
        self.stable = self.unstable = None
        self.groups = None
        self.columns = 0
        self.rows = 0
        self.stored = ()
        self.linked = False  # the attention function has reported in
        self.unanswered: tuple[Tensor, Tensor] | None = None  # what it has not answered before
        self.ignored: frozenset[str] = frozenset()
        self.module: Callable[[], torch.nn.Module | None] = lambda: None
        self.base: BaseAttention | None = None
        self.torn = False
        self.is_initialized = False

    # -- transformers' contract ------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hold new keys and values `[B, H_kv, q, D]` for the attention function, and mark them.

        Returns them alone once the attention function has reported in; until then everything held,
        so that a foreign attention function still computes what a dense cache would.
        """
        if self.linked and torch.compiler.is_compiling():
            keys, values = key_states, value_states  # the operator holds them when it runs
        else:
            keys, values = self.hold(key_states, value_states)
        # An alias carries the mark: on a tensor we keep it would tie layer and tensor in a cycle,
        # and device memory would wait for the garbage collector. transformers >= 5.24 also passes
        # the keyword arguments that the attention function will get.
        marked = keys.view_as(keys), values.view_as(values)
        for tensor in marked:
            tensor._flexi_layer = self  # type: ignore[attr-defined]
        if isinstance(passed := kwargs.get("kwargs"), dict):
            passed["flexi_layer"] = self
        return marked

    def hold(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Hold new keys and values; returns everything held."""
        check_new(self, key_states)
        keys, values = key_states, value_states
        self.unanswered = self.pending
        if self.pending is not None:
            keys = torch.cat([self.pending[0], keys], 2)
            values = torch.cat([self.pending[1], values], 2)
        self.pending = (keys, values)
        return keys, values

    @property
    def keys(self) -> Tensor | None:
        """What all keys would be, `[B, H_kv, C, D]`, on the meta device; None before the first.

        Models that look into a cache (Mllama) ask whether a layer holds anything.
        """
        return self.like("keys")

    @keys.setter
    def keys(self, value: None) -> None:
        _refuse_setting("keys", value)

    @property
    def values(self) -> Tensor | None:
        """What all values would be, `[B, H_kv, C, D_v]`, on the meta device."""
        return self.like("values")

    @values.setter
    def values(self, value: None) -> None:
        _refuse_setting("values", value)

    def get_seq_length(self) -> int:
        """Columns cached, padding included, as transformers counts."""
        return self.columns + (self.pending[0].shape[2] if self.pending is not None else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that masks have to cover: everything, though decode steps
        read less."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    # The cache moves all layers together, because they share the page table.

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("crop the whole cache: FlexiCacheDynamicCache.crop")

    def reset(self) -> None:
        raise NotImplementedError("reset the whole cache: FlexiCacheDynamicCache.reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("reorder the whole cache: FlexiCacheDynamicCache.reorder_cache")

    # -- attention -------------------------------------------------------------------------------

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        mask: Tensor | None,
        base: BaseAttention,
        ignored: frozenset[str] = frozenset(),
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of `query` `[B, H_q, q, D]` over this layer: `([B, q, H_q, D_v], weights)`.

        Args:
            mask: what transformers made for the model's own attention function.
            base: that function.
            ignored: keyword arguments that it takes no notice of.
        """
        self.base, self.ignored = base, ignored
        if module is not None and self.module() is not module:
            self.module = weakref.ref(module)
        if self.pending is None:  # a layer that shares this one's keys and values
            return self._attend_shared(module, query, mask, base, **kwargs)
        keys, values = self.pending
        self.linked = True
        try:
            step = self._enter(query, mask, kwargs)
        except Exception:
            self.pending = self.unanswered  # a refused forward leaves nothing behind
            raise
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        elif self.profile is not self.shared.profile:
            with self.changing():
                self.reassign(keys, values, query, attention_scale(query, kwargs))
        with self.changing():
            for group in (self.stable, self.unstable):
                if group is not None:
                    group.reserve()
        if step.decode:
            out = self._attend_pages(module, query, mask, step, base, **kwargs)
        else:
            out = self._attend_dense(module, query, mask, step, base, **kwargs)
        self.pending = self.unanswered = None
        self.columns = self.shared.table.columns
        self.shared.table.leave(self.ordinal)
        return out

    # -- parts -----------------------------------------------------------------------------------

    def _enter(self, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Step:
        """The step of this forward; the first layer decides how it is taken and checks it fits."""
        assert self.pending is not None
        table, shared = self.shared.table, self.shared
        if (step := table.current(self.ordinal)) is not None:
            if step.columns != self.pending[0].shape[2]:
                raise InterruptedForward(
                    f"layer {self.index} got {self.pending[0].shape[2]} new tokens, but layers "
                    f"before it {step.columns}: an earlier forward stopped between them. Take back "
                    "its tokens with cache.crop(-n), or start over with cache.reset()."
                )
            return step
        table.check_completed(self.ordinal)
        check_training(self, query)
        rows, _, new, key_dim = self.pending[0].shape
        keep, agrees, told = None, True, mask is not None
        if mask is not None:
            check_mask(self, mask, table.columns + new)
            keep, agrees, told = read_mask(mask, new, table.lengths)
        decode = (
            shared.is_decode(new)
            and table.columns > 0
            and query.shape[2] == new
            and kwargs.get("position_bias") is None
        )
        if decode and not (agrees and (mask is None or is_causal(mask, new))):
            decode = False
            if table.columns > shared.config.token_budget:
                shared.warn_dense()
        page_bytes = (
            shared.config.page_size
            * (key_dim + self.pending[1].shape[3])
            * self.pending[0].dtype.itemsize
        )
        shared.page_bytes = page_bytes
        if shared.learner is not None and shared.learner.ready:
            shared.assign_learned()
        shared.budget.check(table.pages_needed(rows, new, keep), page_bytes)
        step = table.enter(rows, new, keep, decode, told)
        shared.stats.open(new, decode)
        return step


def _refuse_setting(name: str, value: Any) -> None:
    """transformers' base class sets None when a layer is made; nobody else may."""
    if value is not None:
        raise AttributeError(
            f"{name} of a tiered layer cannot be set: they lie in pages on two devices. Change the "
            "cache with crop(), batch_select_indices(), reorder_cache() or a forward"
        )
