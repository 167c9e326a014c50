"""Temporal stability of KV heads (sections 3 and 4 of the paper): RCO, windows, the vote.

Page sets come as integer tensors `pages` of shape `[steps, L, H_kv, K]` (the ids of the K selected
pages of every decode step, in any order) with `num_pages` of shape `[steps]` (N_t, the pages that
existed at each step). Everything here also works window by window: `StabilityVote` is the one
classifier, whether it is fed recorded generations or the windows of a generation under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 16
Heads = tuple[tuple[int, int], ...]  # sorted (layer, kv_head) pairs


def rco(shared: Tensor, top_k: int, num_pages: Tensor) -> Tensor:
    """Rescaled overlap of two top-K page sets: 1 for equal sets, 0 for chance level or below.

    `max(0, (shared/K - K/N) / (1 - K/N))`, where K/N is the overlap expected of random sets.

    Args:
        shared: number of pages in both sets, any shape.
        top_k: K.
        num_pages: N of the later step, broadcastable to `shared`.

    Raises:
        ValueError: some N is not larger than K; all pages are selected then, and RCO is undefined.
    """
    if bool((num_pages <= top_k).any()):
        raise ValueError(
            f"RCO needs more pages than K: num_pages goes down to {int(num_pages.min())}, "
            f"top_k is {top_k}; leave out the steps at which every page is selected"
        )
    chance = top_k / num_pages.double()
    return ((shared / top_k - chance) / (1 - chance)).clamp(min=0.0)


def window_rco(pages: Tensor, num_pages: Tensor, window: int = WINDOW) -> Tensor:
    """RCO of every later step of a window with the window's first step.

    Windows are consecutive and do not overlap; an incomplete last window is left out, and so is
    every window with a step at which N <= K.

    Args:
        pages: `[steps, L, H_kv, K]` page ids; the ids of one set are distinct.
        num_pages: `[steps]`.
        window: W, steps in a window.

    Returns:
        `[windows, W - 1, L, H_kv]` float64; `windows` may be 0.
    """
    if window < 2:
        raise ValueError(f"window is {window}, but comparing steps needs at least 2")
    if pages.ndim != 4 or num_pages.shape != pages.shape[:1]:
        raise ValueError(
            "expected pages [steps, L, H_kv, K] and num_pages [steps], found "
            f"{list(pages.shape)} and {list(num_pages.shape)}"
        )
    count, top_k = len(pages) // window, pages.shape[-1]
    sets = pages[: count * window].reshape(count, window, *pages.shape[1:]).long()
    totals = num_pages[: count * window].reshape(count, window)
    counted = (totals > top_k).all(dim=1)
    sets, totals = sets[counted], totals[counted]
    if len(sets) == 0:
        return torch.zeros(0, window - 1, *pages.shape[1:3], dtype=torch.float64)
    if bool((sets < 0).any()) or bool((sets >= totals[:, :, None, None, None]).any()):
        raise ValueError("pages holds ids outside 0..num_pages-1 at a step with more than K pages")
    ordered = sets.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ValueError("pages holds the same id twice in one set; expected K distinct pages")
    reference = torch.zeros(*sets[:, 0].shape[:-1], int(totals.max()), dtype=torch.bool)
    reference.scatter_(-1, sets[:, 0], True)
    later = sets[:, 1:]
    reference = reference.unsqueeze(1).expand(*later.shape[:-1], -1)
    shared = reference.gather(-1, later).sum(-1)
    return rco(shared, top_k, totals[:, 1:, None, None])


def offset_curves(windows: Tensor) -> Tensor:
    """Mean RCO against the offset 1..W-1 from the reference step.

    `windows` is `[windows, W - 1, L, H_kv]` of `window_rco`; returns `[W - 1, L, H_kv]`.
    """
    return windows.mean(dim=0)


def window_stability(windows: Tensor) -> Tensor:
    """Stability of every head in every window: its mean RCO. `[windows, L, H_kv]`."""
    return windows.mean(dim=1)


class StabilityVote:
    """The classifier: every window names its M least stable heads; the M named most often win.

    Ties are broken so that the result is a function of the windows alone: within a window, equal
    stability goes to the lower (layer, KV head); in the count, equal votes
    go to the lower mean stability, then to the lower (layer, KV head).

    Args:
        num_layers: L.
        num_kv_heads: H_kv.
        num_unstable: M. Only measured heads (those whose stability is not NaN) may be named.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, num_unstable: int) -> None:
        if not 0 <= num_unstable <= num_layers * num_kv_heads:
            raise ValueError(
                f"num_unstable is {num_unstable}, but the model has {num_layers * num_kv_heads} "
                "KV heads; choose from 0 to that number"
            )
        self.num_unstable = num_unstable
        self.num_windows = 0
        self.votes = torch.zeros(num_layers, num_kv_heads, dtype=torch.int64)
        self._total = torch.zeros(num_layers, num_kv_heads, dtype=torch.float64)

    def add(self, stability: Tensor) -> None:
        """Count the windows of `stability`, `[windows, L, H_kv]` (see `window_stability`)."""
        if stability.shape[1:] != self.votes.shape:
            raise ValueError(
                f"stability has shape {list(stability.shape)}, expected "
                f"[windows, {', '.join(map(str, self.votes.shape))}]"
            )
        self.votes.view(-1).index_add_(
            0,
            least_stable(stability, self.num_unstable).flatten(),
            torch.ones(len(stability) * self.num_unstable, dtype=torch.int64),
        )
        self._total += stability.double().sum(dim=0)
        self.num_windows += len(stability)

    def add_pages(self, pages: Tensor, num_pages: Tensor, window: int = WINDOW) -> int:
        """Count the windows of page sets (see `window_rco`); returns how many counted."""
        windows = window_rco(pages, num_pages, window)
        self.add(window_stability(windows))
        return len(windows)

    @property
    def stability(self) -> Tensor:
        """Mean stability over all windows, `[L, H_kv]` float64; NaN before the first window.

        Rounded to the six decimals that a profile keeps, so that a stored profile ranks alike.
        """
        mean = self._total / self.num_windows if self.num_windows else self._total * torch.nan
        return mean.round(decimals=6)

    def unstable_heads(self) -> Heads:
        """The M heads named most often.

        Raises:
            ValueError: no window has been counted.
        """
        if self.num_windows == 0:
            raise ValueError(
                "no window counted: every window had a step with N <= K pages, or there were fewer "
                "steps than one window; use longer texts, more steps or a smaller K"
            )
        return rank_heads(self.votes, self.stability)[: self.num_unstable]


