"""Methods that drop tokens for good."""

from __future__ import annotations

import pytest
import torch
from helpers import random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from method_helpers import a_prompt, assert_same, build, feed, model_of, run, small, spied

from eval.methods.h2o import H2O, H2OSelector
from eval.methods.scissorhands import Importance
from eval.methods.snapkv import SnapKV, SnapKVSelector, pooled
from eval.methods.streamingllm import sink_and_recent
from eval.methods.tova import keep

EVICTING = ["h2o", "tova", "snapkv", "streamingllm", "scissorhands"]


@settings(max_examples=25)
@given(
    name=st.sampled_from(EVICTING),
    budget=st.integers(9, 60),
    prompt=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_what_is_dropped_never_returns(name, budget, prompt, seed):
    """Conformance 7, for every layer and head."""
    model, ids = model_of(layers=2), random_ids(1, prompt + 25, seed=seed)
    spy = spied(model, small(name, budget, model), ids, prompt)
    for layer in range(2):
        for before, after in zip(spy.masks[layer], spy.masks[layer][1:]):
            gained = after[:, :-1] & ~before
            if name == "streamingllm":  # the sinks may fill while the prompt is short
                gained[:, : min(4, before.shape[-1])] = False
            assert not gained.any()
            assert after[:, -1].all()


@settings(max_examples=25)
@given(name=st.sampled_from(["h2o", "tova"]), budget=st.integers(4, 40), seed=st.integers(0, 99))
def test_the_state_never_exceeds_the_budget(name, budget, seed):
    model, ids = model_of(layers=2), random_ids(1, 60, seed=seed)
    spy = spied(model, build(name, budget), ids, 30)
    for layer in range(2):
        for step, mask in enumerate(spy.masks[layer]):
            kept = min(budget, 30 + step)
            assert (mask.sum(-1) == kept + 1).all()


def test_tova_golden_trace():
    """Conformance 8: capacity 5, weights of the authors' figure: 1 goes, then 4, 3, 6."""
    alive = torch.ones(6, dtype=torch.bool)
    trace = [
        {0: 0.2, 1: 0.05, 2: 0.1, 3: 0.1, 4: 0.2, 5: 0.35},
        {0: 0.25, 2: 0.2, 3: 0.15, 4: 0.05, 5: 0.15, 6: 0.2},
        {0: 0.2, 2: 0.2, 3: 0.05, 5: 0.15, 6: 0.1, 7: 0.3},
        {0: 0.3, 2: 0.1, 5: 0.2, 6: 0.05, 7: 0.15, 8: 0.2},
    ]
    dropped = []
    for length, weights in enumerate(trace, 6):
        alive = torch.nn.functional.pad(alive, (0, length - len(alive)), value=True)
        row = torch.tensor([weights.get(at, 0.0) for at in range(length)])
        # two heads that disagree, but average to the row
        after = keep(torch.stack([row * 1.5, row * 0.5]), alive, 5)
        (gone,) = (alive & ~after).nonzero().flatten().tolist()
        dropped.append(gone)
        alive = after
    assert dropped == [1, 4, 3, 6]


def test_tova_shares_one_set_in_a_layer_and_protects_nothing():
    model = model_of()
    spy = spied(model, build("tova", 12), random_ids(1, 120), 60)
    newest_dropped = 0
    for layer in range(4):
        for before, after in zip(spy.masks[layer], spy.masks[layer][1:]):
            assert torch.equal(after[0], after[1])
            newest_dropped += not after[0, before.shape[-1] - 1]
    assert newest_dropped > 0


def test_h2o_accumulates_every_prompt_query():
    """Conformance 8: right after the prompt a head's sums add up to its number of queries."""
    torch.manual_seed(0)
    prompt = a_prompt(torch.randn(6, 300, 8), torch.randn(2, 300, 8))
    state = H2OSelector(H2O(budget=40)).begin(prompt)
    torch.testing.assert_close(state.received.sum(-1), torch.full((2,), 3 * 300.0))
    full = prompt.weights(0)  # in one piece rather than in chunks
    assert torch.allclose(state.received, full.sum(1).view(2, 3, -1).sum(1), atol=1e-4)
    assert (state.mask.sum(-1) == 40).all()
    assert state.mask[:, -20:].all()
    heavy = state.received[:, :280].topk(20, -1).indices
    assert state.mask.gather(1, heavy).all()


def test_h2o_survivors_keep_their_sums():
    model, ids = model_of(), random_ids(1, 100)
    spy = spied(model, build("h2o", 20, heavy=6), ids, 60)
    for layer in range(4):
        received = spy.states[layer].received
        # g queries of mass one a step: 60 in the prompt and 40 steps
        torch.testing.assert_close(received.sum(-1), torch.full((2,), 300.0, dtype=received.dtype))
        for mask in spy.masks[layer]:
            assert mask[:, -15:].all()  # 14 recent ones and the current


@pytest.mark.parametrize("length", [39, 40, 41, 90])
@pytest.mark.parametrize("group", ["query", "mean"])
def test_snapkv_keeps_capacity_and_window(length, group):
    """Conformance 9: prompts of C - 1, C and C + 1 tokens."""
    model = model_of()
    method = build("snapkv", 40, window=8, group=group)
    spy = spied(model, method, random_ids(1, length + 10), length)
    for layer in range(4):
        alive = spy.states[layer]
        assert len(alive) == (6 if group == "query" and length > 40 else 2)
        assert (alive.sum(-1) == min(length, 40)).all()
        assert alive[:, -8:].all()
        for mask in spy.masks[layer]:
            assert torch.equal(mask[:, :length], alive)  # nothing is evaluated again
            assert mask[:, length:].all()  # generated tokens stay


def test_snapkv_pooling():
    scores = torch.tensor([[0.0, 3, 0, 0, 1, 0, 0]])
    assert torch.equal(pooled(scores, 1, "max"), scores)
    assert torch.equal(pooled(scores, 1, "avg"), scores)
    assert pooled(scores, 3, "max").tolist() == [[3, 3, 3, 1, 1, 1, 0]]
    assert_same(pooled(scores, 3, "avg") * 3, torch.tensor([[3.0, 3, 3, 1, 1, 1, 0]]))


def test_snapkv_scores_are_the_windows_attention():
    torch.manual_seed(0)
    prompt = a_prompt(torch.randn(4, 50, 8), torch.randn(2, 50, 8))
    alive = SnapKVSelector(SnapKV(budget=20, window=6, kernel=1)).begin(prompt)
    for head in range(4):
        logits = prompt.query[head, 44:] @ prompt.keys[head // 2].T
        logits += torch.full((6, 50), -torch.inf).triu(45)
        best = logits.softmax(-1).sum(0)[:44].topk(14).indices
        assert alive[head].nonzero().flatten().tolist() == sorted([*best.tolist(), *range(44, 50)])


@given(length=st.integers(1, 60), sink=st.integers(0, 10), recent=st.integers(1, 30))
def test_sink_and_recent(length, sink, recent):
    kept = sink_and_recent(length, sink, recent)
    assert int(kept.sum()) == min(length, sink + recent)
    assert kept[:sink].all()
    assert kept[-1]


def test_streaming_original_positions_are_a_mask():
    model, ids = model_of(), random_ids(1, 80)
    spy = spied(model, build("streamingllm", 20, positions="original"), ids, 60)
    for step, mask in enumerate(spy.masks[1]):
        length = 61 + step
        kept = mask[0].nonzero().flatten().tolist()
        assert kept == [0, 1, 2, 3, *range(length - 16, length)]


def test_streaming_slot_positions_are_those_of_a_short_text():
    """A one-layer model knows the past only through its keys: with slots for positions the output
    is that of the kept tokens as a text of their own."""
    model, ids = model_of(layers=1), random_ids(1, 80)
    with build("streamingllm", 20).session(model) as session:
        cache = session.new_cache()
        feed(model, cache, ids[:, :79])
        found = feed(model, cache, ids[:, 79:])[:, -1]
    kept = torch.cat([ids[:, :4], ids[:, 64:]], 1)
    with torch.no_grad():
        expected = model(kept).logits[:, -1]
    # transformers computes angles in float32, and ours are the sum of two
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_streaming_position_rules_differ_only_once_something_is_evicted():
    model, ids = model_of(), random_ids(1, 60)
    slot, _ = run(model, build("streamingllm", 40), ids, 30)
    original, _ = run(model, build("streamingllm", 40, positions="original"), ids, 30)
    assert_same(slot[:, :11], original[:, :11])  # T = 30 to 40
    assert (slot[:, 11:] - original[:, 11:]).abs().amax() > 1e-3


def test_scissorhands_drops_what_is_most_often_below_average():
    state = Importance(torch.ones(1, 6, dtype=torch.bool))
    state.low = [
        torch.tensor([[True, False, True, False]]),
        torch.tensor([[True, False, True, True, True]]),
        torch.tensor([[True, False, False, True, True, True]]),
    ]  # counts 3 0 2 2 2 1
    state.cut(4, recent=1)
    assert state.mask.int().tolist() == [[0, 1, 1, 1, 0, 1]]  # ties: the earlier token stays
    state.cut(2, recent=1)
    assert state.mask.int().tolist() == [[0, 1, 0, 0, 0, 1]]


def test_scissorhands_swings_between_half_and_the_full_budget():
    model = model_of()
    spy = spied(model, build("scissorhands", 20, history=15, recent=5), random_ids(1, 120), 60)
    for layer in range(4):
        for step, mask in enumerate(spy.masks[layer]):
            expected = 21 if step == 0 else 11 + (step - 1) % 11
            assert (mask.sum(-1) == expected).all()
            assert mask[:, -6:].all()
        assert len(spy.states[layer].low) == 15
