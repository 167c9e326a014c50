"""Page digests, and the scores that rank pages by them (sections 3 and 4 of the paper).

A digest is two vectors per page, of the same dtype as the keys.

`minmax` and `cuboid_mean` keep a box, `lower` and `upper`. The score of a page for a query is
`sum_d max(q_d * lower_d, q_d * upper_d)`; with min/max digests that bounds the dot product of the
query with every key of the page. Since `lower <= upper`, the sum equals
`relu(q) . upper + min(q, 0) . lower`: one matrix product over `[upper, lower]` laid side by side,
and that is how boxes are stored.

`mean_spread` keeps the mean and the variance of each dimension. If dimensions vary independently
inside a page, the products of its keys with a query have the mean `q . mean` and the variance
`q^2 . variance`; the score is that mean and `SPREADS` standard deviations, about what the best of
16 keys reaches. A box adds up its sides instead, as if one key were extreme in all dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import Digest, GroupReduction

SPREADS = 1.5
"""Standard deviations above the mean that `mean_spread` scores a page by; 1.5 to 2.5 are alike."""

NAN_SCORE = torch.finfo(torch.float32).max
"""Pages whose score is not a number rank first, as their keys would in dense attention."""


def page_digests(keys: Tensor, kind: Digest, per_page: int) -> Tensor:
    """Digests of full pages.

    Args:
        keys: `[..., P, D]`, rotated keys of whole pages.
        kind: see `FlexiCacheConfig.digest`.
        per_page: sub-pages R that are summarised apart.

    Returns:
        `[..., R, 2 * D]`: upper, then lower; or mean, then `SPREADS^2` variances.
    """
    blocks = keys.unflatten(-2, (per_page, -1))  # [..., R, P / R, D]
    if kind == "mean_spread":
        return _mean_spread(blocks)
    lower, upper = blocks.amin(-2), blocks.amax(-2)
    if kind == "cuboid_mean":
        centre = lower / 2 + upper / 2  # their sum may leave float16's range
        radius = (blocks - centre.unsqueeze(-2)).abs().mean(-2)
        lower, upper = centre - radius, centre + radius
    return torch.cat([upper, lower], -1)


def _mean_spread(blocks: Tensor) -> Tensor:
    """In float32 at least: sums and squares of float16 keys leave float16's range."""
    exact = torch.promote_types(blocks.dtype, torch.float32)
    mean = blocks.mean(-2, dtype=exact)
    square = (blocks - mean.unsqueeze(-2)).square_().mean(-2).mul_(SPREADS**2)
    if square.dtype != blocks.dtype:  # finite keys have a finite digest
        square.clamp_(max=torch.finfo(blocks.dtype).max)
    return torch.cat([mean, square], -1).to(blocks.dtype)


def page_scores(
    queries: Tensor,
    digests: Tensor,
    counts: Sequence[int],
    per_page: int,
    reduction: GroupReduction,
    scaling: float,
    kind: Digest,
) -> Tensor:
    """Scores of pages, at least in float32, reduced over the query heads of each KV head.

    Args:
        queries: `[B, H, G, D]`: G query vectors (query heads of the group, times query tokens).
        digests: `[B, H, N * R, 2 * D]` or `[B or 1, H, N * R, 2 * D]`, R sub-pages per page.
        counts: per row, how many of the N pages are real; scores of the others mean nothing.
        per_page: R.
        reduction: see `FlexiCacheConfig.group_reduction`.
        scaling: the attention's scale of dot products; only `softmax_sum` uses it.
        kind: what `page_digests` was given.

    Returns:
        `[B, H, N]`; never NaN.
    """
    exact = torch.promote_types(queries.dtype, torch.float32)
    q, columns = queries.to(exact), digests.to(exact).transpose(-1, -2)  # [B, H, 2D, N * R]
    if kind == "mean_spread":
        mean, square = columns.chunk(2, -2)
        scores = (q.square() @ square).sqrt_().add_(q @ mean)  # [B, H, G, N * R]
    else:
        scores = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1) @ columns
    if per_page > 1:
        scores = scores.unflatten(-1, (-1, per_page)).amax(-1)
    if reduction == "softmax_sum":
        if min(counts) < max(counts):
            end = torch.tensor(counts, device=scores.device)[:, None, None, None]
            absent = torch.arange(scores.shape[-1], device=scores.device) >= end
            scores = scores.masked_fill(absent, -torch.inf)
        # one page without a number would leave none of its row's pages a weight
        bad = (scores.isnan() | scores.isposinf()).any(2)
        weights = (scores * scaling).masked_fill(bad[:, :, None], -torch.inf).softmax(-1).sum(2)
        return weights.nan_to_num_(nan=0).masked_fill_(bad, NAN_SCORE)
    scores = scores.amax(2)
    return scores.nan_to_num_(nan=NAN_SCORE, posinf=NAN_SCORE, neginf=-NAN_SCORE)
