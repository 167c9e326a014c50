"""InfLLM: blocks, representatives, constant distances, streamed prompts."""

from __future__ import annotations

import pytest
import torch
from helpers import random_ids
from method_helpers import a_prompt, a_step, assert_same, build, model_of, run, spied

from eval.methods.infllm import InfLLM, InfLLMSelector
from eval.methods.rope import Rope

SMALL = {"init": 4, "local": 8, "block": 4, "execution": 6, "representatives": 2}


def selector(budget=20, **options):
    return InfLLMSelector(InfLLM(budget, **(SMALL | options)), Rope(model_of()))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def by_hand(prompt, method, rope):
    """The streamed prompt one query at a time, from the description: `[T, H_q, D]`, and the
    attention that each token received inside the window of its queries, `[H_q, T]`."""
    init, local, block = method.layout
    query, keys, length = prompt.query, prompt.keys.repeat_interleave(2, 0), prompt.length
    bare = rope.shift(keys, -torch.arange(length))
    free = rope.shift(query, -torch.arange(length))
    received, outputs = torch.zeros(len(query), length).double(), torch.zeros_like(query)
    block_keys = []
    for first in range(0, length, method.execution):
        rows = range(first, min(first + method.execution, length))
        while init + (len(block_keys) + 1) * block <= first - local + 1:
            start = init + len(block_keys) * block
            best = received[:, start : start + block].topk(method.representatives, -1).indices
            block_keys.append(
                torch.stack([bare[h, start + best[h]].mean(0) for h in range(len(query))])
            )
        seen = rope.shift(free[:, list(rows)], torch.full((len(rows),), local)).mean(1)
        scores = torch.tensor([float((seen * key).sum()) for key in block_keys])
        chosen = scores.topk(min(method.blocks, len(scores))).indices.tolist()
        for t in rows:
            for h in range(len(query)):
                logits, places = [], []
                for m in range(t + 1):
                    inside = (m - init) // block
                    if m >= init and inside < len(block_keys) and inside not in chosen:
                        continue
                    distance = min(t - m, local)
                    turned = rope.shift(free[h, t][None, None], distance)[0, 0]
                    logits.append(turned @ bare[h, m])
                    places.append(m)
                weights = torch.softmax(torch.stack(logits), 0)
                outputs[h, t] = weights @ keys[h, places]
                for m, weight in zip(places, weights):
                    received[h, m] += weight * (t - m < local)
    return outputs.transpose(0, 1), received


def test_a_streamed_prompt_is_the_one_by_hand():
    keys, query = draw(2, 41, 16), draw(4, 41, 16, seed=1)
    sparse, prompt = selector(), a_prompt(query, keys)
    output = torch.zeros(41, 4, 16).double()
    sparse.adjust_prompt(prompt, output)
    expected, received = by_hand(prompt, sparse.method, sparse.rope)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)  # float32 angles
    state = sparse.begin(prompt)
    torch.testing.assert_close(state.received, received, atol=1e-5, rtol=1e-5)
    # The last execution block begins at 36: 29 tokens have left its window, 4 of them initial.
    assert state.blocks == 6
    assert len(state.chosen) == 2


def test_a_dense_prompt_counts_what_windows_received():
    keys, query = draw(2, 30, 16), draw(4, 30, 16, seed=1)
    state = selector(sparse_prefill=False).begin(a_prompt(query, keys))
    logits = query @ keys.repeat_interleave(2, 0).mT
    distance = torch.arange(30)[:, None] - torch.arange(30)
    weights = logits.masked_fill(distance < 0, -torch.inf).softmax(-1)
    assert_same(state.received, (weights * (distance < 8)).sum(1))


def test_the_past_is_seen_from_a_constant_distance():
    """A decode step's logits against keys turned by hand."""
    keys, query = draw(2, 31, 16), draw(4, 30, 16, seed=1)
    sparse = selector()
    state = sparse.begin(a_prompt(query, keys[:, :30]))
    step = a_step(draw(4, 16, seed=2), keys)
    mask = sparse.select(step, state)
    assert torch.equal(mask[0], mask[1])  # one list for all heads of the layer
    bare = sparse.rope.shift(keys, -torch.arange(31))
    for m in range(31):
        at = m if 30 - m < 8 else 30 - 8
        turned = sparse.rope.shift(bare[:, m : m + 1], at)[:, 0]
        if mask[0, m]:
            torch.testing.assert_close(step.keys[:, m], turned, atol=1e-5, rtol=1e-5)


