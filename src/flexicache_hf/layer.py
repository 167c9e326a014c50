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
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .compiled import number_of
from .config import FlexiCacheConfig
from .errors import FlexiCacheWarning
from .heads import held_heads
from .host import HostBudget, HostMemoryError, HostPages
from .learning import HeadLearner
from .profile import HeadProfile
from .ranking import is_due
from .sparse_attention import attend_pages
from .stable import StableHeads
from .stats import CacheStats
from .table import InterruptedForward, PageTable, Step
from .transfer import QueueFactory
from .unstable import UnstableHeads

BaseAttention = Callable[..., tuple[Tensor, Tensor | None]]
"""The model's own attention function: `(module, q, k, v, mask, **kwargs) -> (out, weights)`."""


class AttentionNotLinked(RuntimeError):
    """The model's attention function is not ours, so decode steps would miss pages."""


@dataclass
class Shared:
    """What the layers of one cache share.

    Attributes:
        implementation: name of the attention implementation the model uses right now.
        profile: which heads are unstable; layers follow when it changes.
        rank: see `heads.tensor_parallel_rank`.
        prefilling: whether generate() is about to feed a prompt; None when nobody told. The forward
            that follows consumes it.
        verifying: assisted decoding has begun: short multi-token forwards are decode steps.
        guarded: generate() tells; a forward that it did not announce verifies nothing.
        learner: learns the profile, with `profile="auto"`.
    """

    config: FlexiCacheConfig
    table: PageTable
    stats: CacheStats
    budget: HostBudget
    make_queue: QueueFactory
    implementation: Callable[[], str | None]
    profile: HeadProfile
    rank: int | None = None
    prefilling: bool | None = None
    verifying: bool = False
    guarded: bool = False
    learner: HeadLearner | None = None
    page_bytes: int = 0  # of one page of one head, keys and values

    def assign_learned(self) -> None:
        """Take the learned profile, unless the host has no room for the stable heads' pages."""
        assert self.learner is not None
        learned, self.learner = self.learner.profile(), None
        try:
            budget = replace(self.budget, profile=learned)
            budget.check(self.table.capacity, self.page_bytes)
        except HostMemoryError as error:
            warnings.warn(
                f"the heads were learned, but all stay on the device: {error}",
                FlexiCacheWarning,
                stacklevel=2,
            )
            return
        self.profile, self.budget = learned, budget

    def is_decode(self, new: int) -> bool:
        """Whether a forward of `new` tokens is a decode step; asked once per forward."""
        prefilling, self.prefilling = self.prefilling, None
        if prefilling:
            return False
        verifies = self.verifying and (prefilling is False or not self.guarded)
        return new == 1 or (verifies and new <= self.config.verify_tokens)


@dataclass(frozen=True)
class HeadGroup:
    """KV heads of a layer that are treated alike: `index` selects them without a copy if it can."""

    heads: Tensor
    index: slice | Tensor

    @classmethod
    def of(cls, heads: list[int], device: torch.device) -> HeadGroup:
        tensor = torch.tensor(heads, dtype=torch.long, device=device)
        if heads and heads == list(range(heads[0], heads[-1] + 1)):
            return cls(tensor, slice(heads[0], heads[-1] + 1))
        return cls(tensor, tensor)

    def __len__(self) -> int:
        return len(self.heads)

    def of_batch(self, tensor: Tensor) -> Tensor:
        """These heads out of `[B, H_kv, ...]`."""
        if isinstance(self.index, slice):
            return tensor[:, self.index]
        return tensor.index_select(1, self.index)


