"""What a page's digest keeps, and what its score promises."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexicache_hf.config import Digest, GroupReduction
from flexicache_hf.pages.digest import NAN_SCORE, page_digests, page_scores

KINDS = get_args(Digest)
REDUCTIONS = get_args(GroupReduction)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def scores_of(keys, queries, kind, per_page=1, reduction="max", scaling=1.0):
    """Scores `[H, N]` of pages of keys `[H, N, P, D]` for queries `[H, G, D]`."""
    digests = page_digests(keys, kind, per_page).flatten(1, 2)[None]
    count = [keys.shape[1]]
    return page_scores(queries[None], digests, count, per_page, reduction, scaling, kind)[0]


def test_mean_spread_by_hand():
    keys = torch.tensor([[[[1.0, -2.0], [3.0, 2.0]]]])  # means 2 and 0, deviations 1 and 2
    query = torch.tensor([[[3.0, 2.0]]])
    assert scores_of(keys, query, "mean_spread").item() == 6 + 1.5 * 5  # sqrt(3^2 1^2 + 2^2 2^2)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), pages=st.integers(1, 5))
def test_a_page_of_equal_keys_scores_their_product(kind, seed, pages):
    """And digests of every key apart score the best product."""
    keys, queries = draw(2, pages, 4, 6, seed=seed), draw(2, 1, 6, seed=seed + 1)
    products = (queries * keys[:, :, 0]).sum(-1)
    alike = keys[:, :, :1].expand(-1, -1, 4, -1)
    torch.testing.assert_close(scores_of(alike, queries, kind), products)
    best = (queries[:, :, None] * keys).sum(-1).amax(-1)
    torch.testing.assert_close(scores_of(keys, queries, kind, per_page=4), best)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_keys_have_finite_scores(kind, dtype):
    """Also at the end of float16's range, where sums and squares of keys are outside it."""
    for size in (1e-4, 1.0, 300.0, torch.finfo(dtype).max if dtype == torch.float16 else 1e5):
        keys = draw(2, 3, 16, 8, dtype=torch.float32).clamp(-1, 1).mul(size).to(dtype)
        digests = page_digests(keys, kind, 1)
        assert digests.dtype == dtype
        assert digests.isfinite().all()
        scores = scores_of(keys, draw(2, 2, 8, dtype=dtype), kind)
        assert scores.dtype == torch.float32
        assert (scores.abs() < NAN_SCORE).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_ranks_as_float64_does(dtype):
    keys, queries = draw(4, 60, 16, 32, dtype=dtype), draw(4, 3, 32, dtype=dtype)
    found = scores_of(keys, queries, "mean_spread").double()
    exact = scores_of(keys.double(), queries.double(), "mean_spread")
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("per_page", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_spoils_dense_attention_comes_first(kind, per_page, reduction, value):
    """And the others keep their order: one bad key must not make a head's ranking arbitrary."""
    keys, queries = draw(2, 9, 4, 6), draw(2, 3, 6, seed=1).abs() + 0.1
    usual = scores_of(keys, queries, kind, per_page, reduction)
    keys[0, 5, 3, 2] = value
    scores = scores_of(keys, queries, kind, per_page, reduction)
    assert not scores.isnan().any()
    assert scores[0].argmax() == 5
    assert (scores[0] == scores[0].amax()).sum() == 1
    kept = [0, 1, 2, 3, 4, 6, 7, 8]
    assert torch.equal(scores[0, kept].argsort(), usual[0, kept].argsort())
    torch.testing.assert_close(scores[1], usual[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_aligned_page_wins_and_pages_do_not_depend_on_their_company(kind):
    keys, queries = draw(1, 8, 16, 32) * 0.1, draw(1, 1, 32, seed=3)
    keys[0, 6] += queries[0] / queries.norm()
    assert scores_of(keys, queries, kind).argmax() == 6
    alone = torch.cat([page_digests(keys[:, [i]], kind, 2) for i in range(8)], 1)
    assert torch.equal(alone, page_digests(keys, kind, 2))