def test_representatives_received_most_and_all_heads_look_up_together():
    sparse = selector(budget=16, sparse_prefill=False, representatives=1, execution=1)
    keys = torch.zeros(1, 24, 16).double()
    keys[0, 5, 0], keys[0, 9, 1] = 4, 4  # blocks 0 (tokens 4-7) and 1 (8-11)
    query = torch.zeros(2, 24, 16).double()
    state = sparse.begin(a_prompt(query, keys))
    state.received[:] = 0
    state.received[:, [5, 9, 13]] = 1
    state.bare.view[:] = keys  # without rotation, to choose by hand
    both = torch.zeros(2, 16).double()
    both[0, 0], both[1, 1] = 1.0, 3.0  # the first head wants block 0, the second block 1 more
    both = sparse.rope.shift(both[:, None], 24 - 8)[:, 0]
    mask = sparse.select(a_step(both, torch.cat([keys, keys[:, :1]], 1)), state)
    assert state.chosen.tolist() == [1]
    assert mask[0].nonzero()[:, 0].tolist() == [*range(4), *range(8, 12), *range(16, 25)]
    assert torch.equal(state.block_keys.view[0, 0], keys[0, 5])


def test_counted_tokens():
    """init + local + blocks, and the tokens that have left the window and fill no block yet."""
    model = model_of()
    _, tokens = run(model, build("infllm", 32, **SMALL), random_ids(1, 130), 100)
    for length, attended in zip(range(101, 131), tokens.attended):
        assert attended == 32 + (length - 8 - 4) % 4
    assert tokens.resident == tokens.attended == tokens.union
    assert all(moved * 4 % 4 == 0 for moved in tokens.moved)  # blocks of 4, mean of 4 layers
    for length, metadata in zip(range(101, 131), tokens.metadata):
        numbers = 3 * ((length - 12) // 4 * 16 + 8)
        assert metadata == pytest.approx(numbers / (2 * 16 * length))


def test_blocks_once_fetched_do_not_move_again():
    spy = spied(model_of(), build("infllm", 20, **SMALL), random_ids(1, 70), 50)
    _, tokens = run(model_of(), build("infllm", 20, **SMALL), random_ids(1, 70), 50)
    for at in range(1, 20):
        fetched = []
        for layer, masks in spy.masks.items():
            before, now = masks[at - 1][0], masks[at][0]
            blocks = (51 + at - 12) // 4
            full = [slice(4 + 4 * b, 8 + 4 * b) for b in range(blocks)]
            chosen = [b for b, span in enumerate(full) if now[span].all()]
            # A block that formed just now was attended as an unfilled one, but never fetched.
            old = [b for b in chosen if b < (50 + at - 12) // 4 and before[full[b]].all()]
            fetched.append(4 * (len(chosen) - len(old)))
            assert len(chosen) == 2, layer
        assert tokens.moved[at] == sum(fetched) / len(fetched)


def test_the_papers_layout_and_the_scaled_one():
    paper = build("infllm", 6272)
    assert paper.layout == (128, 4096, 128)
    assert paper.blocks == 16
    assert build("infllm", 6272 + 48 * 128).blocks == 64  # the authors' larger configuration
    for budget, layout, blocks in (
        (256, (16, 160, 16), 5),
        (512, (16, 336, 16), 10),
        (1024, (16, 672, 16), 21),
    ):
        scaled = build("infllm", budget)
        assert (scaled.layout, scaled.blocks) == (layout, blocks)
        assert "scaled" in scaled.label
    assert paper.label == "InfLLM"
    assert not paper.replays
    assert build("infllm", 6272, sparse_prefill=False).replays


@pytest.mark.parametrize("length", [1, 4, 11, 12, 13, 16, 17])
def test_short_prompts(length):
    """Up to init + local + one block nothing is left out."""
    spy = spied(model_of(), build("infllm", 16, **SMALL), random_ids(1, length + 2), length)
    assert all(masks[0].all() for masks in spy.masks.values())
