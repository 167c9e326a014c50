"""Host pages: the second tier, where every full page of every stable head lies (paper, section 4).

Host memory grows by chunks and never moves, so a page's address holds for the life of the cache and
a copy in flight never sees it change. A page is written once, when it fills, and read at promotion.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .transfer import BlockCopy, PageCopy

GROWTH = 8  # a new chunk holds at least 1/8 of what is there: few chunks, little slack
SMALLEST_CHUNK = 16  # pages


class HostMemoryError(MemoryError):
    """The host tier would exceed `host_memory_limit`; raised before anything is stored."""


@dataclass
class HostBudget:
    """Host bytes of the whole cache, checked by the first layer of a forward for all of them.

    Attributes:
        limit: bytes, or None.
        layers: KV heads of each tiered layer, and which of them are unstable.
        share: this process's tensor-parallel rank and the number of ranks.
    """

    limit: int | None
    layers: Sequence[tuple[int, Collection[int]]]
    share: tuple[int, int] = (0, 1)

    @property
    def stable_heads(self) -> int:
        """Stable heads that this process holds, of all tiered layers together."""
        rank, ranks = self.share
        return sum(
            head not in unstable
            for heads, unstable in self.layers
            for head in range(rank * (heads // ranks), (rank + 1) * (heads // ranks))
        )

    def check(self, pages: int, page_bytes: int) -> None:
        """Raises HostMemoryError if `pages` pages of `page_bytes` per head do not fit."""
        if self.limit is None:
            return
        needed = pages * page_bytes * self.stable_heads
        if needed > self.limit:
            raise HostMemoryError(
                f"host_memory_limit is {self.limit:,} bytes, but {pages} pages of "
                f"{self.stable_heads} stable heads need {needed:,}. Nothing was stored: raise the "
                "limit, shorten the prompt, or free rows with cache.batch_select_indices()."
            )

    def allowance(self, page_bytes: int) -> int | None:
        """Most pages that may be allocated per layer, or None."""
        if self.limit is None or not self.stable_heads:
            return None
        return self.limit // (page_bytes * self.stable_heads)


@dataclass
class HostPages:
    """Keys and values of one layer's stable heads, by page id.

    A chunk is a pair of tensors `[pages, H_s, P, D]`, pinned when the device is a CUDA one.
    """

    heads: int
    page_size: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    pinned: bool
    allowance: int | None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(
        default_factory=lambda: [0]
    )  # first page id of each chunk, and the end

    @property
    def capacity(self) -> int:
        return self.starts[-1]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one head, keys and values."""
        return self.page_size * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (*self.keys, *self.values))

    def reserve(self, capacity: int) -> None:
        """Hold page ids 0..capacity-1."""
        missing = capacity - self.capacity
        if missing <= 0:
            return
        size = max(missing, SMALLEST_CHUNK, self.capacity // GROWTH)
        if self.allowance is not None:
            size = max(missing, min(size, self.allowance - self.capacity))
        for pool, dim in ((self.keys, self.key_dim), (self.values, self.value_dim)):
            shape = (size, self.heads, self.page_size, dim)
            pool.append(self._new(shape))
        self.starts.append(self.capacity + size)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostPages:
        """Pinned like the original, which a copied tensor is not; nothing may be in flight."""
        copied = replace(self, keys=[], values=[], starts=list(self.starts))
        for mine, theirs in ((copied.keys, self.keys), (copied.values, self.values)):
            for chunk in theirs:
                mine.append(
                    self._new(chunk.shape).copy_(chunk) if self.pinned else deepcopy(chunk, memo)
                )
        return copied

    def clear(self) -> None:
        self.keys.clear()
        self.values.clear()
        self.starts[:] = [0]

    def write_blocks(self, ids: Sequence[int], keys: Tensor, values: Tensor) -> Iterator[BlockCopy]:
        """Jobs that store pages `[n, H_s, P, D]` under `ids`, a block per run of ids."""
        for first, count, chunk, at in self._runs(ids):
            for pool, source in ((self.keys, keys), (self.values, values)):
                yield BlockCopy(pool[chunk][at : at + count], source[first : first + count])

    def read_blocks(self, ids: Sequence[int], keys: Tensor, values: Tensor) -> Iterator[BlockCopy]:
        """Jobs that load pages `ids` into `[n, H_s, P, D]` tensors."""
        for first, count, chunk, at in self._runs(ids):
            for pool, target in ((self.keys, keys), (self.values, values)):
                yield BlockCopy(target[first : first + count], pool[chunk][at : at + count])

    def read_pages(
        self, ids: Tensor, heads: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Iterator[PageCopy]:
        """Jobs that load single pages of single heads into slots.

        Args:
            ids, heads: `[n]` on the host: page id and position among the stable heads.
            slots: `[n]` on the device: row of `keys` and `values` to fill.
            keys, values: `[slots, P * D]` on the device.
        """
        ends = torch.tensor(self.starts[1:], device="cpu")
        chunks = torch.bucketize(ids, ends, right=True)
        for chunk in chunks.unique().tolist():
            picked = chunks == chunk if len(self.keys) > 1 else slice(None)
            rows = (ids[picked] - self.starts[chunk]) * self.heads + heads[picked]
            target_rows = slots[picked.to(slots.device) if isinstance(picked, Tensor) else picked]
            for pool, target in ((self.keys, keys), (self.values, values)):
                source = pool[chunk].view(-1, target.shape[-1])
                yield PageCopy(target, target_rows, source, rows)

    def join(self, other: HostPages, copies: Sequence[tuple[int, int]]) -> None:
        """Take over pages `(their id, ours)` of another cache; nothing of either is in flight."""
        for source, target in copies:
            for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
                chunk = bisect_right(self.starts, target) - 1
                from_chunk = bisect_right(other.starts, source) - 1
                mine[chunk][target - self.starts[chunk]] = theirs[from_chunk][
                    source - other.starts[from_chunk]
                ]

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        # the device is named because torch.set_default_device("cuda") means other tensors
        return torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=self.pinned)

    def _runs(self, ids: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """`(first, count, chunk, offset)`: ids[first:first + count] are consecutive in a chunk."""
        first = 0
        while first < len(ids):
            chunk = bisect_right(self.starts, ids[first]) - 1
            count = 1
            end = self.starts[chunk + 1]
            while (
                first + count < len(ids)
                and ids[first + count] == ids[first] + count
                and ids[first] + count < end
            ):
                count += 1
            yield first, count, chunk, ids[first] - self.starts[chunk]
            first += count
