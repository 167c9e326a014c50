"""Stable heads: a working set on the device, every page on the host, ranked now and then (paper,
section 4).

A ranking's new set serves from the next step on. Until then the promoted pages travel while the
other layers, and the next step up to this layer, compute: nothing has to pause for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..config import FlexiCacheConfig
from ..pages.digest import page_digests, page_scores
from ..pages.page_pool import as_pages, grown, import_pages, nbytes, store_pages
from ..pages.page_table import PageTable
from ..pages.ranking import select_pages
from ..pages.step import Step
from .host_pages import HostPages
from .transfer import TransferQueue
from .unstable import gather_digests, pool_rows
from .working_set import WorkingSet


class StableHeads:
    """The stable heads of one layer.

    Attributes:
        heads: `[H_s]` KV heads of the layer, ascending.
        working_set: slots on the device.
        host: full pages on the host.
        digests: `[capacity, H_s, R, 2 * D]` by page id.
        unranked: rows whose working set no query has chosen yet; their next decode step ranks
            before it attends, and waits for the pages.
    """

    def __init__(
        self,
        heads: Tensor,
        keys: Tensor,
        values: Tensor,
        table: PageTable,
        config: FlexiCacheConfig,
        queue: TransferQueue,
        host: HostPages,
    ) -> None:
        self.heads, self.table, self.config = heads, table, config
        self.queue, self.host = queue, host
        interval = config.rerank_interval or config.page_size
        tail = -(-interval // config.page_size)
        self.working_set = WorkingSet(
            keys, values, config.pages, config.page_size, config.pages + tail
        )
        self.digests = keys.new_zeros(0, len(heads), config.digests_per_page, 2 * keys.shape[-1])
        self.unranked: set[int] = set()
        self.offload: object = None  # tickets of the last copy to the host, and from it
        self.promotion: object = None

    def reserve(self) -> None:
        """Hold every page id of the table."""
        if min(self.digests.shape[0], self.host.capacity) >= self.table.capacity:
            return
        self.digests = grown(self.digests, 0, self.table.capacity)
        self.host.reserve(self.table.capacity)

    # -- prompts ---------------------------------------------------------------------------------

    def store_row(self, row: int, first: int, keys: Tensor, values: Tensor) -> int:
        """Write the full pages among tokens `[H_s, n, D]` of `row` to the host, from page `first`
        on, which they begin with. Returns the bytes written."""
        page = self.config.page_size
        full = keys.shape[1] // page
        if not full:
            return 0
        ids = self.table.pages[row][first : first + full]
        pages = as_pages(keys[:, : full * page], page)
        store_pages(self.digests, ids, self._digest(pages))
        value_pages = as_pages(values[:, : full * page], page)
        for job in self.host.write_blocks(ids, pages, value_pages):
            self.offload = self.queue.submit(job)
        return full * len(self.heads) * self.host.page_bytes

    def choose_row(
        self, row: int, keys: Tensor, values: Tensor, query: Tensor | None, scaling: float
    ) -> None:
        """Fill the working set of `row` from all its keys and values, still on the device.

        Args:
            keys, values: `[H_s, n, D]`, the whole row.
            query: `[H_s, G, D]` of the last prompt token, or None to leave the choice to the first
                decode step.
        """
        tokens, size, budget = keys.shape[1], self.config.page_size, self.config.pages
        count = -(-tokens // size)
        self._wait()
        self.unranked.discard(row)
        if query is None:
            self.unranked.add(row)
        if count <= budget:
            everything = torch.arange(count, device=keys.device).expand(len(self.heads), -1)
            self.working_set.fill(row, everything, keys, values)
            self.working_set.tail[row] = 0
            return
        if query is None:
            selected = torch.arange(count - budget, count - 1, device=keys.device)
            selected = selected.expand(len(self.heads), -1)
        else:
            selected = self._rank([row], query[None], [count - 1], scaling)[0].sort(-1).values
        chosen = [
            torch.cat([_pick(whole, selected, size), whole[:, (count - 1) * size :]], 1)
            for whole in (keys, values)
        ]
        newest = selected.new_full((len(self.heads), 1), count - 1)
        self.working_set.fill(row, torch.cat([selected, newest], -1), chosen[0], chosen[1])
        self.working_set.tail[row] = budget - 1

    # -- decode steps ----------------------------------------------------------------------------

    def append(self, step: Step, keys: Tensor, values: Tensor) -> int:
        """Store the new tokens `[B, H_s, q, D]`; pages they fill go to the host. Returns bytes."""
        self._wait_promotion()  # slots may move when they grow
        self.working_set.append(step, keys, values)
        written = 0
        for row, page in step.filled:
            newest = step.pages[row] - 1
            page_keys, page_values = self.working_set.page_tokens(row, page, newest)
            written += self.store_row(row, page, page_keys, page_values)
        return written

    def attended(self, step: Step) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """What a decode step attends to: keys, values `[B, H_s, T, D]`, mask, pages per head."""
        self._wait_promotion()
        return self.working_set.attended(step)

    def rerank(self, rows: Sequence[int], queries: Tensor, step: Step, scaling: float) -> int:
        """Rank `rows` with this step's queries and start promoting; returns the pages promoted.

        Args:
            queries: `[B, H_s, G * q, D]` of all rows.
        """
        self.unranked.difference_update(rows)
        settled, pages = step.settled, step.pages
        rows = [row for row in rows if settled[row] >= self.config.pages]
        if not rows:
            return 0
        chosen = queries if len(rows) == len(queries) else queries[list(rows)]
        selected = self._rank(rows, chosen, [settled[row] for row in rows], scaling)
        self._wait()  # slots may still be read by an offload, or written by the last promotion
        newest = [pages[row] - settled[row] for row in rows]
        wanted = self.working_set.recycle(rows, selected, newest)
        count = len(wanted.pages)
        if count:
            ids = self.table.ids(wanted.pages.device)[wanted.rows, wanted.pages].cpu()
            keys, values = self.working_set.flat()
            heads = wanted.heads.cpu()
            for job in self.host.read_pages(ids, heads, wanted.slots, keys, values):
                self.promotion = self.queue.submit(job)
        return count

    # -- whole rows ------------------------------------------------------------------------------

    def row(self, row: int, tokens: int) -> tuple[Tensor, Tensor, int]:
        """All keys and values `[H_s, tokens, D]` of a row, and the bytes fetched for them."""
        self._wait()
        slots, page = self.working_set, self.config.page_size
        if slots.holds_all(row, -(-tokens // page)):
            return slots.keys[row, :, :tokens], slots.values[row, :, :tokens], 0
        full = tokens // page
        keys, values = self._fetch(self.table.pages[row][:full])
        if tokens > full * page:
            rest = tokens - full * page
            last = slots.page_tokens(row, full, full)
            keys = torch.cat([keys, last[0][:, :rest]], 1)
            values = torch.cat([values, last[1][:, :rest]], 1)
        return keys, values, full * len(self.heads) * self.host.page_bytes

    def crop_row(self, row: int, before: int, after: int, sources: Mapping[int, int]) -> None:
        """Forget tokens of `row`, from `before` down to `after`.

        Args:
            sources: page id -> the id it was copied from: the host has it under that one only.
        """
        self._wait()
        page, budget = self.config.page_size, self.config.pages
        count = -(-after // page)
        if self.working_set.cut_tail(row, -(-before // page) - count):
            return
        # The new newest page is not in the tail. All pages were full before: the host has them.
        first = max(count - budget, 0)
        ids = self.table.pages[row][first:count]
        keys, values = self._fetch([sources.get(page, page) for page in ids])
        numbers = torch.arange(first, count, device=keys.device).expand(len(self.heads), -1)
        self.working_set.fill(row, numbers, keys, values)
        # a later crop may cut the tail: never below K pages while the row has more
        self.working_set.tail[row] = budget - 1 if first else 0
        if first:
            self.unranked.add(row)

    def select(self, indices: Tensor) -> None:
        """Make the rows `[rows[i] for i in indices]`."""
        self._wait()
        self.working_set.select(indices)
        self.unranked = {new for new, old in enumerate(indices.tolist()) if old in self.unranked}

    def join(self, other: StableHeads, rows: int, copies: Sequence[tuple[int, int]]) -> None:
        """Take over the pages and working sets of another cache's rows, as rows `rows` and on."""
        self._wait()
        other._wait()
        for queue in (self.queue, other.queue):
            queue.settle()  # the CPU moves host pages itself
        self.reserve()
        import_pages(self.digests, other.digests, copies)
        self.host.join(other.host, copies)
        self.working_set.join(other.working_set)
        self.unranked |= {rows + row for row in other.unranked}

    def digest_bytes(self) -> int:
        return nbytes(self.digests)

    # -- inside ----------------------------------------------------------------------------------

    def _rank(
        self, rows: Sequence[int], queries: Tensor, settled: Sequence[int], scaling: float
    ) -> Tensor:
        ids = self.table.ids(queries.device)[list(rows), : max(settled)]
        digests = gather_digests(self.digests, pool_rows(ids, len(self.heads)))
        config = self.config
        scores = page_scores(
            queries,
            digests,
            settled,
            config.digests_per_page,
            config.group_reduction,
            scaling,
            config.digest,
        )
        return select_pages(scores, settled, config)

    def _fetch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        slots = self.working_set
        fetched = [
            pool.new_empty(len(ids), len(self.heads), self.config.page_size, pool.shape[-1])
            for pool in (slots.keys, slots.values)
        ]
        for job in self.host.read_blocks(ids, fetched[0], fetched[1]):
            self.promotion = self.queue.submit(job)
        self._wait_promotion()
        keys, values = (pages.transpose(0, 1).flatten(1, 2) for pages in fetched)
        return keys, values

    def _wait(self) -> None:
        """Nothing of this layer is in flight any more."""
        self._wait_promotion()
        if self.offload is not None:
            self.queue.wait(self.offload)
            self.offload = None

    def _wait_promotion(self) -> None:
        if self.promotion is not None:
            self.queue.wait(self.promotion)
            self.promotion = None

    def _digest(self, keys: Tensor) -> Tensor:
        return page_digests(keys, self.config.digest, self.config.digests_per_page)


def _pick(whole: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """Tokens `[H, n * P, D]` of pages `[H, n]` out of `[H, tokens, D]`."""
    full = whole.shape[1] // page_size
    blocks = whole[:, : full * page_size].unflatten(1, (full, page_size))
    heads = torch.arange(len(pages), device=whole.device)[:, None]
    return blocks[heads, pages].flatten(1, 2)
