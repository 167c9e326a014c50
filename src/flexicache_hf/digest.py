"""Page digests, and the scores that rank pages by them (sections 3 and 4 of the paper).

A digest is two vectors per page, `lower` and `upper`, of the same dtype as the keys. The score of a
page for a query is `sum_d max(q_d * lower_d, q_d * upper_d)`; with min/max digests that bounds the
dot product of the query with every key of the page. Since `lower <= upper`, the sum equals
`relu(q) . upper + min(q, 0) . lower`: one matrix product over `[upper, lower]` laid side by side,
and that is how digests are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import Digest, GroupReduction

NAN_SCORE = torch.finfo(torch.float32).max
"""Pages whose score is not a number rank first, as their keys would in dense attention."""


def page_digests(keys: Tensor, kind: Digest, per_page: int) -> Tensor:
    """Digests of full pages.

    Args:
        keys: `[..., P, D]`, rotated keys of whole pages.
        kind: `minmax` or `cuboid_mean`.
        per_page: sub-pages R that are summarised apart.

    Returns:
        `[..., R, 2 * D]`: upper, then lower.
    """
    blocks = keys.unflatten(-2, (per_page, -1))  # [..., R, P / R, D]
    lower, upper = blocks.amin(-2), blocks.amax(-2)
    if kind == "cuboid_mean":
        centre = (lower + upper) / 2
        radius = (blocks - centre.unsqueeze(-2)).abs().mean(-2)
        lower, upper = centre - radius, centre + radius
    return torch.cat([upper, lower], -1)


def page_scores(
    queries: Tensor,
    digests: Tensor,
    counts: Sequence[int],
    per_page: int,
    reduction: GroupReduction,
    scaling: float,
) -> Tensor:
    """Scores of pages, at least in float32, reduced over the query heads of each KV head.

    Args:
        queries: `[B, H, G, D]`: G query vectors (query heads of the group, times query tokens).
        digests: `[B, H, N * R, 2 * D]` or `[B or 1, H, N * R, 2 * D]`, R sub-pages per page.
        counts: per row, how many of the N pages are real; scores of the others mean nothing.
        per_page: R.
        reduction: see `FlexiCacheConfig.group_reduction`.
        scaling: the attention's scale of dot products; only `softmax_sum` uses it.

    Returns:
        `[B, H, N]`; never NaN.
    """
    exact = torch.promote_types(queries.dtype, torch.float32)
    q = queries.to(exact)
    signed = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)  # [B, H, G, 2D]
    scores = signed @ digests.to(exact).transpose(-1, -2)  # [B, H, G, N * R]
    if per_page > 1:
        scores = scores.unflatten(-1, (-1, per_page)).amax(-1)
    if reduction == "softmax_sum":
        if min(counts) < max(counts):
            end = torch.tensor(counts, device=scores.device)[:, None, None, None]
            absent = torch.arange(scores.shape[-1], device=scores.device) >= end
            scores = scores.masked_fill(absent, -torch.inf)
        scores = (scores * scaling).softmax(-1).sum(2)
    else:
        scores = scores.amax(2)
    return scores.nan_to_num_(nan=NAN_SCORE, posinf=NAN_SCORE, neginf=-NAN_SCORE)
