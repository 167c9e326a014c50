"""The working set: the slots in which the pages of stable heads lie on the device.

Each row owns the same number of slots for every stable head of a layer, side by side, so attention
reads a plain view `[B, H_s, used * P, D]` and a page is recycled by overwriting its slot. The order
of slots obeys one rule: the *body*, slots 0 .. K-2, holds full pages in any order; from slot K-1 on
lies the *tail*, consecutive pages that end with the newest, so that all valid tokens come first.
While a row has no more than K pages, slot i simply holds page i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.reference import NO_PAGE, visible_tokens
from ..pages.page_pool import grown, nbytes
from ..pages.step import Step


@dataclass(frozen=True)
class Promotion:
    """Pages that have to come from the host: `[n]` each; `slots` indexes `WorkingSet.flat()`."""

    rows: Tensor
    heads: Tensor
    pages: Tensor
    slots: Tensor


class WorkingSet:
    """Slots of one layer.

    Attributes:
        keys, values: `[B, H_s, S * P, D]`.
        pages: `[B, H_s, S]` page number in each slot, -1 for empty.
        used: per row, slots in use; the last of them holds the newest page.
        tail: per row, the slot from which on pages are consecutive.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, budget: int, page_size: int, most: int
    ) -> None:
        rows, heads = keys.shape[:2]
        self.budget, self.page_size, self.most = budget, page_size, most
        self.keys = keys.new_zeros(rows, heads, 0, keys.shape[-1])
        self.values = values.new_zeros(rows, heads, 0, values.shape[-1])
        self.pages = torch.full((rows, heads, 0), NO_PAGE, device=keys.device)
        self.used = [0] * rows
        self.tail = [0] * rows

    @property
    def slots(self) -> int:
        return self.pages.shape[-1]

    def reserve(self, slots: int) -> None:
        """At least `slots` slots per row and head."""
        if slots <= self.slots:
            return
        # K pages and the tail between two rankings is all that is needed, unless ranking is off
        most = self.most if slots <= self.most else None
        shape = (*self.pages.shape[:2], -1, self.page_size)
        keys = grown(self.keys.unflatten(2, shape[2:]), 2, slots, most)
        values = grown(self.values.unflatten(2, shape[2:]), 2, slots, most)
        self.keys, self.values = keys.flatten(2, 3), values.flatten(2, 3)
        pages = self.pages.new_full((*shape[:2], keys.shape[2]), NO_PAGE)
        pages[..., : self.slots] = self.pages
        self.pages = pages

    def flat(self) -> tuple[Tensor, Tensor]:
        """Keys and values as `[B * H_s * S, P * D]`, a slot per row: where copies go."""
        shape = (self.pages.numel(), -1)
        return self.keys.view(shape), self.values.view(shape)

    # -- filling ---------------------------------------------------------------------------------

    def fill(self, row: int, pages: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace what `row` holds.

        Args:
            pages: `[H_s, n]` page numbers, the newest last.
            keys, values: `[H_s, t, D]`, their tokens; only the newest page may be partial.
        """
        count = pages.shape[-1]
        self.reserve(count)
        self.keys[row, :, : keys.shape[1]] = keys
        self.values[row, :, : values.shape[1]] = values
        self.pages[row, :, :count] = pages
        self.pages[row, :, count:] = NO_PAGE
        self.used[row] = count

    def append(self, step: Step, keys: Tensor, values: Tensor) -> None:
        """Write the new tokens `[B, H_s, q, D]`, opening slots for new pages."""
        if step.uniform and self._writes_alike(step):
            at = (self.used[0] - 1) * self.page_size + (step.lengths[0] - 1) % self.page_size
            self.keys.select(2, at).copy_(keys.squeeze(2))
            self.values.select(2, at).copy_(values.squeeze(2))
            return
        shifts = [
            (used - 1 - (start - 1) // self.page_size) * self.page_size
            for used, start in zip(self.used, step.start, strict=True)
        ]
        opened = [
            (row, used, -(-start // self.page_size), count)
            for row, (used, start, count) in enumerate(
                zip(self.used, step.start, step.pages, strict=True)
            )
            if count > -(-start // self.page_size)
        ]
        if opened:
            self.reserve(max(used + count - first for _, used, first, count in opened))
        for row, used, first, count in opened:
            self.used[row] = used + count - first
            self.pages[row, :, used : self.used[row]] = torch.arange(
                first, count, device=self.pages.device
            )
        shift = torch.tensor(shifts, device=keys.device)[:, None]
        where = step.new_positions(keys.device) + shift  # [B, q]
        rows = torch.arange(len(shifts), device=keys.device)[:, None]
        self.keys[rows, :, where] = keys.transpose(1, 2)
        self.values[rows, :, where] = values.transpose(1, 2)

    def _writes_alike(self, step: Step) -> bool:
        """All rows write into the same slot, which is open already."""
        return step.start[0] % self.page_size > 0 and min(self.used) == max(self.used)

    # -- reading ---------------------------------------------------------------------------------

    def attended(self, step: Step) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """What a decode step attends to: keys, values `[B, H_s, T, D]`, mask, pages per head."""
        most = max(self.used)
        if step.uniform and min(self.used) == most:
            tokens = (most - 1) * self.page_size + (step.lengths[0] - 1) % self.page_size + 1
            return self.keys[:, :, :tokens], self.values[:, :, :tokens], None, most
        tokens = most * self.page_size
        positions = step.new_positions(self.keys.device)
        mask = visible_tokens(self.pages[..., :most], positions, self.page_size)
        return self.keys[:, :, :tokens], self.values[:, :, :tokens], mask, most

    def page_tokens(self, row: int, page: int, newest: int) -> tuple[Tensor, Tensor]:
        """`[H_s, P, D]` of a page in the tail, given the number of the row's newest page."""
        slot = self.used[row] - 1 - (newest - page)
        assert slot >= self.tail[row], "page is not in the tail"
        where = slice(slot * self.page_size, (slot + 1) * self.page_size)
        return self.keys[row, :, where], self.values[row, :, where]

    def holds_all(self, row: int, pages: int) -> bool:
        """All `pages` pages of the row are here, and so in order: nothing was ever evicted."""
        return self.used[row] == pages

    # -- recycling -------------------------------------------------------------------------------

    def recycle(self, rows: Sequence[int], selected: Tensor, newest: Sequence[int]) -> Promotion:
        """Make the working set of `rows` the selected pages and the newest ones.

        Pages that stay, stay where they are. Evicted pages are simply overwritten: the host has
        them. Pages of the tail that were selected move into the body, and the newest pages move to
        slot K-1; what is left has to be promoted.

        Args:
            selected: `[R, H_s, K - 1]` page numbers that precede the newest ones.
            newest: per row, how many pages at the end of the tail stay tail.
        """
        body = self.budget - 1
        device = self.pages.device
        index = torch.tensor(rows, device=device)
        same = selected[..., None] == self.pages[index][..., None, :]  # [R, H, K-1, S]
        missing = (~same[..., :body].any(-1)).nonzero()  # sorted by row, head; as many per (row,
        free = (~same[..., :body].any(-2)).nonzero()  # head) here as there: they pair up
        row, head, pick = missing.unbind(-1)
        slots = self.slots
        target = (index[row] * self.pages.shape[1] + head) * slots + free[:, 2]
        pages = selected[row, head, pick]
        in_tail = same[row, head, pick, body:]  # [n, S - K + 1]
        moved = in_tail.any(-1)

        sources, targets = [], []
        if bool(moved.any()):
            at = in_tail[moved].int().argmax(-1) + body
            sources.append(target[moved] - free[moved, 2] + at)
            targets.append(target[moved])
        heads = torch.arange(self.pages.shape[1], device=device) * slots
        for each, count in zip(rows, newest, strict=True):
            last = self.used[each] - count
            if last == body:
                continue
            base = heads + each * self.pages.shape[1] * slots
            for offset in range(count):
                sources.append(base + last + offset)
                targets.append(base + body + offset)
        if sources:
            source, into = torch.cat(sources), torch.cat(targets)
            for pool in (*self.flat(), self.pages.view(-1, 1)):
                pool.index_copy_(0, into, pool.index_select(0, source))
        self.pages.view(-1).index_copy_(0, target, pages)
        for each, count in zip(rows, newest, strict=True):
            self.used[each] = body + count
            self.tail[each] = body
            self.pages[each, :, body + count :] = NO_PAGE
        promoted = ~moved
        return Promotion(index[row[promoted]], head[promoted], pages[promoted], target[promoted])

    # -- shrinking and rearranging ---------------------------------------------------------------

    def cut_tail(self, row: int, pages: int) -> bool:
        """Forget the newest `pages` pages if the page before them is in the tail as well."""
        left = self.used[row] - pages
        if left - 1 < self.tail[row]:
            return False
        self.used[row] = left
        self.pages[row, :, left:] = NO_PAGE
        return True

    def select(self, indices: Tensor) -> None:
        self.keys, self.values, self.pages = (
            pool.index_select(0, indices) for pool in (self.keys, self.values, self.pages)
        )
        chosen = indices.tolist()
        self.used = [self.used[i] for i in chosen]
        self.tail = [self.tail[i] for i in chosen]

    def join(self, other: WorkingSet) -> None:
        """Append the rows of another working set."""
        slots = max(self.slots, other.slots)
        self.reserve(slots)
        other.reserve(self.slots)
        width = min(self.slots, other.slots)  # both hold all that is in use
        tokens = width * self.page_size
        device = self.keys.device
        self.keys = torch.cat([self.keys[:, :, :tokens], other.keys[:, :, :tokens].to(device)])
        self.values = torch.cat(
            [self.values[:, :, :tokens], other.values[:, :, :tokens].to(device)]
        )
        self.pages = torch.cat([self.pages[..., :width], other.pages[..., :width].to(device)])
        self.used += other.used
        self.tail += other.tail

    def page_bytes(self) -> int:
        return nbytes(self.keys, self.values)

    def map_bytes(self) -> int:
        return nbytes(self.pages)
