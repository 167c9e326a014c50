"""Rows of different length that come and go: the seed of continuous batching."""

from __future__ import annotations

import pytest
import torch
from helpers import cache_argument, flexicache, forward, random_ids, tiny_llama

from flexicache_hf import FlexiCacheConfig

PAIRS = [(0, 1), (1, 0)]
SIZES = {
    "sparse": FlexiCacheConfig(token_budget=32, page_size=4, rerank_interval=4),
    "paper": FlexiCacheConfig.paper(token_budget=32, page_size=4, rerank_interval=4),
    "covered": FlexiCacheConfig(token_budget=1024),
}


@torch.no_grad()
def step(model, cache, tokens):
    """One token per row, no mask: `tokens` `[B]` to logits `[B, V]`."""
    kwargs = {cache_argument(model): cache, "position_ids": torch.tensor(cache.lengths)[:, None]}
    return model(tokens[:, None], **kwargs).logits[:, -1]


def alone(model, config, prompt, count):
    """Greedy tokens of one request, and the logits that chose them."""
    cache = flexicache(model, *PAIRS, config=config)
    logits = [forward(model, cache, prompt)[0]]
    while len(logits) < count:
        logits.append(step(model, cache, logits[-1].argmax(-1)[None])[0])
    return logits


@pytest.mark.parametrize("name", SIZES)
def test_rows_that_join_and_leave_equal_their_solo_run(name):
    """Five requests over three places, each admitted when a place is free."""
    model, config = tiny_llama(dtype=torch.float64), SIZES[name]
    requests = [
        (random_ids(1, n, seed=n), count)
        for n, count in ((90, 20), (7, 33), (61, 9), (40, 25), (118, 14))
    ]
    waiting, active, found = list(range(5)), [], {i: [] for i in range(5)}
    cache = None
    while waiting or active:
        while waiting and len(active) < 3:
            request = waiting.pop(0)
            new = flexicache(model, *PAIRS, config=config)
            found[request].append(forward(model, new, requests[request][0])[0])
            if cache is None:
                cache = new
            else:
                cache.join(new)
            active.append(request)
        tokens = torch.stack([found[request][-1].argmax(-1) for request in active])
        for request, logits in zip(active, step(model, cache, tokens), strict=True):
            found[request].append(logits)
        staying = [i for i, r in enumerate(active) if len(found[r]) < requests[r][1]]
        if len(staying) < len(active):
            active = [active[i] for i in staying]
            if active:
                cache.batch_select_indices(torch.tensor(staying))
            else:
                cache = None
    for request, (prompt, count) in enumerate(requests):
        expected = torch.stack(alone(model, config, prompt, count))
        torch.testing.assert_close(torch.stack(found[request]), expected, rtol=0, atol=1e-9)


def test_storage_does_not_pad_rows_to_the_longest():
    model = tiny_llama()
    long, short = (flexicache(model, *PAIRS, token_budget=64) for _ in range(2))
    forward(model, long, random_ids(1, 800))
    forward(model, short, random_ids(1, 20))
    before = long.memory_usage()
    long.join(short)
    after = long.memory_usage()
    page = 2 * 2 * 16 * 16 * 4  # two unstable heads, keys and values
    assert after.resident_pages - before.resident_pages <= 3 * page
    assert after.host - before.host <= 16 * page
    assert long.lengths == (800, 20)


def test_a_turn_of_several_tokens_hides_each_rows_padding():
    model, config = tiny_llama(dtype=torch.float64), SIZES["sparse"]
    prompts, turn = (random_ids(1, 70), random_ids(1, 23, seed=2)), random_ids(2, 6, seed=3)
    caches = [flexicache(model, *PAIRS, config=config) for _ in prompts]
    for cache, prompt in zip(caches, prompts, strict=True):
        forward(model, cache, prompt)
    caches[0].join(caches[1])
    at = torch.tensor(caches[0].lengths)[:, None] + torch.arange(6)
    with torch.no_grad():
        kwargs = {cache_argument(model): caches[0], "position_ids": at}
        found = model(turn, **kwargs).logits[:, -1]
    for row, prompt in enumerate(prompts):
        cache = flexicache(model, *PAIRS, config=config)
        forward(model, cache, prompt)
        expected = forward(model, cache, turn[row : row + 1])
        torch.testing.assert_close(found[row], expected[0], rtol=0, atol=1e-9)


def test_caches_that_do_not_fit_are_refused():
    model = tiny_llama()
    first, second = flexicache(model, *PAIRS, token_budget=64), flexicache(model, token_budget=64)
    for cache in (first, second):
        forward(model, cache, random_ids(1, 20))
    with pytest.raises(ValueError, match="unstable heads"):
        first.join(second)
    assert first.lengths == (20,)
