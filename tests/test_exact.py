"""While K pages cover every row, logits equal transformers' DynamicCache bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers import decode, flexicache, forward, left_padding, random_ids, tiny_llama
from transformers import DynamicCache

PAIRS = [(0, 0), (1, 1)]


def dense(model):
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 1000])
def test_prompt_lengths(length):
    model, ids = tiny_llama(), random_ids(1, length)
    cache = flexicache(model, *PAIRS, token_budget=2048)
    assert torch.equal(decode(model, cache, ids, 110), decode(model, dense(model), ids, 110))


@pytest.mark.parametrize("pads", [(0, 3, 16, 99), (32, 48, 0, 17), (80, 5, 64, 1)])
def test_left_padded_batch(pads):
    """Pads cover no, half and whole pages; rows end in different places of their pages."""
    model, ids, mask = tiny_llama(), random_ids(4, 100), left_padding(100, *pads)
    cache = flexicache(model, *PAIRS, token_budget=512)
    expected = decode(model, dense(model), ids, 110, mask)
    assert torch.equal(decode(model, cache, ids, 110, mask), expected)


@pytest.mark.parametrize(
    "pairs", [[], [(0, 0), (0, 1), (1, 0), (1, 1)]], ids=["stable", "unstable"]
)
def test_one_kind_of_head_only(pairs):
    model, ids = tiny_llama(), random_ids(1, 40)
    cache = flexicache(model, *pairs, token_budget=256)
    assert torch.equal(decode(model, cache, ids, 50), decode(model, dense(model), ids, 50))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model, ids = tiny_llama(dtype=dtype), random_ids(2, 40)
    cache = flexicache(model, *PAIRS, token_budget=256)
    assert torch.equal(decode(model, cache, ids, 30), decode(model, dense(model), ids, 30))


def test_crossing_from_covered_to_sparse_keeps_the_covered_part():
    """Bitwise until the row outgrows K pages, close right after: one page is left out."""
    model, ids = tiny_llama(), random_ids(1, 50)
    cache = flexicache(model, *PAIRS, token_budget=64)
    tokens = random_ids(1, 40, seed=2)
    found = decode(model, cache, ids, 40, None, tokens)
    expected = decode(model, dense(model), ids, 40, None, tokens)
    assert torch.equal(found[:15], expected[:15])  # up to 64 tokens
    assert not torch.equal(found[15:], expected[15:])


@pytest.mark.parametrize("budget", [16, 4096])
def test_later_turns_and_chunks_attend_to_the_whole_history(budget):
    """A multi-token forward is dense whatever was evicted meanwhile."""
    model = tiny_llama()
    cache, other = flexicache(model, *PAIRS, token_budget=budget), dense(model)
    for seed, length in enumerate((50, 2, 30, 16, 7)):
        ids = random_ids(2, length, seed)
        expected = forward(model, other, ids)
        torch.testing.assert_close(forward(model, cache, ids), expected, rtol=0, atol=0)


def test_padded_turns_leave_holes_that_stay_hidden():
    """The second prompt of a batch is padded too: holes in the middle of the history."""
    model = tiny_llama()
    cache, other = flexicache(model, *PAIRS, token_budget=16), dense(model)
    mask = left_padding(40, 0, 21, 35)
    for seed, pads in ((1, None), (2, (9, 0, 3)), (3, (0, 10, 11))):
        if pads is not None:
            mask = torch.cat([mask, left_padding(12, *pads)], 1)
        ids = random_ids(3, 40 if pads is None else 12, seed)
        expected = forward(model, other, ids, mask)
        torch.testing.assert_close(forward(model, cache, ids, mask), expected, rtol=0, atol=0)
    assert cache._table.lengths == tuple(mask.sum(-1).tolist())


def test_the_same_model_with_other_caches_is_unchanged():
    model, ids = tiny_llama(seed=3), random_ids(2, 30)
    mask = left_padding(30, 0, 11)
    before = decode(model, dense(model), ids, 10, mask)
    cache = flexicache(model, *PAIRS, token_budget=16)
    decode(model, cache, ids, 10, mask)
    assert torch.equal(decode(model, dense(model), ids, 10, mask), before)
    with torch.no_grad():
        assert torch.isfinite(model(ids, use_cache=False).logits).all()
