"""Page pools: tensors indexed by page id (or slot) that grow a little at a time.

Growing copies the pool, so it must be rare; slack is memory nobody uses, so it must be small. One
part in 64 keeps both under two percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

SLACK = 64


def with_slack(pages: int) -> int:
    """Capacity to allocate when `pages` are needed."""
    return pages + pages // SLACK


def grown(pool: Tensor, dim: int, needed: int, most: int | None = None) -> Tensor:
    """`pool` with at least `needed` entries along `dim`, its content kept, new entries zero.

    Zero rather than uninitialised: entries that no mask hides must never be NaN by chance.
    """
    held = pool.shape[dim]
    if held >= needed:
        return pool
    shape = list(pool.shape)
    shape[dim] = max(needed, with_slack(needed) if most is None else min(with_slack(needed), most))
    larger = pool.new_zeros(shape)
    larger.narrow(dim, 0, held).copy_(pool)
    return larger


def runs(ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """`(first, id, count)` of every run of consecutive ids: blocks that copy as one piece."""
    found = []
    for _, group in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = list(group)
        found.append((members[0][0], members[0][1], len(members)))
    return found


def store_pages(pool: Tensor, ids: Sequence[int], pages: Tensor) -> None:
    """`pool[ids] = pages`, without a temporary for the runs of consecutive ids."""
    for first, page, count in runs(ids):
        pool[page : page + count].copy_(pages[first : first + count])


def as_pages(tokens: Tensor, page_size: int) -> Tensor:
    """`[H, N * P, D]` to a `[N, H, P, D]` view."""
    return tokens.unflatten(1, (-1, page_size)).transpose(0, 1)


def nbytes(*tensors: Tensor) -> int:
    """Bytes allocated, slack included."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def import_pages(pool: Tensor, other: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """`pool[target] = other[source]` for all pairs, from another cache's pool."""
    if copies:
        sources, targets = torch.tensor(copies, device=pool.device).unbind(-1)
        pool.index_copy_(
            0, targets, other.index_select(0, sources.to(other.device)).to(pool.device)
        )


def copy_pages(pool: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """`pool[target] = pool[source]` for all pairs."""
    if copies:
        sources, targets = torch.tensor(copies, device=pool.device).unbind(-1)
        pool.index_copy_(0, targets, pool.index_select(0, sources))
