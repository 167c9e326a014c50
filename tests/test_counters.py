"""The counters prove who ranked when, what was promoted, and what went to the host."""

from __future__ import annotations

import pytest
import torch
from helpers import decode, flexicache, forward, random_ids, tiny_llama
from reference import Reference, ReferenceCache, reference_attention

from flexicache_hf import FlexiCacheConfig

PAIRS = [(0, 1), (2, 0), (2, 1)]  # layer 1 all stable, layer 2 all unstable
STABLE = {0: 1, 1: 2, 2: 0}  # heads per layer


def steps_of(cache):
    return [step for step in cache.stats().steps if step.decode]


@pytest.mark.parametrize("stagger", [False, True])
def test_stable_heads_rank_at_the_first_step_and_every_interval(stagger):
    model = tiny_llama(layers=3)
    config = FlexiCacheConfig.paper(token_budget=64).replace(stagger=stagger)
    cache = flexicache(model, *PAIRS, config=config)
    decode(model, cache, random_ids(1, 200), 50)
    for number, step in enumerate(steps_of(cache), 1):
        offsets = {layer: layer if stagger else 0 for layer in STABLE}
        due = [layer for layer in STABLE if number == 1 or (number + offsets[layer]) % 16 == 0]
        assert step.stable_ranked == sum(STABLE[layer] for layer in due), f"step {number}"
        assert step.unstable_ranked == 3, f"step {number}"


def test_no_rerank_ranks_once():
    model = tiny_llama(layers=3)
    cache = flexicache(
        model, *PAIRS, token_budget=64, config=FlexiCacheConfig(rerank_interval=None)
    )
    decode(model, cache, random_ids(1, 200), 40)
    assert [step.stable_ranked for step in steps_of(cache)] == [3] + [0] * 39


@pytest.mark.parametrize("first_rank", ["prefill", "decode"])
def test_only_the_set_difference_is_promoted(first_rank):
    """Counted against the reference: pages of the new set that were not attended before."""
    model = tiny_llama(layers=3, dtype=torch.float64)
    config = FlexiCacheConfig(
        token_budget=32, page_size=4, rerank_interval=4, first_rank=first_rank, stagger=False
    )
    state = Reference.like(config, PAIRS)
    ids, tokens = random_ids(1, 120), random_ids(1, 30, seed=3)
    cache = flexicache(model, *PAIRS, config=config)
    forward(model, cache, ids)
    with reference_attention(model):
        forward(model, dense := ReferenceCache(model, state), ids)
    promoted = 0
    for step in range(1, 31):
        total = -(-(120 + step) // 4)
        before = {
            at: set(pages) | set(range(state.ranked_at[at], total))
            for at, pages in state.chosen.items()
        }
        with reference_attention(model):
            forward(model, dense, tokens[:, step - 1 : step])
        forward(model, cache, tokens[:, step - 1 : step])
        expected = sum(
            len(set(state.chosen[at]) - pages) for at, pages in before.items() if state.log
        )
        if before:
            assert cache.stats().current.promoted == expected, f"step {step}"
        promoted += cache.stats().current.promoted
    assert promoted > 0
    page_bytes = 2 * 4 * 16 * 8
    assert cache.stats().total.host_to_device == cache.stats().total.promoted * page_bytes


def test_a_new_set_serves_from_the_next_step():
    """The step that ranks attends to the old set: the page tables differ only after it."""
    model = tiny_llama(layers=1, dtype=torch.float64)
    base = FlexiCacheConfig.paper(token_budget=16, page_size=4, rerank_interval=8)
    ids, tokens = random_ids(1, 150), random_ids(1, 20, seed=9)
    with_rank = decode(model, flexicache(model, config=base), ids, 20, None, tokens)
    never = base.replace(rerank_interval=None)
    without = decode(model, flexicache(model, config=never), ids, 20, None, tokens)
    same = [torch.equal(a, b) for a, b in zip(with_rank, without, strict=True)]
    assert same[: 1 + 8] == [True] * 9
    assert not same[9]


def test_each_full_page_goes_to_the_host_once():
    model = tiny_llama(layers=3)
    cache = flexicache(model, *PAIRS, token_budget=32)
    page_bytes = 3 * 2 * 16 * 16 * 4  # stable heads, K and V, tokens, head_dim, fp32
    forward(model, cache, random_ids(2, 75))
    assert cache.stats().total.device_to_host == 2 * (75 // 16) * page_bytes
    for length in range(76, 140):
        forward(model, cache, random_ids(2, 1, seed=length))
        expected = 2 * page_bytes if length % 16 == 0 else 0
        assert cache.stats().current.device_to_host == expected
    forward(model, cache, random_ids(2, 40))  # a later turn: the open page and the new ones
    assert cache.stats().total.device_to_host == 2 * (179 // 16) * page_bytes


def test_attended_pages_are_the_budget_and_the_tail():
    model = tiny_llama(layers=1)
    config = FlexiCacheConfig.paper(token_budget=64)
    cache = flexicache(model, config=config)
    decode(model, cache, random_ids(1, 1000), 40)
    counts = [step.attended // 2 for step in steps_of(cache)]
    # ranked at s=1 with 1001 tokens (63 pages); the page opened at token 1009 comes on top,
    # until the ranking of s=16 (served from s=17), and so on
    assert counts[:8] == [4] * 8
    assert counts[8:16] == [5] * 8
    assert counts[16:24] == [4] * 8
