"""Which pages a ranking selects, and at which decode steps a stable head ranks.

A ranking selects K pages: the newest page (it may be partial, and has no digest), and K - 1 of the
pages before it, the best by score once sink and recent pages are placed. Pages opened after a
ranking are attended in addition until the next one (section 4 of the paper, "tail").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import FlexiCacheConfig


def select_pages(scores: Tensor, before: Sequence[int], config: FlexiCacheConfig) -> Tensor:
    """The pages a ranking selects among those that precede the newest one.

    Args:
        scores: `[B, H, N]` with N >= max(before); overwritten.
        before: per row, the number of pages before the newest: candidates are pages 0..before-1.
        config: K, sink and recent pages.

    Returns:
        `[B, H, min(K - 1, max(before))]` page numbers, the best first. A row with fewer candidates
        is filled with -1 at its end.
    """
    most = max(before)
    scores = scores[..., :most]
    sink, recent = config.kept_sink, config.kept_recent - 1
    if min(before) == most:
        scores[..., :sink] = torch.inf
        scores[..., max(most - recent, 0) :] = torch.inf
        return scores.topk(min(config.pages - 1, most), -1).indices
    page = torch.arange(most, device=scores.device)
    end = torch.tensor(before, device=scores.device)[:, None]
    forced = (page < sink) | (page >= end - recent)
    scores.masked_fill_(forced[:, None], torch.inf)
    scores.masked_fill_((page >= end)[:, None], -torch.inf)
    values, pages = scores.topk(min(config.pages - 1, most), -1)
    return pages.masked_fill_(values == -torch.inf, -1)


def is_due(previous: int, step: int, layer: int, config: FlexiCacheConfig) -> bool:
    """Whether the stable heads of `layer` rank in a forward that takes a row from decode step
    `previous` to `step` (both counted from 1 after the last prompt token).

    The first decode step always ranks; later ones when they hit a multiple of the interval.
    """
    if previous < 1 <= step:
        return True
    if config.rerank_interval is None:
        return False
    offset = layer if config.stagger else 0
    period = config.rerank_interval
    return (step + offset) // period > (previous + offset) // period
