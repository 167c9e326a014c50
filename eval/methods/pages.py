"""Pages: digests of their keys, scores against a query, and the way back to token masks."""

from __future__ import annotations

import torch
from torch import Tensor

from flexicache_hf.config import Digest as DigestKind

from .growing import Growing
from .views import at_least_float32


class Digest:
    """Two vectors per page that stand for its keys.

    minmax: the bounding box (Quest, FlexiCache). cuboid_mean: the box's centre minus and plus the
    mean absolute deviation from it (ArkVale), the same size but no longer a bound. mean_spread:
    mean and standard deviation. Every page is digested once, when it fills.
    """

    def __init__(self, page: int, kind: DigestKind = "minmax") -> None:
        self.page, self.kind = page, kind
        self._first, self._second = Growing(), Growing()

    @property
    def pages(self) -> int:
        """Full pages digested so far."""
        return self._first.length

    def update(self, keys: Tensor) -> None:
        """Digest the pages of `keys` `[H, T, D]` that filled since the last call."""
        start, stop = self.pages * self.page, keys.shape[1] // self.page * self.page
        if stop > start:
            first, second = digest(keys[:, start:stop].unflatten(1, (-1, self.page)), self.kind)
            self._first.append(first)
            self._second.append(second)

    def scores(self, query: Tensor, keys: Tensor | None = None) -> Tensor:
        """`[H, g, N]` of queries `[H, g, D]` against the full pages; with `keys`
        `[H, T, D]` also against the part of the last page that is filled."""
        if self.pages:
            scores = self._score(query, self._first.view, self._second.view)
        else:
            scores = at_least_float32(query.new_empty(*query.shape[:2], 0))
        if keys is not None and keys.shape[1] > self.pages * self.page:
            first, second = digest(keys[:, None, self.pages * self.page :], self.kind)
            scores = torch.cat([scores, self._score(query, first, second)], -1)
        return scores

    def _score(self, query: Tensor, first: Tensor, second: Tensor) -> Tensor:
        rule = spread_scores if self.kind == "mean_spread" else box_scores
        return rule(query, first, second)


def digest(keys: Tensor, kind: DigestKind) -> tuple[Tensor, Tensor]:
    """`[H, N, P, D]` -> two of `[H, N, D]`."""
    if kind == "mean_spread":
        exact = at_least_float32(keys)
        mean, deviation = exact.mean(2), exact.std(2, correction=0)
        return mean.to(keys.dtype), deviation.to(keys.dtype)
    low, high = keys.amin(2), keys.amax(2)
    if kind == "minmax":
        return low, high
    centre = (low + high) / 2
    radius = (keys - centre[:, :, None]).abs().mean(2)
    return centre - radius, centre + radius


def box_scores(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """sum_d max(q_d low_d, q_d high_d), for low <= high: `[H, g, D]`, `[H, N, D]` -> `[H, g, N]`.

    The maximum is at `high` where q_d is positive and at `low` where it is negative, so that the
    sum is two products of matrices.
    """
    q, low, high = (at_least_float32(tensor) for tensor in (query, low, high))
    upper, lower = high.transpose(1, 2), low.transpose(1, 2)
    return q.clamp(min=0) @ upper + q.clamp(max=0) @ lower


def spread_scores(query: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """The mean product of a page's keys with the query and 1.5 standard deviations, the dimensions
    taken as independent: `[H, g, D]`, `[H, N, D]` -> `[H, g, N]`."""
    q, mean, deviation = (at_least_float32(tensor) for tensor in (query, mean, deviation))
    variance = q.square() @ deviation.square().transpose(1, 2)
    return q @ mean.transpose(1, 2) + 1.5 * variance.sqrt()


def top_pages(scores: Tensor, count: int, forced: Tensor | None = None) -> Tensor:
    """Bool `[H, N]` of the `count` best pages of each head; those of `forced` `[N]` come first."""
    if forced is not None:
        scores = scores.masked_fill(forced, torch.inf)
    count = min(count, scores.shape[-1])
    best = scores.topk(count, -1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def to_tokens(pages: Tensor, page: int, length: int) -> Tensor:
    """Bool `[H, N]` of pages -> `[H, T]` of tokens."""
    return pages.repeat_interleave(page, -1)[:, :length]


def count_pages(length: int, page: int) -> int:
    return -(-length // page)


def pages_of(budget: int, page: int) -> int:
    """Pages in a budget of tokens.

    Raises:
        ValueError: the budget is not a whole number of pages.
    """
    if page < 1 or budget % page or budget < page:
        raise ValueError(
            f"budget is {budget} tokens, expected a multiple of the page size {page}: methods are "
            "compared at equal tokens, so it is not rounded"
        )
    return budget // page
