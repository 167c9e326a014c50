"""One forward pass over new tokens, as every layer sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One forward pass over new tokens, as every layer sees it.

    Attributes:
        columns: new columns, padding included.
        start: tokens each row held before.
        lengths: tokens each row holds after.
        decode: the new tokens attend sparsely and count as decode steps.
        steps_before, steps: decode steps of each row since its last prompt token, before and after.
        last: where each row's last new token is, counted from the end (-1 is the last column); None
            if all its new columns are padding.
        pages: pages per row, the newest included.
        settled: pages per row before the first one that holds a new token.
        padding_told: the forward's mask tells which columns are padding, or there are none.
        uniform: one token is new and all rows are equally long, so that no masks are needed.
        filled: `(row, page)` of every page that became full in this step.
    """

    columns: int
    start: tuple[int, ...]
    lengths: tuple[int, ...]
    decode: bool
    steps_before: tuple[int, ...]
    steps: tuple[int, ...]
    last: tuple[int | None, ...]
    page_size: int
    padding_told: bool
    pages: tuple[int, ...] = field(init=False)
    settled: tuple[int, ...] = field(init=False)
    uniform: bool = field(init=False)
    filled: tuple[tuple[int, int], ...] = field(init=False)
    _cached: dict[tuple[object, ...], Tensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        size = self.page_size
        pages = tuple(-(-length // size) for length in self.lengths)
        settled = tuple(start // size for start in self.start)
        uniform = self.columns == 1 and min(self.lengths) == max(self.lengths)
        filled = tuple(
            (row, page)
            for row, (before, length) in enumerate(zip(settled, self.lengths, strict=True))
            for page in range(before, length // size)
        )
        for name, value in (
            ("pages", pages),
            ("settled", settled),
            ("uniform", uniform),
            ("filled", filled),
        ):
            object.__setattr__(self, name, value)

    def new_positions(self, device: torch.device) -> Tensor:
        """`[B, q]` token positions within the row; only for steps without padding."""

        def make() -> Tensor:
            start = torch.tensor(self.start, device=device)
            return start[:, None] + torch.arange(self.columns, device=device)

        return self.once(("positions", device), make)

    def newest_pages(self, device: torch.device) -> Tensor:
        """`[B, n]` pages that hold new tokens, -1 where a row has fewer."""

        def make() -> Tensor:
            most = max(p - s for p, s in zip(self.pages, self.settled, strict=True))
            numbers = torch.tensor(self.settled)[:, None] + torch.arange(most)
            missing = numbers >= torch.tensor(self.pages)[:, None]
            return numbers.masked_fill_(missing, -1).to(device)

        return self.once(("newest", device), make)

    def once(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """What all layers of a step share is computed by the first that needs it."""
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]
