"""ShadowKV: low-rank keys, landmarks, outliers."""

from __future__ import annotations

import pytest
import torch
from helpers import random_ids
from method_helpers import a_prompt, a_step, assert_same, build, dense_logits, model_of, run, spied

from eval.methods.rope import Rope
from eval.methods.shadowkv import ShadowKV, ShadowKVSelector


def begin(keys, **options):
    selector = ShadowKVSelector(
        ShadowKV(**({"budget": 16, "chunk": 4} | options)), Rope(model_of())
    )
    return selector, selector.begin(a_prompt(keys.repeat_interleave(2, 0), keys))


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def test_full_rank_keys_are_exact():
    """Conformance 11. Up to the float32 angles of transformers' RoPE."""
    keys = draw(2, 60, 16)
    _, state = begin(keys, rank=32)
    assert state.keys.shape == (2, 44, 16)
    torch.testing.assert_close(state.keys, keys[:, :44], atol=1e-5, rtol=1e-5)
    _, lossy = begin(keys, rank=8)
    assert (lossy.keys - keys[:, :44]).abs().max() > 0.1


def test_the_low_rank_keys_are_the_truncated_svd_before_rope():
    keys, rope = draw(2, 60, 16), Rope(model_of())
    at = torch.arange(60)
    flat = rope.shift(keys, -at).transpose(0, 1).flatten(1)
    u, s, v = torch.linalg.svd(flat, full_matrices=False)
    best = (u[:, :10] * s[:10] @ v[:10]).unflatten(1, (2, 16)).transpose(0, 1)
    _, state = begin(keys, rank=10)
    torch.testing.assert_close(state.keys, rope.shift(best, at)[:, :44], atol=1e-5, rtol=1e-5)


def test_outliers_are_the_chunks_least_like_their_mean():
    keys = torch.ones(2, 60, 16).double() + 0.01 * draw(2, 60, 16)
    keys[0, 8] *= -1
    keys[1, 21] *= -1
    _, state = begin(keys, outliers=64)  # 64 of 1024 tokens: one chunk at a budget of 16
    assert state.outlier[0].nonzero().flatten().tolist() == [2]
    assert state.outlier[1].nonzero().flatten().tolist() == [5]


def test_all_outliers_is_dense():
    model, ids = model_of(), random_ids(1, 80)
    method = build("shadowkv", 16, chunk=4, rank=4, outliers=1024 * 20)
    assert_same(run(model, method, ids, 60)[0], dense_logits(model, ids, 60))


def test_chunks_are_chosen_by_the_best_query_of_the_group():
    keys = torch.zeros(1, 24, 16).double()
    keys[0, 0:4, 0], keys[0, 4:8, 1], keys[0, 8:12, :2] = 3, 2.9, 2.4
    selector, state = begin(keys, budget=8, outliers=0, local_chunks=1)
    queries = torch.eye(2, 16).double() * 3
    mask = selector.select(a_step(queries, torch.cat([keys, keys[:, :1]], 1)), state)
    # softmax per query, then max: chunks 0 and 1 rather than 2, which is second for both
    assert mask[0].nonzero().flatten().tolist() == [*range(8), *range(20, 25)]


def test_what_comes_on_top_of_the_budget():
    model = model_of()
    method = build("shadowkv", 32, chunk=8, rank=8, outliers=64, local_chunks=2)
    ids = random_ids(1, 220)
    _, tokens = run(model, method, ids, 203)
    extra = 2 * 8 + 2 * 8 + 203 % 8  # outliers, local chunks, remainder
    for step, attended in enumerate(tokens.attended):
        assert attended == 32 + extra + step + 1
    assert tokens.resident == tokens.attended
    assert tokens.moved[0] == 0.5 * 32
    assert all(moved <= 0.5 * 32 for moved in tokens.moved)
    landmarks, covered = 203 // 8 - 2, (203 // 8 - 2) * 8
    numbers = covered * 8 / 2 + 8 * 16 + landmarks * 16
    assert tokens.metadata[0] == pytest.approx(numbers / (2 * 16 * 204))


def test_chosen_keys_are_rebuilt_and_the_rest_is_exact():
    keys = draw(2, 60, 16)
    selector, state = begin(keys, rank=4, outliers=64)
    step = a_step(draw(4, 16), torch.cat([keys, keys[:, :1]], 1))
    mask = selector.select(step, state)
    chosen = state.chosen.repeat_interleave(4, 1)
    assert torch.equal(step.keys[:, :44][chosen], state.keys[chosen])
    assert torch.equal(step.keys[:, 44:60], keys[:, 44:])
    outlier = state.outlier.repeat_interleave(4, 1)
    assert torch.equal(step.keys[:, :44][outlier], keys[:, :44][outlier])
    assert torch.equal(mask[:, :44], chosen | outlier)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 20])
def test_short_prompts_are_exact(length):
    """Up to the local chunks nothing has a landmark."""
    spy = spied(model_of(), build("shadowkv", 8, chunk=4), random_ids(1, length + 2), length)
    assert spy.masks[0][0].all()
