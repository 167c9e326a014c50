"""Unstable heads: all pages on the device, ranked at every step (paper, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..config import FlexiCacheConfig
from ..kernels.reference import visible_tokens
from ..pages.digest import page_digests, page_scores
from ..pages.page_pool import as_pages, copy_pages, grown, import_pages, nbytes, store_pages
from ..pages.page_table import PageTable
from ..pages.ranking import select_pages
from ..pages.step import Step


class UnstableHeads:
    """Keys, values and digests of the unstable heads of one layer, by page id.

    Attributes:
        heads: `[H_u]` KV heads of the layer, ascending.
        keys, values: `[capacity, H_u, P, D]`.
        digests: `[capacity, H_u, R, 2 * D]`; those of pages that are not full are undefined.
        observer: is told the scores `[B, H_u, N]` of every ranking.
    """

    def __init__(
        self,
        heads: Tensor,
        keys: Tensor,
        values: Tensor,
        table: PageTable,
        config: FlexiCacheConfig,
    ) -> None:
        self.heads, self.table, self.config = heads, table, config
        count, page, parts = len(heads), config.page_size, config.digests_per_page
        self.keys = keys.new_zeros(0, count, page, keys.shape[-1])
        self.values = values.new_zeros(0, count, page, values.shape[-1])
        self.digests = keys.new_zeros(0, count, parts, 2 * keys.shape[-1])
        self.observer: Callable[[Tensor, Step], None] | None = None

    def reserve(self) -> None:
        """Hold every page id of the table."""
        if self.digests.shape[0] >= self.table.capacity:
            return
        self.keys = grown(self.keys, 0, self.table.capacity)
        self.values = grown(self.values, 0, self.table.capacity)
        self.digests = grown(self.digests, 0, self.table.capacity)

    def store_row(self, row: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Store tokens `[H_u, n, D]` of `row`, the first of them on the first token of a page.

        Args:
            first: number of that page.
        """
        page = self.config.page_size
        ids = self.table.pages[row][first:]
        full = keys.shape[1] // page
        if full:
            pages = as_pages(keys[:, : full * page], page)
            store_pages(self.keys, ids[:full], pages)
            store_pages(self.values, ids[:full], as_pages(values[:, : full * page], page))
            store_pages(self.digests, ids[:full], self._digest(pages))
        if keys.shape[1] > full * page:
            rest = keys.shape[1] - full * page
            self.keys[ids[full], :, :rest] = keys[:, full * page :]
            self.values[ids[full], :, :rest] = values[:, full * page :]

    def append(self, step: Step, keys: Tensor, values: Tensor) -> None:
        """Store the new tokens `[B, H_u, q, D]` of a decode step."""
        device = keys.device
        where = step.once(("tokens", device, self.keys.shape[1]), lambda: self._new_tokens(step))
        for pool, new in ((self.keys, keys), (self.values, values)):
            pool.view(-1, pool.shape[-1]).index_copy_(0, where, new.reshape(-1, new.shape[-1]))
        if step.filled:
            filled = [self.table.pages[row][number] for row, number in step.filled]
            chosen = torch.tensor(filled, device=device)
            self.digests[chosen] = self._digest(self.keys[chosen])

    def select(self, queries: Tensor, step: Step, scaling: float) -> Tensor:
        """Rank with this step's queries.

        Args:
            queries: `[B, H_u, G * q, D]`.

        Returns:
            `[B, H_u, n]` page numbers, -1 for holes: the selection, then the newest pages.
        """
        settled = step.settled
        tail = step.newest_pages(queries.device)[:, None].expand(-1, self.keys.shape[1], -1)
        if not max(settled) or self.config.pages == 1:
            return tail
        scores = page_scores(
            queries,
            self._row_digests(step, max(settled)),
            settled,
            self.config.digests_per_page,
            self.config.group_reduction,
            scaling,
            self.config.digest,
        )
        if self.observer is not None:
            self.observer(scores.clone(), step)
        return torch.cat([select_pages(scores, settled, self.config), tail], -1)

    def gather(self, pages: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H_u, n * P, D]` of page numbers `[B, H_u, n]`."""
        heads = self.keys.shape[1]
        if (run := self.table.only_run()) is not None:
            ids = pages + run.start if run.start else pages
        else:
            ids = self.table.ids(pages.device)[:, None].expand(-1, heads, -1)
            ids = ids.gather(2, pages.clamp(min=0))
        rows = (ids * heads + self._head_offsets(step) if heads > 1 else ids).flatten()
        shape = (*pages.shape[:2], pages.shape[2] * self.config.page_size, -1)
        lines = self.keys.shape[0] * heads, -1  # a page of a head per line
        keys, values = (pool.view(lines) for pool in (self.keys, self.values))
        return keys.index_select(0, rows).view(shape), values.index_select(0, rows).view(shape)

    def attended(
        self, queries: Tensor, step: Step, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """What a decode step attends to: keys, values `[B, H_u, T, D]`, mask, pages per head."""
        pages = self.select(queries, step, scaling)
        keys, values = self.gather(pages, step)
        count = pages.shape[-1]
        if step.uniform:
            used = (count - 1) * self.config.page_size + _newest_fill(step)
            return keys[:, :, :used], values[:, :, :used], None, count
        mask = visible_tokens(pages, step.new_positions(keys.device), self.config.page_size)
        return keys, values, mask, count

    def row(self, row: int, tokens: int) -> tuple[Tensor, Tensor]:
        """All keys and values `[H_u, tokens, D]` of one row."""
        pages = self.table.pages[row][: -(-tokens // self.config.page_size)]
        ids = torch.tensor(pages, device=self.keys.device, dtype=torch.long)
        keys, values = (
            pool.index_select(0, ids).transpose(0, 1).flatten(1, 2)[:, :tokens]
            for pool in (self.keys, self.values)
        )
        return keys, values

    def own(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages that rows no longer share."""
        self.reserve()
        for pool in (self.keys, self.values):
            copy_pages(pool, copies)

    def join(self, other: UnstableHeads, copies: Sequence[tuple[int, int]]) -> None:
        """Take over the pages of another cache's rows."""
        self.reserve()
        import_pages(self.keys, other.keys, copies)
        import_pages(self.values, other.values, copies)
        import_pages(self.digests, other.digests, copies)

    def page_bytes(self) -> int:
        return nbytes(self.keys, self.values)

    def digest_bytes(self) -> int:
        return nbytes(self.digests)

    def _new_tokens(self, step: Step) -> Tensor:
        """`[B * H_u * q]` tokens of a pool `[capacity * H_u * P, D]` that are new."""
        size, device = self.config.page_size, self.keys.device
        positions = step.new_positions(device)  # [B, q]
        ids = self.table.ids(device).gather(1, positions // size)
        lines = pool_rows(ids, self.keys.shape[1])  # [B, H_u, q]
        return (lines * size + (positions % size)[:, None]).flatten()

    def _digest(self, keys: Tensor) -> Tensor:
        return page_digests(keys, self.config.digest, self.config.digests_per_page)

    def _row_digests(self, step: Step, pages: int) -> Tensor:
        device, heads = self.keys.device, self.keys.shape[1]
        if (run := self.table.only_run()) is not None:
            pages_in_run = self.digests[run.start : run.start + pages]  # [N, H_u, R, 2D]
            return pages_in_run.transpose(0, 1).flatten(1, 2)[None]
        rows = step.once(
            ("pool rows", device, heads, pages),
            lambda: pool_rows(self.table.ids(device)[:, :pages], heads),
        )
        return gather_digests(self.digests, rows)

    def _head_offsets(self, step: Step) -> Tensor:
        device, heads = self.keys.device, self.keys.shape[1]
        return step.once(
            ("heads", device, heads), lambda: torch.arange(heads, device=device)[:, None]
        )


def pool_rows(ids: Tensor, heads: int) -> Tensor:
    """`[B, H, N]` rows of a pool `[capacity * H, ...]` that hold page ids `[B, N]`."""
    return ids[:, None] * heads + torch.arange(heads, device=ids.device)[:, None]


def gather_digests(digests: Tensor, rows: Tensor) -> Tensor:
    """`[B, H, N * R, 2 * D]` from a pool `[capacity, H, R, 2 * D]` by its rows `[B, H, N]`."""
    picked = digests.flatten(0, 1).flatten(1).index_select(0, rows.flatten())
    return picked.view(*rows.shape[:2], -1, digests.shape[-1])


def _newest_fill(step: Step) -> int:
    return (step.lengths[0] - 1) % step.page_size + 1
