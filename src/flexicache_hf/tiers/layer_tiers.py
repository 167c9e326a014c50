"""The two tiers of one layer: where its heads' pages are, and how whole rows come and go.

`layer.py` decides what a forward is; everything it stores, moves or brings back is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..integration.cache_state import Shared
from ..models.kv_heads import held_heads
from ..pages.step import Step
from ..profiles.learning import while_learning
from ..profiles.profile import HeadProfile
from .host_pages import HostPages
from .stable import StableHeads
from .unstable import UnstableHeads
from .working_set import WorkingSet


@dataclass(frozen=True)
class HeadGroup:
    """KV heads of a layer that are treated alike: `index` selects them without a copy if it can."""

    heads: Tensor
    index: slice | Tensor
    count: int

    @classmethod
    def of(cls, heads: list[int], device: torch.device) -> HeadGroup:
        tensor = torch.tensor(heads, dtype=torch.long, device=device)
        if heads:
            stride = heads[1] - heads[0] if len(heads) > 1 else 1
            if heads == list(range(heads[0], heads[-1] + 1, stride)):
                return cls(tensor, slice(heads[0], heads[-1] + 1, stride), len(heads))
        return cls(tensor, tensor, len(heads))

    def __len__(self) -> int:
        return self.count

    def of_batch(self, tensor: Tensor) -> Tensor:
        """These heads out of `[B, H_kv, ...]`."""
        if isinstance(self.index, slice):
            return tensor[:, self.index]
        return tensor.index_select(1, self.index)


class Changing:
    """`with` block that leaves `tiers.torn` True if an exception ends it.

    A class, because several are entered per layer and step, and a generator costs much more.
    """

    __slots__ = ("tiers",)

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers

    def __enter__(self) -> None:
        self.tiers.torn = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.tiers.torn = False


class Tiers:
    """The stable and the unstable heads of one layer, side by side.

    Attributes:
        groups: which KV heads are stable, and which unstable.
        stable, unstable: their pages; None for a group without heads.
        rows: batch size.
        stored: tokens of each row that this layer has.
        columns: the same with padding, as transformers counts.
        torn: an exception stopped a change midway.
    """

    shared: Shared
    ordinal: int
    index: int
    config_heads: int
    profile: HeadProfile
    groups: tuple[HeadGroup, HeadGroup] | None
    stable: StableHeads | None
    unstable: UnstableHeads | None
    rows: int
    stored: tuple[int, ...]
    columns: int
    torn: bool
    is_initialized: bool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, dimensions, dtype and device from the first keys and values."""
        shared = self.shared
        config = shared.config if shared.learner is None else while_learning(shared.config)
        device = key_states.device
        self.profile = shared.profile
        self.stable = self.unstable = None
        chosen = self.profile.unstable_in(self.index)
        held = self.held_heads(key_states)
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

    def crop_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        """Follow the table, which was cropped, and copy the pages that rows no longer share."""
        if not self.is_initialized:
            return
        lengths = self.shared.table.lengths
        with self.changing():
            if self.unstable is not None:
                self.unstable.own(copies)
            if self.stable is not None:
                self.stable.reserve()
                sources = {target: source for source, target in copies}
                stored = self.stored or (0,) * len(lengths)
                for row, (before, after) in enumerate(zip(stored, lengths, strict=True)):
                    if after < before:
                        self.stable.crop_row(row, before, after, sources)
        self.stored = lengths
        self.columns = self.shared.table.columns

    def select_rows(self, rows: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Follow the table, whose rows are now `rows` of before."""
        if not self.is_initialized:
            return
        with self.changing():
            if self.unstable is not None:
                self.unstable.own(copies)
            if self.stable is not None:
                self.stable.reserve()
                device = self.stable.digests.device
                self.stable.select(torch.tensor(rows, dtype=torch.long, device=device))
        self.rows = len(rows)
        self.stored = self.shared.table.lengths

    def join_rows(self, other: Tiers, copies: Sequence[tuple[int, int]]) -> None:
        """Follow the table, to which the rows of another cache were appended."""
        with self.changing():
            if self.unstable is not None and other.unstable is not None:
                self.unstable.join(other.unstable, copies)
            if self.stable is not None and other.stable is not None:
                self.stable.join(other.stable, self.rows, copies)
        self.rows += other.rows
        self.stored = self.shared.table.lengths
        self.columns = self.shared.table.columns

    def store(
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

    def reassign(self, keys: Tensor, values: Tensor, query: Tensor, scaling: float) -> None:
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

    def history(
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

    def changing(self) -> Changing:
        """An exception in here leaves the layer half changed; it then refuses to go on."""
        return Changing(self)

    def kind(self) -> tuple[object, ...]:
        """Heads, dimensions and dtype: layers of two caches can share rows only if they agree."""
        stores = [self.stable.working_set if self.stable is not None else None, self.unstable]
        return tuple(
            (store.keys.shape[-1], store.values.shape[-1], store.keys.dtype, group.heads.tolist())
            for store, group in zip(stores, self.groups or (), strict=bool(self.groups))
            if store is not None
        )

    def _any_tier(self) -> WorkingSet | UnstableHeads | None:
        """Either tier, for what both have alike: dimensions, dtype and device."""
        return self.stable.working_set if self.stable is not None else self.unstable

    def value_dim(self) -> int:
        store = self._any_tier()
        assert store is not None
        return store.values.shape[-1]

    def everything(self) -> tuple[Tensor, Tensor] | None:
        """All keys and values `[B, H_kv, C, D]` from both tiers, zero where padding was."""
        store = self._any_tier()
        if store is None or self.groups is None:
            return None
        shape = self.rows, sum(map(len, self.groups)), 0
        keys, values = (
            pool.new_empty(*shape, pool.shape[-1]) for pool in (store.keys, store.values)
        )
        return self.history(self.stored, self.columns, keys, values)

    def like(self, pool: str) -> Tensor | None:
        """Shape and dtype of all `keys` or `values` stored, without them."""
        store = self._any_tier()
        if store is None or self.groups is None:
            return None
        shape = self.rows, sum(map(len, self.groups)), self.columns, getattr(store, pool).shape[-1]
        return torch.empty(shape, dtype=getattr(store, pool).dtype, device="meta")

    def held_heads(self, keys: Tensor) -> range:
        return held_heads(keys.shape[1], self.config_heads, self.shared.rank, self.index)
