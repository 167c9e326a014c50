"""One tiered layer: what transformers sees as a cache layer, and the attention over its two groups.

`update()` only holds the new keys and values and marks them; everything happens when the attention
function calls `attend()`, which alone knows the query and the mask:

- a prompt, or any multi-token forward, attends densely to the whole history (`_attend_dense`), with
  the model's own attention function, and then hands every page to the tier its head lives in;
- a decode step stores its token, attends to the selected pages, and ranks what is due
  (`_attend_pages`). While K pages cover every row it attends to all of them through the model's own
  attention function, so results equal the dense cache's bit for bit.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .compiled import number_of
from .errors import AttentionNotLinked, InterruptedForward
from .padding import read_mask
from .ranking import is_due
from .shared import Shared
from .sparse_attention import attend_pages
from .step import Step
from .tiers import Tiers
from .unstable import UnstableHeads

BaseAttention = Callable[..., tuple[Tensor, Tensor | None]]
"""The model's own attention function: `(module, q, k, v, mask, **kwargs) -> (out, weights)`."""


class FlexiCacheLayer(Tiers, CacheLayerMixin):
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
        self._check_new(key_states)
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
    def keys(self, _: None) -> None:
        """transformers' base class sets it when a layer is made."""

    @property
    def values(self) -> Tensor | None:
        """What all values would be, `[B, H_kv, C, D_v]`, on the meta device."""
        return self.like("values")

    @values.setter
    def values(self, _: None) -> None:
        """As for keys."""

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

    def check_unchanged(self, keys: Tensor, values: Tensor) -> None:
        """Raises unless the attention function got the very tensors that update() returned."""
        marks = getattr(keys, "_flexi_layer", None), getattr(values, "_flexi_layer", None)
        if marks[0] is self and marks[1] is self:
            return
        self.pending = self.unanswered
        raise AttentionNotLinked(
            f"layer {self.index}: the model changes keys or values after they were cached (as "
            "DiffLlama and JetMoe do), so attention over pages would not be this model's. Use "
            "transformers' own cache for it."
        )

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
        like = query.new_empty(query.shape[0], sum(map(len, self.groups)), 0, query.shape[-1])
        values = like.new_empty(*like.shape[:3], self.value_dim())
        keys, values = self.history(step.lengths, self.columns, like, values)
        return base(module, query, keys, values, mask, **kwargs)

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
        if self.columns and query.requires_grad and getattr(self.module(), "training", False):
            raise ValueError(
                "the model is in training mode, but no gradient flows into what this cache holds: "
                "call model.eval() or use torch.no_grad(), or train without a cache"
            )
        rows, _, new, key_dim = self.pending[0].shape
        keep, agrees, told = None, True, mask is not None
        if mask is not None:
            self._check_mask(mask, table.columns + new)
            keep, agrees, told = read_mask(mask, new, table.lengths)
        decode = (
            shared.is_decode(new)
            and table.columns > 0
            and query.shape[2] == new
            and agrees
            and kwargs.get("position_bias") is None
        )
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

    def _check_new(self, keys: Tensor) -> None:
        """Raises, with nothing changed, if these keys cannot follow what is cached."""
        self.shared.table.check_whole()
        if not self.is_initialized:
            held = self.held_heads(keys)
            if self.ordinal == 0 and len(held) < self.config_heads:
                if self.shared.learner is not None:
                    raise ValueError(
                        f"profile is 'auto', but this process holds only {len(held)} of "
                        f"{self.config_heads} KV heads: give a measured profile instead"
                    )
                ranks = self.config_heads // len(held)
                self.shared.budget.share = (held.start // len(held), ranks)
        if self.ordinal == 0 and (self.columns or self.pending is not None):
            self._check_implementation()
        table = self.shared.table
        between = self.ordinal == 0 and table.progress[0] != table.forwards  # stored, but not left
        if self.torn or between or (self.pending is not None and self.linked):
            raise InterruptedForward(
                f"layer {self.index}: the last forward stopped inside this layer. "
                + (
                    "Start over with cache.reset()."
                    if self.torn
                    else "Take back its tokens with cache.crop(-n), or call cache.reset()."
                )
            )
        if self.unanswered is not None and keys.shape[2] == 1:
            raise AttentionNotLinked(
                "the attention function of this cache was never called: the model reads another "
                "config object than the one this cache was given, or it does not use transformers' "
                "AttentionInterface. Pass the model, FlexiCacheDynamicCache(model), or call "
                "model.set_attn_implementation('flexicache')."
            )
        rows = self.rows or (self.pending[0].shape[0] if self.pending is not None else 0)
        if rows and keys.shape[0] != rows:
            raise ValueError(
                f"batch size is {keys.shape[0]}, but this cache holds {rows} rows. Use a new "
                "cache, cache.reset(), or change its rows with cache.batch_select_indices() / "
                "cache.batch_repeat_interleave()."
            )

    def _check_mask(self, mask: Tensor, columns: int) -> None:
        if mask.shape[-1] < columns:
            raise AttentionNotLinked(
                f"layer {self.index}: the attention mask covers {mask.shape[-1]} keys, but there "
                f"are {columns}. The model makes it from what the cache returned (as Doge does), "
                "which is only the new keys and values: use transformers' own cache for it."
            )

    def _check_implementation(self) -> None:
        name = self.shared.implementation()
        if name is None or not name.startswith("flexicache"):
            raise AttentionNotLinked(
                f"the model's attention implementation is {name!r}, expected 'flexicache': it was "
                "changed after this cache was made, and a decode step would miss pages. Nothing is "
                "lost: call model.set_attn_implementation('flexicache') (or 'flexicache_eager' for "
                "models without sdpa) and go on."
            )


def attention_scale(query: Tensor, kwargs: dict[str, Any]) -> float:
    scaling = kwargs.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)
