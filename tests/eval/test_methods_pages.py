"""Digests, bounds, group rules, and the methods that choose whole pages anew at every step."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from helpers import random_ids
from hypothesis import given
from hypothesis import strategies as st
from method_helpers import a_prompt, a_step, assert_same, build, model_of, run, spied

from eval.methods.flexicache_mask import FlexiCacheSelector
from eval.methods.pages import (
    Digest,
    DigestKind,
    box_scores,
    digest,
    pages_of,
    spread_scores,
    to_tokens,
    top_pages,
)
from eval.methods.quest import Quest, QuestSelector


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_worked_bound():
    keys = torch.tensor([[[[1.0, -2.0], [3.0, 0.0]]]])  # one head, one page of two tokens
    low, high = digest(keys, "minmax")
    assert low.tolist() == [[[1, -2]]]
    assert high.tolist() == [[[3, 0]]]
    assert box_scores(torch.tensor([[[2.0, -1.0]]]), low, high).item() == 8


@given(page=st.integers(1, 9), pages=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_the_score_bounds_every_product_of_the_page(page, pages, seed):
    keys, query = draw(2, pages, page, 5, seed=seed), draw(2, 3, 5, seed=seed + 1)
    bounds = box_scores(query, *digest(keys, "minmax"))
    products = (query[:, :, None, None] * keys[:, None]).sum(-1).amax(-1)  # [H, g, N]
    assert (bounds >= products - 1e-9).all()
    if page == 1:
        assert_same(bounds, products)
    literal = torch.maximum(
        query[:, :, None] * keys.amin(2)[:, None], query[:, :, None] * keys.amax(2)[:, None]
    ).sum(-1)
    assert_same(bounds, literal)


@given(
    growth=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    page=st.integers(1, 16),
    kind=st.sampled_from(get_args(DigestKind)),
    seed=st.integers(0, 1000),
)
def test_a_digest_grown_step_by_step_is_that_of_the_whole(growth, page, kind, seed):
    keys, query = draw(2, sum(growth), 4, seed=seed), draw(2, 3, 4, seed=seed + 1)
    grown, length = Digest(page, kind), 0
    for more in growth:
        length += more
        grown.update(keys[:, :length])
    assert grown.pages == length // page
    rule = spread_scores if kind == "mean_spread" else box_scores
    blocks = [digest(block[:, None], kind) for block in keys.split(page, 1)]
    whole = torch.cat([rule(query, *block) for block in blocks], -1)
    assert_same(grown.scores(query, keys), whole)
    assert_same(grown.scores(query), whole[..., : grown.pages])


def test_cuboid_mean_is_centre_and_mean_deviation():
    keys = torch.tensor([0.0, 1.0, 2.0, 6.0]).view(1, 1, 4, 1)
    low, high = digest(keys, "cuboid_mean")  # centre 3, deviations 3 2 1 3
    assert low.item() == 3 - 2.25
    assert high.item() == 3 + 2.25


@given(count=st.integers(1, 12), pages=st.integers(1, 10), seed=st.integers(0, 1000))
def test_forced_pages_come_first_and_count(count, pages, seed):
    scores = draw(3, pages, seed=seed)
    forced = torch.arange(pages) == pages - 1
    chosen = top_pages(scores, count, forced)
    assert (chosen.sum(-1) == min(count, pages)).all()
    assert chosen[:, -1].all()
    others = scores.masked_fill(forced, torch.inf)
    assert (others[chosen].view(3, -1).amin(-1) >= others.masked_fill(chosen, -9).amax(-1)).all()


def test_pages_become_tokens():
    pages = torch.tensor([[True, False, True]])
    assert to_tokens(pages, 3, 8).int().tolist() == [[1, 1, 1, 0, 0, 0, 1, 1]]
    assert pages_of(48, 16) == 3
    with pytest.raises(ValueError, match="expected a multiple of the page size 16"):
        pages_of(40, 16)


def test_group_rules_pick_different_pages():
    """Conformance 3: one key a page; max takes page 1, mean page 2, each query head its own."""
    queries = torch.eye(2)
    keys = torch.tensor([[[0, 0], [5, 0], [4, 4], [0, 4.5], [0, 0], [0, 0]]]).float()  # [1, 6, 2]
    flexicache = FlexiCacheSelector(
        build("flexicache-mask", 2, page_size=1, preset="paper", unstable="all").config,
        torch.ones(1, 1, dtype=torch.bool),
    )
    state = flexicache.begin(a_prompt(queries[:, None].expand(-1, 5, -1), keys[:, :5]))
    assert flexicache.select(a_step(queries, keys), state).int().tolist() == [[0, 1, 0, 0, 0, 1]]

    quest = QuestSelector(Quest(budget=3, page=1, dense_layers=0))
    mask = quest.select(a_step(queries, keys), quest.begin(a_prompt(queries[:, None], keys[:, :5])))
    assert mask.int().tolist() == [[0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 1]]

    oracle = build("oracle", 1, page=1)
    mass = oracle.choose(a_step(queries * 0.5, keys), 6)  # weights are summed over the group
    assert mass.int().tolist() == [[0, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize("layers", [24, 30, 32])
def test_quest_leaves_the_first_two_layers_dense(layers):
    model = model_of(layers=layers, kv_heads=1, group=2)
    spy = spied(model, build("quest", 48, page=8), random_ids(1, 102), 100)
    for layer in range(layers):
        for mask in spy.masks[layer]:
            assert mask.all() == (layer < 2)


def test_quest_last_page_rules():
    """The forced rule always has the last page, inside the budget; ranked may leave it out."""
    model, ids = model_of(), random_ids(1, 130)
    forced = spied(model, build("quest", 32, page=8), ids, 100)
    ranked = spied(model, build("quest", 32, page=8, last_page="ranked"), ids, 100)
    for layer in (2, 3):
        for step, (a, b) in enumerate(zip(forced.masks[layer], ranked.masks[layer])):
            length = 101 + step
            pages = [torch.nn.functional.pad(m, (0, -length % 8)).unflatten(-1, (-1, 8)).any(-1)
                     for m in (a, b)]  # fmt: skip
            assert all((p.sum(-1) == 4).all() for p in pages)
            assert pages[0][:, -1].all()
        without = [not m[:, -1].all() for m in ranked.masks[layer]]
        assert any(without)


def test_quest_chooses_per_query_head():
    spy = spied(model_of(), build("quest", 32, page=8), random_ids(1, 110), 100)
    mask = spy.masks[3][0]
    assert mask.shape == (6, 101)
    assert not torch.equal(mask[0], mask[1])


def test_quest_below_the_budget_is_dense_to_the_token():
    """The original could drop a page just under the budget (Quest issue 22)."""
    model = model_of()
    for length in (32, 33, 39, 40, 41):
        spy = spied(model, build("quest", 40, page=8), random_ids(1, length), length - 1)
        assert spy.masks[3][0].all() == (length <= 40)


def test_the_oracle_holds_the_most_mass_of_its_size():
    model, ids = model_of(), random_ids(1, 120)
    budget = {"budget": 32, "page": 8}
    held = {}
    for name in ("oracle", "random", "streaming-pages"):
        with build(name, **budget).session(model) as session:
            inner = session._selector
            held[name] = []

            class Mass(type(inner)):
                def select(self, step, state, kept=held[name]):
                    mask = super().select(step, state)
                    mass = step.per_group(step.weights()).sum(1)
                    kept.append((mass * mask).sum(-1))
                    return mask

            session._selector = Mass(inner.method)
            cache = session.new_cache()
            with torch.no_grad():
                model(ids[:, :100], past_key_values=cache)
                model(ids[:, 100:101], past_key_values=cache)
    first = {name: masses[0] for name, masses in held.items()}  # same inputs only in layer 0
    assert (first["oracle"] >= first["random"]).all()
    assert (first["oracle"] >= first["streaming-pages"]).all()
    assert (first["oracle"] > first["random"]).any()


def test_random_pages_differ_by_step_layer_and_seed_and_keep_the_last():
    model, ids = model_of(), random_ids(1, 110)
    spy = spied(model, build("random", 32, page=8), ids, 100)
    other = spied(model, build("random", 32, page=8, seed=1), ids, 100)
    masks = [*spy.masks[0], *spy.masks[1], other.masks[0][0]]
    assert all(mask[:, -1].all() for mask in masks)
    assert len({tuple(m[:, :96].flatten().tolist()) for m in masks}) == len(masks)


def test_streaming_pages():
    spy = spied(
        model_of(), build("streaming-pages", 32, page=8, sink_pages=2), random_ids(1, 105), 100
    )
    for step, mask in enumerate(spy.masks[2]):
        kept = mask[0].nonzero().flatten().tolist()
        last = (100 + step) // 8
        assert kept == [*range(16), *range(8 * (last - 1), 101 + step)]


def test_dense_is_dense():
    model, ids = model_of(), random_ids(1, 50)
    _, tokens = run(model, build("dense", 1), ids, 40)
    assert tokens.attended == tokens.resident == tokens.length
    assert set(tokens.moved) == set(tokens.metadata) == {0.0}