def least_stable(stability: Tensor, num_unstable: int) -> Tensor:
    """Flat ids (`layer * H_kv + head`) of each window's least stable heads, `[windows, M]`."""
    measured = int((~stability[:1].isnan()).sum()) if len(stability) else num_unstable
    if num_unstable > measured:
        raise ValueError(f"num_unstable is {num_unstable}, but only {measured} heads were measured")
    return (
        stability.flatten(1).nan_to_num(nan=torch.inf).argsort(dim=1, stable=True)[:, :num_unstable]
    )


def rank_heads(votes: Tensor, stability: Tensor) -> Heads:
    """The measured heads, least stable first: by votes, then mean stability, then position.

    Both arguments are `[L, H_kv]`. Not sorted by position, unlike a set of unstable heads.
    """
    heads = [
        (-int(votes[layer, head]), float(stability[layer, head]), layer, head)
        for layer, head in (~stability.isnan()).nonzero().tolist()
    ]
    return tuple((layer, head) for _, _, layer, head in sorted(heads))


def vote(stability: Tensor, num_unstable: int) -> Heads:
    """The unstable heads, sorted, from all windows at once. `stability` is `[windows, L, H_kv]`."""
    ballot = StabilityVote(stability.shape[1], stability.shape[2], num_unstable)
    ballot.add(stability)
    return tuple(sorted(ballot.unstable_heads()))


def overlap(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> float:
    """|A n B| / M of two equally large, non-empty head sets."""
    if len(first) != len(second) or not first:
        raise ValueError(
            f"overlap compares sets of one size: found {len(first)} and {len(second)} heads"
        )
    return len(set(first) & set(second)) / len(first)


@dataclass(frozen=True)
class SplitHalf:
    """Does half of the windows predict the other half? Means over random splits."""

    recall: float  # share of a held-out window's M least stable heads that the vote had named
    agreement: float  # overlap of the two halves' votes
    chance: float  # M / number of measured heads: expected of random sets, for both
    splits: int


def split_half(
    stability: Tensor,
    num_unstable: int,
    *,
    groups: Sequence[int] | None = None,
    splits: int = 20,
    seed: int = 43,
) -> SplitHalf:
    """Split-half recall@M of the vote.

    Args:
        stability: `[windows, L, H_kv]`.
        num_unstable: M.
        groups: the document of every window. Given these, whole documents are split, so that no
            document is on both sides; otherwise windows are, as the authors do.
        splits: random halvings to average over.
        seed: of the halvings.
    """
    labels = torch.arange(len(stability)) if groups is None else torch.tensor(list(groups))
    units = torch.tensor(sorted(set(labels.tolist())))
    if len(units) < 2:
        raise ValueError(f"a split needs two windows (or documents), found {len(units)}")
    generator = torch.Generator().manual_seed(seed)
    recalls, agreements = [], []
    for _ in range(splits):
        chosen = units[torch.randperm(len(units), generator=generator)[: len(units) // 2]]
        mask = torch.isin(labels, chosen)
        named = vote(stability[mask], num_unstable)
        flat = torch.tensor([layer * stability.shape[2] + head for layer, head in named])
        hits = torch.isin(least_stable(stability[~mask], num_unstable), flat)
        recalls.append(float(hits.double().mean()))
        agreements.append(overlap(named, vote(stability[~mask], num_unstable)))
    measured = int((~stability[0].isnan()).sum())
    return SplitHalf(
        sum(recalls) / splits, sum(agreements) / splits, num_unstable / measured, splits
    )


@dataclass(frozen=True)
class TaskOverlap:
    """Overlap of the tasks' unstable sets; `matrix` is symmetric, ones on its diagonal."""

    tasks: tuple[str, ...]
    matrix: tuple[tuple[float, ...], ...]
    chance: float  # M / number of heads

    @property
    def mean(self) -> float:
        """Off-diagonal mean; NaN for one task."""
        values = [v for i, row in enumerate(self.matrix) for j, v in enumerate(row) if i != j]
        return sum(values) / len(values) if values else float("nan")


def task_overlap(sets: Mapping[str, Heads], num_heads: int) -> TaskOverlap:
    """Overlap |A n B| / M of every two tasks; `num_heads` is how many heads were measured."""
    tasks = tuple(sets)
    matrix = tuple(tuple(overlap(sets[a], sets[b]) for b in tasks) for a in tasks)
    return TaskOverlap(tasks, matrix, len(sets[tasks[0]]) / num_heads)