class FlexiCacheLayer(CacheLayerMixin):
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
            setattr(copied, name, shared_with_the_model.get(name) or copy.deepcopy(value, memo))
        copied.number = number_of(copied)
        return copied

    def clear(self) -> None:
        """Hold nothing."""
        self.pending: tuple[Tensor, Tensor] | None = None
        self.stable: StableHeads | None = None
        self.unstable: UnstableHeads | None = None
        self.groups: tuple[HeadGroup, HeadGroup] | None = None
        self.columns = 0
        self.rows = 0
        self.stored: tuple[int, ...] = ()  # tokens of each row that this layer has
        self.linked = False  # the attention function has reported in
        self.unanswered: tuple[Tensor, Tensor] | None = None  # what it has not answered before
        self.ignored: frozenset[str] = frozenset()
        self.module: Callable[[], torch.nn.Module | None] = lambda: None
        self.base: BaseAttention | None = None
        self.torn = False  # an exception stopped a change midway
        self.is_initialized = False

    # -- transformers' contract ------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, dimensions, dtype and device from the first keys and values."""
        shared, config = self.shared, self.shared.config
        device = key_states.device
        self.profile = shared.profile
        self.stable = self.unstable = None
        held, chosen = self._held_heads(key_states), self.profile.unstable_in(self.index)
        unstable = [place for place, head in enumerate(held) if head in chosen]
        stable = [place for place, head in enumerate(held) if head not in chosen]
        self.groups = (HeadGroup.of(stable, device), HeadGroup.of(unstable, device))
        if stable:
            host = HostPages(
                len(stable),
                config.page_size,
                key_states.shape[-1],
                value_states.shape[-1],
                key_states.dtype,
                pinned=device.type == "cuda",
                allowance=None,
            )
            host.allowance = shared.budget.allowance(host.page_bytes)
            self.stable = StableHeads(
                self.groups[0].heads,
                key_states[:, self.groups[0].index],
                value_states[:, self.groups[0].index],
                shared.table,
                config,
                shared.make_queue(device),
                host,
            )
        if unstable:
            self.unstable = UnstableHeads(
                self.groups[1].heads, key_states, value_states, shared.table, config
            )
            if shared.learner is not None:
                self.unstable.observer = partial(shared.learner.observe, self.ordinal)
        self.rows = key_states.shape[0]
        self.is_initialized = True

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
        keys, values = key_states.detach(), value_states.detach()
        self.unanswered = self.pending
        if self.pending is not None:
            keys = torch.cat([self.pending[0], keys], 2)
            values = torch.cat([self.pending[1], values], 2)
        self.pending = (keys, values)
        return keys, values

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

    def crop_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        """Follow the table, which was cropped, and copy the pages that rows no longer share."""
        if not self.is_initialized:
            return
        lengths = self.shared.table.lengths
        with self._changing():
            if self.unstable is not None:
                self.unstable.own(copies)
            if self.stable is not None:
                self.stable.reserve()
                sources = {target: source for source, target in copies}
                for row, (before, after) in enumerate(zip(self.stored, lengths, strict=True)):
                    if after < before:
                        self.stable.crop_row(row, before, after, sources)
        self.stored = lengths
        self.columns = self.shared.table.columns

    def select_rows(self, rows: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Follow the table, whose rows are now `rows` of before."""
        if not self.is_initialized:
            return
        with self._changing():
            if self.unstable is not None:
                self.unstable.own(copies)
            if self.stable is not None:
                self.stable.reserve()
                device = self.stable.digests.device
                self.stable.select(torch.tensor(rows, dtype=torch.long, device=device))
        self.rows = len(rows)
        self.stored = self.shared.table.lengths

    def join_rows(self, other: FlexiCacheLayer, copies: Sequence[tuple[int, int]]) -> None:
        """Follow the table, to which the rows of another cache were appended."""
        with self._changing():
            if self.unstable is not None and other.unstable is not None:
                self.unstable.join(other.unstable, copies)
            if self.stable is not None and other.stable is not None:
                self.stable.join(other.stable, self.rows, copies)
        self.rows += other.rows
        self.stored = self.shared.table.lengths
        self.columns = self.shared.table.columns

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
        if module is not None:
            self.module = weakref.ref(module)
        if self.pending is None:  # a layer that shares this one's keys and values
            return self._attend_shared(module, query, mask, base, **kwargs)
        keys, values = self.pending
        try:
            step = self._enter(query, mask, kwargs)
        except Exception:
            self.pending = self.unanswered  # a refused forward leaves nothing behind
            raise
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        elif self.profile is not self.shared.profile:
            with self._changing():
                self._reassign(keys, values, query, _scaling(query, kwargs))
        with self._changing():
            for group in (self.stable, self.unstable):
                if group is not None:
                    group.reserve()
        if step.decode:
            out = self._attend_pages(module, query, mask, step, base, **kwargs)
        else:
            out = self._attend_dense(module, query, mask, step, base, **kwargs)
        self.pending = self.unanswered = None
        self.linked = True
        self.columns = self.shared.table.columns
        self.shared.table.leave(self.ordinal)
        return out

    def check_unchanged(self, keys: Tensor, values: Tensor) -> None:
        """Raises unless the attention function got the very tensors that update() returned."""
        if all(getattr(tensor, "_flexi_layer", None) is self for tensor in (keys, values)):
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
            past_keys, past_values = self._history(step.start, self.columns, keys, values)
            keys = torch.cat([past_keys, keys], 2)
            values = torch.cat([past_values, values], 2)
            del past_keys, past_values
        if not step.padding_told:
            mask = self._padding_mask(query)  # an own loop that leaves padding to the cache
        out = base(module, query, keys, values, mask, **kwargs)
        with self._changing():
            self._store(keys, values, query, step, _scaling(query, kwargs))
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
        keys, values = self.pending
        stable, unstable = self.groups
        stats = self.shared.stats.current
        with self._changing():
            if self.unstable is not None:
                self.unstable.append(step, unstable.of_batch(keys), unstable.of_batch(values))
            if self.stable is not None:
                stats.device_to_host += self.stable.append(
                    step, stable.of_batch(keys), stable.of_batch(values)
                )
            self.stored = step.lengths

        queries = query.unflatten(1, (keys.shape[1], -1))  # [B, H_kv, G, q, D]
        scaling = _scaling(query, kwargs)
        early = sorted(self.stable.unranked) if self.stable is not None else []
        if early:
            self._rerank(early, queries, step, scaling)
        columns = self.shared.table.columns
        covered = max(step.pages) <= self.shared.config.pages
        if covered and step.padding_told:
            out, weights = base(
                module, query, *self._history(step.lengths, columns, keys, values), mask, **kwargs
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
            value_dim = self._value_dim()
            scaling = _scaling(query, kwargs)
            return self._sparse(queries, step, scaling, kwargs, value_dim), None
        like = query.new_empty(query.shape[0], sum(map(len, self.groups)), 0, query.shape[-1])
        values = like.new_empty(*like.shape[:3], self._value_dim())
        keys, values = self._history(step.lengths, self.columns, like, values)
        return base(module, query, keys, values, mask, **kwargs)

    # -- parts -----------------------------------------------------------------------------------

    def _enter(self, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Step:
        """The step of this forward; the first layer decides how it is taken and checks it fits."""
        assert self.pending is not None
        table, shared = self.shared.table, self.shared
        if (step := table.current(self.ordinal)) is not None:
            return step
        rows, _, new, key_dim = self.pending[0].shape
        keep, agrees, told = None, True, mask is not None
        if mask is not None:
            keep, agrees, told = _read_mask(mask, new, table.lengths)
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
        step = table.enter(self.ordinal, rows, new, keep, decode, told)
        shared.stats.open(new, decode)
        return step

    def _store(
        self, keys: Tensor, values: Tensor, query: Tensor, step: Step, scaling: float
    ) -> None:
        """Hand the pages of a dense forward to their tiers; `keys`, `values` `[B, H_kv, C, D]`."""
        assert self.groups is not None
        config, table = self.shared.config, self.shared.table
        stable, unstable = self.groups
        queries = query.unflatten(1, (keys.shape[1], -1))  # [B, H_kv, G, q, D]
        for row in range(len(keys)):
            columns = table.stored_columns(row)
            if isinstance(columns, Tensor):
                columns = columns.to(keys.device)
            row_keys, row_values = keys[row][:, columns], values[row][:, columns]
            first = step.start[row] // config.page_size
            new = slice(first * config.page_size, None)
            if self.unstable is not None:
                self.unstable.store_row(
                    row,
                    first,
                    row_keys[unstable.index][:, new],
                    row_values[unstable.index][:, new],
                )
            if self.stable is not None:
                stable_keys, stable_values = row_keys[stable.index], row_values[stable.index]
                written = self.stable.store_row(
                    row, first, stable_keys[:, new], stable_values[:, new]
                )
                last = step.last[row] if config.first_rank == "prefill" else None
                chosen = None
                if last is not None and -last <= query.shape[2]:
                    chosen = queries[row, stable.index, :, last]
                self.stable.choose_row(row, stable_keys, stable_values, chosen, scaling)
                self.shared.stats.current.device_to_host += written
                if chosen is not None:
                    self.shared.stats.current.stable_ranked += len(stable)

    def _reassign(self, keys: Tensor, values: Tensor, query: Tensor, scaling: float) -> None:
        """The profile was learned: hand the pages of heads that are stable now to the host."""
        held = self.unstable
        assert held is not None and len(held.heads) == keys.shape[1], "all learn as unstable heads"
        self.lazy_initialization(keys, values)
        assert self.groups is not None
        stable, unstable = self.groups
        queries = query.unflatten(1, (keys.shape[1], -1))
        for group in (self.stable, self.unstable):
            if group is not None:
                group.reserve()
        for row, tokens in enumerate(self.stored):
            row_keys, row_values = held.row(row, tokens)
            if self.unstable is not None:
                self.unstable.store_row(
                    row, 0, row_keys[unstable.index], row_values[unstable.index]
                )
            if self.stable is not None:
                stable_keys, stable_values = row_keys[stable.index], row_values[stable.index]
                written = self.stable.store_row(row, 0, stable_keys, stable_values)
                self.shared.stats.current.device_to_host += written
                chosen = queries[row, stable.index, :, -1]
                self.stable.choose_row(row, stable_keys, stable_values, chosen, scaling)

    def _history(
        self, lengths: tuple[int, ...], columns: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Everything stored, as the dense cache would lay it out: `[B, H_kv, columns, D]`, zero
        where padding was. `keys` and `values` give shapes and dtype."""
        assert self.groups is not None
        table = self.shared.table
        full = [new.new_zeros(*new.shape[:2], columns, new.shape[3]) for new in (keys, values)]
        for row, tokens in enumerate(lengths):
            where = table.stored_columns(row)
            where = (
                slice(where.start, where.start + tokens)
                if isinstance(where, slice)
                else (where[:tokens].to(keys.device))
            )
            for group, store in zip(self.groups, (self.stable, self.unstable), strict=True):
                if isinstance(store, StableHeads):
                    parts = store.row(row, tokens)
                    self.shared.stats.current.host_to_device += parts[2]
                elif isinstance(store, UnstableHeads):
                    parts = (*store.row(row, tokens), 0)
                else:
                    continue
                heads = group.index if isinstance(where, slice) else group.heads[:, None]
                for target, part in zip(full, parts[:2], strict=True):
                    target[row][heads, where] = part
        return full[0], full[1]

    def _rerank(self, rows: list[int], queries: Tensor, step: Step, scaling: float) -> None:
        assert self.stable is not None and self.groups is not None
        part = queries[:, self.groups[0].index].flatten(2, 3)
        with self._changing():
            promoted = self.stable.rerank(rows, part, step, scaling)
        stats = self.shared.stats.current
        stats.stable_ranked += len(rows) * len(self.groups[0])
        stats.promoted += promoted
        stats.host_to_device += promoted * self.stable.host.page_bytes

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """An exception in here leaves the layer half changed; it then refuses to go on."""
        self.torn = True
        yield
        self.torn = False

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

    def _value_dim(self) -> int:
        store = self.stable.working_set if self.stable is not None else self.unstable
        assert store is not None
        return store.values.shape[-1]

    def _held_heads(self, keys: Tensor) -> range:
        return held_heads(keys.shape[1], self.config_heads, self.shared.rank, self.index)

    def _check_new(self, keys: Tensor) -> None:
        """Raises, with nothing changed, if these keys cannot follow what is cached."""
        if not self.is_initialized:
            held = self._held_heads(keys)
            if self.ordinal == 0 and len(held) < self.config_heads:
                if self.shared.learner is not None:
                    raise ValueError(
                        "profile is 'auto', but this process holds only "
                        f"{len(held)} of {self.config_heads} KV heads: a share of the heads cannot "
                        "be ranked against the others. Learn in one process, or give a profile"
                    )
                ranks = self.config_heads // len(held)
                self.shared.budget.share = (held.start // len(held), ranks)
        name = self.shared.implementation()
        used = self.columns or self.pending is not None
        if used and (name is None or not name.startswith("flexicache")):
            raise AttentionNotLinked(
                f"the model's attention implementation is {name!r}, expected 'flexicache': it was "
                "changed after this cache was made, and a decode step would miss pages. Nothing is "
                "lost: call model.set_attn_implementation('flexicache') (or 'flexicache_eager' for "
                "models without sdpa) and go on."
            )
        if self.torn or (self.pending is not None and self.linked):
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


def _scaling(query: Tensor, kwargs: dict[str, Any]) -> float:
    scaling = kwargs.get("scaling")
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


def _read_mask(
    mask: Tensor, new: int, lengths: tuple[int, ...]
) -> tuple[Tensor | None, bool, bool]:
    """What a mask says: which new columns are tokens (None for all), whether it shows exactly what
    is stored, and whether it tells of padding at all: a causal mask that shows every column is what
    transformers makes when nobody gave it a padding mask.

    Args:
        mask: `[B or 1, 1, q, C]` bool or additive (0 where visible), or `[B, C]`.
        new: the last `new` of the C columns are new.
        lengths: tokens stored per row.
    """
    last = mask if mask.ndim == 2 else mask[:, 0, -1]  # [B, C]: what the last query may see
    visible = last.bool() if last.dtype == torch.bool or mask.ndim == 2 else last >= 0
    fresh = visible[:, -new:]
    counts = visible.sum(-1).tolist()
    if min(counts) == visible.shape[-1]:
        return None, True, False
    kept = fresh.sum(-1).tolist()
    if len(counts) == 1 and len(lengths) > 1:  # one mask for all rows
        counts, kept, fresh = (
            counts * len(lengths),
            kept * len(lengths),
            fresh.expand(len(lengths), -1),
        )
    stored = lengths or (0,) * len(counts)
    if len(stored) == len(counts):
        for row, (count, mine, held) in enumerate(zip(counts, kept, stored, strict=True)):
            if count - mine > held:
                raise ValueError(
                    f"attention_mask shows {count - mine} earlier tokens in row {row}, but the "
                    f"cache holds {held}: tokens that were padding when fed are not stored"
                )
    all_kept = min(kept) == new
    agrees = all_kept and all(c - new == held for c, held in zip(counts, stored))
    return (None if all_kept else fresh.cpu()), agrees, True
