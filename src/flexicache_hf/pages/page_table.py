"""The page table: one for all layers and heads, which all see the same pages at the same time.

A *page* is `page_size` consecutive tokens of one row (one sequence of the batch). The table gives
every page an id; each layer stores the page's keys and values under it, in whatever tier its heads
live. Full pages never change, so rows that share a prefix (beams, samples) share their ids; a page
still being filled belongs to one row. Padding is never stored: the table maps the *columns* that
transformers counts (`get_seq_length`, masks) to the tokens of each row.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import InterruptedChange, InterruptedForward
from .step import Step


class PageTable:
    """Rows, their pages, and how far each layer has come. Sizes in tokens unless named pages."""

    def __init__(self, page_size: int, layers: int) -> None:
        self.page_size = page_size
        self.progress = [0] * layers  # forwards that each tiered layer has completed
        self.unfinished: str | None = None  # the change under way, or that never ended
        self.clear()

    def _forget_views(self) -> None:
        self._ids: dict[torch.device, Tensor] = {}
        self._run: tuple[slice | None] | None = None

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Around a change of all layers: an interruption in here leaves the cache refusing to go on
        until it is reset. Whatever may be refused has to be refused before.

        Raises:
            InterruptedChange: an earlier change never ended.
        """
        self.check_whole()
        self.unfinished = what
        yield
        self.unfinished = None

    def check_whole(self) -> None:
        """Raises InterruptedChange if a change stopped midway."""
        if self.unfinished is not None:
            raise InterruptedChange(
                f"cache.{self.unfinished}() was interrupted, so the layers may disagree about what "
                "is cached: start over with cache.reset()"
            )

    def clear(self) -> None:
        """Forget all rows."""
        self.columns = 0
        self.forwards = 0
        self.step: Step | None = None
        self.pages: list[list[int]] = []  # row -> page ids
        self.lengths: tuple[int, ...] = ()
        self.prompts: tuple[int, ...] = ()  # tokens at the end of each row's last prompt
        self.padding: list[list[tuple[int, int]]] = []  # row -> column ranges never stored
        self.references: list[int] = []  # page id -> rows that hold it
        self._free: list[int] = []
        self._forget_views()
        self.progress[:] = [0] * len(self.progress)

    @property
    def rows(self) -> int:
        return len(self.pages)

    @property
    def capacity(self) -> int:
        """Page ids in use or free: what the pools of a layer must hold."""
        return len(self.references)

    def ids(self, device: torch.device) -> Tensor:
        """`[B, N]` page ids of every row, short rows filled with 0."""
        if device not in self._ids:
            most = max(map(len, self.pages), default=0)
            padded = [row + [0] * (most - len(row)) for row in self.pages]
            self._ids[device] = torch.tensor(padded, dtype=torch.long).to(device)
        return self._ids[device]

    def only_run(self) -> slice | None:
        """The page ids of a single row, if they are consecutive: its pages are a view then."""
        if self._run is None:
            pages = self.pages[0] if self.rows == 1 else []
            consecutive = bool(pages) and pages == list(range(pages[0], pages[0] + len(pages)))
            self._run = (slice(pages[0], pages[0] + len(pages)) if consecutive else None,)
        return self._run[0]

    def nbytes(self) -> int:
        """Bytes of the table's copies on devices."""
        return sum(ids.untyped_storage().nbytes() for ids in self._ids.values())

    # -- growing ---------------------------------------------------------------------------------

    def current(self, layer: int) -> Step | None:
        """The step of the forward pass that `layer` is in, if an earlier layer has opened it."""
        return self.step if self.progress[layer] + 1 == self.forwards else None

    def check_completed(self, layer: int) -> None:
        """Raises InterruptedForward, before `layer` begins one, if the last forward did not end."""
        if any(done != self.forwards for done in self.progress):
            raise InterruptedForward(
                f"layer {layer} begins forward {self.forwards + 1}, but an earlier one stopped "
                f"midway (forwards completed per layer: {self.progress}). Take back its tokens "
                "with cache.crop(-n), or start over with cache.reset()."
            )

    def enter(
        self,
        rows: int,
        columns: int,
        keep: Tensor | None,
        decode: bool,
        padding_told: bool = True,
    ) -> Step:
        """Open the step of a new forward pass; its first layer does, after `check_completed`.

        Args:
            rows: batch size B of this forward.
            columns: new columns q.
            keep: `[B, q]` bool on the CPU, False for padding; None keeps all.
            decode, padding_told: see `Step`.
        """
        if not self.pages:
            self.pages = [[] for _ in range(rows)]
            self.padding = [[] for _ in range(rows)]
            self.lengths = self.prompts = (0,) * rows
        told = padding_told or not any(self.padding)
        self.step = self._advance(columns, keep, decode, told)
        self.forwards += 1
        return self.step

    def leave(self, layer: int) -> None:
        """`layer` has stored everything of the current step."""
        self.progress[layer] = self.forwards

    def pages_needed(self, rows: int, columns: int, keep: Tensor | None) -> int:
        """Capacity after a step of `columns`, without taking it."""
        new = keep.sum(-1).tolist() if keep is not None else [columns] * rows
        lengths = self.lengths or (0,) * len(new)
        held = [len(pages) for pages in self.pages] or [0] * len(new)
        opened = sum(
            max(-(-(n + more) // self.page_size) - h, 0)
            for n, more, h in zip(lengths, new, held, strict=True)
        )
        return self._capacity_with(opened)

    def _advance(self, columns: int, keep: Tensor | None, decode: bool, told: bool) -> Step:
        kept = [columns] * self.rows
        last: list[int | None] = [-1] * self.rows
        if keep is not None:
            kept = keep.sum(-1).tolist()
            for row, mask in enumerate(keep.tolist()):
                self._note_padding(row, mask)
                last[row] = -1 - mask[::-1].index(True) if True in mask else None
        start = self.lengths
        lengths = tuple(n + new for n, new in zip(start, kept, strict=True))
        for pages, length in zip(self.pages, lengths, strict=True):
            while len(pages) * self.page_size < length:
                pages.append(self._take())
                self._forget_views()
        before = tuple(n - p for n, p in zip(start, self.prompts, strict=True))
        if not decode:
            self.prompts = lengths
        after = tuple(n - p for n, p in zip(lengths, self.prompts, strict=True))
        self.columns += columns
        self.lengths = lengths
        return Step(
            columns, start, lengths, decode, before, after, tuple(last), self.page_size, told
        )

    def _note_padding(self, row: int, mask: list[bool]) -> None:
        edges = [True, *mask, True]
        at = self.columns - 1
        begin = 0
        for offset, (left, right) in enumerate(pairwise(edges)):
            if left and not right:
                begin = at + offset + 1
            elif right and not left:
                ranges = self.padding[row]
                if ranges and ranges[-1][1] == begin:
                    begin = ranges.pop()[0]
                ranges.append((begin, at + offset + 1))

    def _take(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
            self.references[page] = 1
            return page
        self.references.append(1)
        return len(self.references) - 1

    def _drop(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            heapq.heappush(self._free, page)

    # -- shrinking and rearranging ---------------------------------------------------------------

    def check_crop(self, columns: int) -> None:
        """Raises InterruptedForward if `columns` columns are more than all layers have."""
        if self.step is not None and any(done < self.forwards for done in self.progress):
            safe = self.columns - self.step.columns
            if columns > safe:
                raise InterruptedForward(
                    f"the last forward of {self.step.columns} tokens stopped midway; crop at least "
                    f"those: at most {safe} of {self.columns} tokens can stay, found {columns}"
                )

    def crop(self, columns: int) -> list[tuple[int, int]]:
        """Keep the first `columns` columns; returns `(source, target)` page copies the layers owe.

        A copy is owed when a page that other rows share is cut: its row gets a page of its own.
        """
        self.padding = [
            [(begin, min(end, columns)) for begin, end in ranges if begin < columns]
            for ranges in self.padding
        ]
        self.lengths = tuple(_stored(ranges, columns) for ranges in self.padding)
        for pages, length in zip(self.pages, self.lengths, strict=True):
            count = -(-length // self.page_size)
            for page in pages[count:]:
                self._drop(page)
            del pages[count:]
        self.columns = columns
        self.prompts = tuple(map(min, self.prompts, self.lengths))
        copies = self._own_open_pages()
        self._settle()
        return copies

    def select(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Make the rows `[rows[i] for i in indices]`; returns the page copies the layers owe."""
        old = self.pages
        self.pages = [list(old[i]) for i in indices]
        for pages in self.pages:
            for page in pages:
                self.references[page] += 1
        for pages in old:
            for page in pages:
                self._drop(page)
        self.padding = [list(self.padding[i]) for i in indices]
        self.lengths = tuple(self.lengths[i] for i in indices)
        self.prompts = tuple(self.prompts[i] for i in indices)
        copies = self._own_open_pages()
        self._settle()
        return copies

    def join(self, other: PageTable) -> list[tuple[int, int]]:
        """Append the rows of `other`; returns `(its page id, ours)` for the pages the layers owe.

        Shorter rows count as padded on the left, which costs nothing: padding is not stored.
        """
        columns = max(self.columns, other.columns)
        copies: list[tuple[int, int]] = []
        for pages in other.pages:
            taken = [self._take() for _ in pages]
            copies += zip(pages, taken, strict=True)
            self.pages.append(taken)
        self.padding = [
            *_shifted(self.padding, columns - self.columns),
            *map(list, _shifted(other.padding, columns - other.columns)),
        ]
        self.lengths += other.lengths
        self.prompts += other.prompts
        self.columns = columns
        self._settle()
        return copies

    def recount(self) -> None:
        """Make references and free pages, and the pages of each row, what lengths say, after an
        interruption somewhere in a step."""
        if not len(self.pages) == len(self.padding) == len(self.lengths) == len(self.prompts):
            self.pages, self.padding, self.lengths, self.prompts = [], [], (), ()
        self.lengths = tuple(_stored(ranges, self.columns) for ranges in self.padding)
        for row, pages in enumerate(self.pages):
            self.padding[row] = [r for r in self.padding[row] if r[1] <= self.columns]
            del pages[-(-self.lengths[row] // self.page_size) :]
        self.prompts = tuple(map(min, self.prompts, self.lengths))
        self.references = [0] * len(self.references)
        for pages in self.pages:
            for page in pages:
                self.references[page] += 1
        while self.references and not self.references[-1]:  # layers may have no room for these
            self.references.pop()
        self._free = [page for page, count in enumerate(self.references) if not count]
        self._forget_views()

    def pages_cropped(self, columns: int) -> int:
        """Capacity after `crop(columns)`, without doing it."""
        held: Counter[int] = Counter()
        cut: Counter[int] = Counter()
        for row, pages in enumerate(self.pages):
            length = _stored(self.padding[row], columns)
            kept = pages[: -(-length // self.page_size)]
            held.update(kept)
            cut.update(kept[-1:] if length % self.page_size else ())
        own = sum(min(count, held[page] - 1) for page, count in cut.items())
        return max(self.capacity, len(held) + own)

    def pages_selected(self, indices: Sequence[int]) -> int:
        """Capacity after `select(indices)`, without doing it."""
        times = Counter(indices)
        kept = {page for row in times for page in self.pages[row]}
        own = sum(count - 1 for row, count in times.items() if self.lengths[row] % self.page_size)
        return max(self.capacity, len(kept) + own)

    def pages_joined(self, other: PageTable) -> int:
        """Capacity after `join(other)`, without doing it."""
        return self._capacity_with(sum(map(len, other.pages)))

    def _capacity_with(self, taken: int) -> int:
        """Capacity after `taken` more pages; free ones are taken first."""
        return self.capacity + max(taken - len(self._free), 0)

    def _own_open_pages(self) -> list[tuple[int, int]]:
        """Give every row that shares its open page one of its own; the `(source, target)` pairs."""
        copies = []
        for pages, length in zip(self.pages, self.lengths, strict=True):
            if length % self.page_size and self.references[pages[-1]] > 1:
                shared = pages[-1]
                self._drop(shared)
                pages[-1] = self._take()
                copies.append((shared, pages[-1]))
        return copies

    def _settle(self) -> None:
        """All layers agree again: they were all told of the change."""
        self._forget_views()
        self.step = None
        self.progress[:] = [self.forwards] * len(self.progress)

    # -- columns ---------------------------------------------------------------------------------

    def stored_columns(self, row: int) -> slice | Tensor:
        """The columns of `row` that are stored, in order: a slice when they are consecutive."""
        ranges = self.padding[row]
        if not ranges:
            return slice(0, self.columns)
        if len(ranges) == 1 and ranges[0][0] == 0:
            return slice(ranges[0][1], self.columns)
        stored = torch.ones(self.columns, dtype=torch.bool)
        for begin, end in ranges:
            stored[begin:end] = False
        return stored.nonzero().squeeze(-1)

    def visible_columns(self, queries: int) -> Tensor:
        """`[B, 1, q, C]` bool: what the last `queries` columns may see, padding left out."""
        stored = torch.zeros(self.rows, 1, 1, self.columns, dtype=torch.bool)
        for row in range(self.rows):
            stored[row, :, :, self.stored_columns(row)] = True
        at = torch.arange(self.columns)
        return stored & (at <= at[self.columns - queries :, None])


def _stored(padding: Sequence[tuple[int, int]], columns: int) -> int:
    """How many of the first `columns` columns are no padding."""
    return columns - sum(min(end, columns) - begin for begin, end in padding if begin < columns)


def _shifted(padding: list[list[tuple[int, int]]], by: int) -> list[list[tuple[int, int]]]:
    """Column ranges after `by` columns of padding were put before every row."""
    if not by:
        return padding
    moved = []
    for ranges in padding:
        later = [(begin + by, end + by) for begin, end in ranges]
        if later and later[0][0] == by:
            moved.append([(0, later[0][1]), *later[1:]])
        else:
            moved.append([(0, by), *later])
    return moved
