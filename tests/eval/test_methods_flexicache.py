"""FlexiCache's semantics in mask form, and the real cache against it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import profile_of, random_ids
from method_helpers import assert_same, build, make, model_of, run, spied

from eval.methods.unstable import choose_unstable
from flexicache_hf import HeadProfile


def pages_of(mask: torch.Tensor, page: int) -> list[list[int]]:
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % page))
    return [row.nonzero().flatten().tolist() for row in padded.unflatten(-1, (-1, page)).any(-1)]


@pytest.fixture
def model():
    return model_of()


def paper(budget, **options):
    return build("flexicache-mask", budget, **({"preset": "paper"} | options))


def test_stable_sets_change_after_the_ranking_step_only(model):
    """Conformance 4: every head ranks at s = 1, stable heads again at 16, served from 17."""
    ids = random_ids(1, 160)
    spy = spied(model, paper(32, page_size=4, unstable="none"), ids, 100)
    for layer in range(4):
        sets = [pages_of(mask, 4) for mask in spy.masks[layer]]  # [s - 1][head]
        ranked_at = {1: 1, 17: 16, 33: 32, 49: 48}
        for s in range(1, 61):
            length = 100 + s
            since = max(first for first in ranked_at if first <= s)
            opened = list(range(-(-(100 + ranked_at[since]) // 4), -(-length // 4)))
            for head in range(2):
                first = [p for p in sets[since - 1][head] if p not in opened]
                assert sets[s - 1][head] == sorted({*first, *opened})
        assert sets[15] != sets[16] and sets[31] != sets[32]


def test_a_page_opened_after_the_ranking_is_attended_in_addition(model):
    """Conformance 4: T_prompt = 1000, P = 16: the tail appears at T = 1009."""
    spy = spied(model, paper(64, unstable="none"), random_ids(1, 1018), 1000)
    for step, mask in enumerate(spy.masks[1]):
        length = 1001 + step
        pages = [len(head) for head in pages_of(mask, 16)]
        tail = 1 if 1009 <= length <= 1016 else 0
        # ranked again at T = 1016, when the page was there already
        assert pages == [4 + tail] * 2, length


@pytest.mark.parametrize("rerank_interval", [0, 10_000])
def test_no_rerank_keeps_the_first_set(model, rerank_interval):
    options = {"page_size": 4, "unstable": "none", "rerank_interval": rerank_interval}
    spy = spied(model, paper(32, **options), random_ids(1, 150), 100)
    first = pages_of(spy.masks[2][0], 4)
    last = pages_of(spy.masks[2][-1], 4)
    assert [[p for p in head if p < 26] for head in last] == first


def test_unstable_heads_rank_every_step_and_stay_in_the_budget(model):
    spy = spied(model, paper(32, page_size=4, unstable="all"), random_ids(1, 150), 100)
    sets = [pages_of(mask, 4) for mask in spy.masks[2]]
    assert all(len(head) == 8 for pair in sets for head in pair)
    assert len({tuple(map(tuple, pair)) for pair in sets}) > len(sets) // 2


def test_one_page_short_of_all_keeps_the_last_page(model):
    ids = random_ids(1, 100)  # 25 pages of 4
    spy = spied(model, paper(96, page_size=4, unstable="all"), ids, 99)
    for layer in range(4):
        for head in pages_of(spy.masks[layer][0], 4):
            assert len(head) == 24
            assert head[-1] == 24


def test_first_rank_at_the_prompt_serves_one_step(model):
    options = {"page_size": 4, "unstable": "none"}
    ids = random_ids(1, 120)
    early = spied(model, paper(32, first_rank="prefill", **options), ids, 100)
    late = spied(model, paper(32, **options), ids, 100)
    # In layer 0 both see the same queries: what s = 1 chooses serves s = 1 (paper), or from s = 2.
    assert pages_of(early.masks[0][1], 4) == pages_of(late.masks[0][1], 4)
    assert pages_of(early.masks[0][0], 4) != pages_of(late.masks[0][0], 4)


def test_staggering_shifts_the_ranking_by_the_layer(model):
    options = {"page_size": 4, "unstable": "none", "stagger": True, "rerank_interval": 8}
    spy = spied(model, paper(32, **options), random_ids(1, 130), 100)
    for layer in range(4):
        sets = [pages_of(mask, 4) for mask in spy.masks[layer]]
        changes = {
            s + 1
            for s in range(1, 30)
            if any(set(a) - set(b) for a, b in zip(sets[s - 1], sets[s]))  # a page was left
        }
        assert changes <= {s + 1 for s in range(1, 31) if (s + layer) % 8 == 0}
        assert changes


def test_forced_pages_are_inside_the_budget(model):
    options = {"page_size": 4, "unstable": "all", "sink_pages": 2, "recent_pages": 3}
    spy = spied(model, paper(32, **options), random_ids(1, 130), 100)
    for step, mask in enumerate(spy.masks[2]):
        last = (100 + step) // 4
        for head in pages_of(mask, 4):
            assert len(head) == 8
            assert {0, 1, last, last - 1, last - 2} <= set(head)


REAL = [
    {"preset": "paper"},
    {"preset": "default"},
    {"preset": "paper", "unstable": "none"},
    {"preset": "paper", "unstable": "all"},
    {"preset": "paper", "rerank_interval": 0},
    {"preset": "default", "rerank_interval": 5},
    {"preset": "default", "digest": "cuboid_mean", "digests_per_page": 2},
    {"preset": "default", "group_reduction": "softmax_sum"},
    {"preset": "paper", "first_rank": "prefill", "stagger": True, "sink_pages": 2},
]


@pytest.mark.parametrize("budget", [8, 48])
@pytest.mark.parametrize("options", REAL, ids=str)
def test_the_real_cache_equals_the_mask_form(model, options, budget):
    """Conformance 14: tiers, slots and transfers change no logit, and count the same tokens."""
    ids = random_ids(1, 190)
    options = {"page_size": 8, "unstable": "random"} | options
    real, counted = run(model, make("flexicache", budget, model, **options), ids, 141)
    masked, tokens = run(model, make("flexicache-mask", budget, model, **options), ids, 141)
    assert_same(real, masked)
    for name in ("attended", "resident", "metadata", "length"):
        assert getattr(counted, name) == pytest.approx(getattr(tokens, name)), name


@pytest.mark.parametrize("options", REAL, ids=str)
def test_the_real_cache_moves_what_the_mask_form_promotes(model, options):
    ids = random_ids(1, 190)
    options = {"page_size": 8, "unstable": "random"} | options
    _, counted = run(model, make("flexicache", 48, model, **options), ids, 141)
    _, tokens = run(model, make("flexicache-mask", 48, model, **options), ids, 141)
    assert counted.moved[1:] == pytest.approx(tokens.moved[1:])


def test_unstable_heads_are_chosen_as_asked(model, tmp_path):
    every = [(layer, head) for layer in range(4) for head in range(2)]
    path = str(tmp_path)
    profile_of(model, (0, 1), (3, 0)).save_pretrained(path)

    def chosen(choice, **kwargs):
        return list(choose_unstable(model, choice, **({"profile": None} | kwargs)).unstable_heads)

    assert chosen("none") == []
    assert chosen("all") == every
    assert chosen("profile", profile=path) == [(0, 1), (3, 0)]
    assert len(chosen("random")) == 2
    assert len(chosen("random", profile=path)) == 2
    assert chosen("random", seed=1) != chosen("random", seed=2)
    assert len(chosen("rule")) == 2
    with pytest.raises(ValueError, match="there is no head profile of this model"):
        chosen("profile")
    with pytest.raises(ValueError, match="stability is missing"):
        chosen("most-stable", profile=path)
    stability = ((0.9, 0.1), (0.8, 0.7), (0.6, 0.95), (0.2, 0.5))
    listed = HeadProfile.from_unstable_heads(model.config, [(0, 1), (3, 0)])
    dataclasses.replace(listed, stability=stability).save_pretrained(path)
    assert chosen("most-stable", profile=path) == [(0, 0), (2, 1)]
    other = model_of(layers=2)
    with pytest.raises(ValueError, match="made for another model"):
        choose_unstable(other, "profile", path)
