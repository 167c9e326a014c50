"""Conformance 15: counted tokens against the closed forms."""

from __future__ import annotations

import pytest
from helpers import random_ids
from method_helpers import build, make, model_of, run

PROMPT, STEPS = 200, 40
LENGTHS = range(PROMPT + 1, PROMPT + STEPS + 1)


def account(name, budget, query_heads=3, **options):
    """`query_heads` per KV head."""
    model = model_of(group=query_heads)
    method = make(name, budget, model, **options)
    return run(model, method, random_ids(1, PROMPT + STEPS), PROMPT)[1]


def expect(column, formula):
    assert column == pytest.approx([formula(length) for length in LENGTHS])


def free(length, page):
    """Slots of the newest page that no token fills yet."""
    return -length % page


def test_dense():
    tokens = account("dense", 1)
    expect(tokens.attended, lambda t: t)
    expect(tokens.resident, lambda t: t)


@pytest.mark.parametrize("last_page", ["forced", "ranked"])
def test_quest(last_page):
    """Attended B except in layers 0 and 1; resident T; metadata 1/page outside those layers."""
    tokens = account("quest", 64, last_page=last_page)
    if last_page == "forced":
        expect(tokens.attended, lambda t: (2 * t + 2 * (64 - free(t, 16))) / 4)
    expect(tokens.resident, lambda t: t)
    expect(tokens.metadata, lambda t: 0.5 * -(-t // 16) / t)
    assert set(tokens.moved) == {0.0}
    assert all(u >= a for u, a in zip(tokens.union, tokens.attended))


def test_quest_query_heads_are_a_union_for_the_kv_head():
    single = account("quest", 64, query_heads=1)
    assert single.union == pytest.approx(single.attended)
    grouped = account("quest", 64, query_heads=3)
    assert sum(grouped.union) > sum(grouped.attended)


@pytest.mark.parametrize(("unstable", "share"), [("none", 0.0), ("random", 0.25), ("all", 1.0)])
@pytest.mark.parametrize("name", ["flexicache", "flexicache-mask"])
def test_flexicache(name, unstable, share):
    """Resident f_u T + (1 - f_u)(B + tail): the formula of the paper's 70 %."""
    tokens = account(name, 64, unstable=unstable, preset="paper")

    def opened(t):  # pages since the ranking at s = 1, 16, 32: served from s = 2, 17, 33
        s = t - PROMPT
        ranked = PROMPT + (1 if s <= 16 else (s - 1) // 16 * 16)
        return -(-t // 16) - -(-ranked // 16)

    def stable(t):
        return 64 + 16 * opened(t) - free(t, 16)

    expect(tokens.attended, lambda t: share * (64 - free(t, 16)) + (1 - share) * stable(t))
    expect(tokens.resident, lambda t: share * t + (1 - share) * stable(t))
    expect(tokens.metadata, lambda t: t // 16 / t)
    if name == "flexicache-mask":
        moving = {i + 1 for i, moved in enumerate(tokens.moved) if moved}
        assert moving == ({16, 32} if share < 1 else set())


def test_promoted_tokens_are_the_new_pages():
    tokens = account("flexicache-mask", 64, unstable="none", preset="paper")
    assert all(moved * 8 % 16 == 0 for moved in tokens.moved)  # whole pages over 8 heads
    assert all(0 <= moved <= 64 - 16 for moved in tokens.moved)  # the newest is there already


def test_lserve():
    """.5 T + .5 (sink + local) resident; metadata 1/sub-page for half of the heads."""
    tokens = account("lserve", 64, page=16, sub_page=4, sink=8, local=24)
    expect(tokens.resident, lambda t: 0.5 * t + 0.5 * 32)
    expect(tokens.metadata, lambda t: 0.5 * -(-t // 4) / t)
    selected = [t for t in LENGTHS if t % 4 == 0]
    for t in selected:
        at = tokens.attended[t - PROMPT - 1]
        assert at == pytest.approx(0.5 * (64 - free(t, 16)) + 0.5 * 32)


def test_lserve_attends_2240_tokens_at_its_paper_setting():
    method = build("lserve", 4096)
    assert 0.5 * method.budget + 0.5 * sum(method.window) == 2240


def test_duoattention():
    tokens = account("duoattention", 1, sink=8, recent=24, sparsity=0.75)
    for column in (tokens.attended, tokens.resident):
        expect(column, lambda t: 0.25 * t + 0.75 * 32)


@pytest.mark.parametrize("positions", ["slot", "original"])
def test_streamingllm(positions):
    tokens = account("streamingllm", 64, positions=positions)
    expect(tokens.attended, lambda t: 64)
    expect(tokens.resident, lambda t: 64)


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_evicting_methods_hold_the_budget_and_the_current_token(name):
    tokens = account(name, 64)
    expect(tokens.attended, lambda t: 65)
    expect(tokens.resident, lambda t: 65)
    expect(tokens.metadata, lambda t: 65 / (2 * 16 * t) if name == "h2o" else 0)


def test_snapkv_has_the_generated_tokens_on_top():
    for options in ({"group": "mean"}, {"group": "query"}):
        tokens = account("snapkv", 64, window=16, **options)
        expect(tokens.attended, lambda t: 64 + t - PROMPT)
        if options["group"] == "mean":
            expect(tokens.resident, lambda t: 64 + t - PROMPT)
        else:  # the union of what three query heads keep
            assert tokens.resident == pytest.approx(tokens.union)
            assert 64 < tokens.resident[0] - 1 <= 3 * 64
    expect(account("snapkv", 64, query_heads=1, window=16).resident, lambda t: 64 + t - PROMPT)


def test_infinigen_fetches_what_it_attends():
    tokens = account("infinigen", 64, ratio=0.25, alpha=1e9)
    expect(tokens.attended, lambda t: (2 * t + 2 * 64) / 4)
    expect(tokens.moved, lambda t: (2 * t + 2 * 64) / 4 - 1)
    expect(tokens.metadata, lambda t: 0.5 * 0.25 / 2)  # r d of 2 d numbers, in half of the layers


def test_page_controls():
    for name in ("random", "streaming-pages"):
        expect(account(name, 64).attended, lambda t: 64 - free(t, 16))
    for name in ("oracle", "random"):
        expect(account(name, 64).resident, lambda t: t)
    expect(account("streaming-pages", 64).resident, lambda t: 64 - free(t, 16))
    oracle = account("oracle", 64).attended  # may leave the partial last page out
    assert all(64 - free(t, 16) <= attended <= 64 for t, attended in zip(LENGTHS, oracle))
