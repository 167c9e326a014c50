"""LServe and DuoAttention: heads split by gates, and the proxies that stand in for gates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import random_ids
from method_helpers import (
    a_prompt,
    a_step,
    assert_same,
    build,
    dense_logits,
    feed,
    gates_file,
    make,
    model_of,
    run,
    spied,
)

from eval.methods.duoattention import streaming_prompt
from eval.methods.heads import load_gates, retrieval_heads
from eval.methods.lserve import LServeSelector
from eval.methods.proxies import Decay, OutputError, measure
from eval.methods.rope import Rope


def split(model, sparsity=0.5):
    gates = load_gates(gates_file(4, 2), model.config)
    return retrieval_heads(gates, sparsity)


def lserve(model, budget=64, **options):
    return make(
        "lserve", budget, model, **({"page": 16, "sub_page": 4, "sink": 8, "local": 16} | options)
    )


def test_the_split_is_global_and_exact():
    gates = np.array([[1.0, 1.0, 0.9], [0.2, 1.0, 3.0]])
    assert retrieval_heads(gates, 0.5).sum() == 3
    assert retrieval_heads(gates, 1 / 3).int().tolist() == [[1, 1, 0], [0, 1, 1]]
    assert torch.equal(retrieval_heads(gates, 0.5, seed=3), retrieval_heads(gates, 0.5, seed=3))
    assert retrieval_heads(gates, 0).all()
    assert not retrieval_heads(gates, 1).any()
    with pytest.raises(ValueError, match="sparsity is 2, expected 0 to 1"):
        retrieval_heads(gates, 2)


def test_gates_of_another_model_are_refused():
    with pytest.raises(ValueError, match="has 4 layers of 2 heads, but the model has 2 of 2"):
        load_gates(gates_file(4, 2), model_of(layers=2).config)
    with pytest.raises(ValueError, match=r"tables kept here: .*proxy-error\.tsv"):
        load_gates("proxy-error", model_of().config)


def test_streaming_heads_attend_sinks_and_a_moving_window():
    model = model_of()
    retrieval = split(model)
    for method, sink, recent in (
        (lserve(model), 8, 16),
        (make("duoattention", 1, model, sink=8, recent=16), 8, 16),
    ):
        spy = spied(model, method, random_ids(1, 120), 100)
        for layer in range(4):
            for step, mask in enumerate(spy.masks[layer]):
                length = 101 + step
                for head in (~retrieval[layer]).nonzero().flatten().tolist():
                    row = mask[head * (len(mask) // 2)].nonzero().flatten().tolist()
                    assert row == [*range(sink), *range(length - recent, length)]
    duo = spied(model, make("duoattention", 1, model, sink=8, recent=16), random_ids(1, 120), 100)
    for layer in range(4):
        assert duo.masks[layer][5][retrieval[layer]].all()


def test_a_streaming_head_attends_384_tokens():
    model = model_of()
    spy = spied(model, make("lserve", 4096, model), random_ids(1, 501), 499)
    layer, head = (~split(model)).nonzero()[0].tolist()
    assert [int(mask[head * 3].sum()) for mask in spy.masks[layer]] == [384, 384]


def test_lserve_selects_when_the_length_is_a_multiple_of_the_interval():
    model, start = model_of(), 201
    spy = spied(model, lserve(model), random_ids(1, 240), start)
    retrieval = split(model)
    for layer in range(4):
        for head in retrieval[layer].nonzero().flatten().tolist():
            before = None
            changed = 0
            for step, mask in enumerate(spy.masks[layer]):
                length = start + 1 + step
                rows = mask[head * 3 : head * 3 + 3]
                padded = torch.nn.functional.pad(rows, (0, -length % 16)).unflatten(-1, (-1, 16))
                pages = padded.any(-1)
                assert pages[:, -1].all()  # the current last page, always
                reused = before is not None and length % 4
                extra = 1 if reused and pages.shape[-1] > before.shape[-1] else 0
                if reused:
                    assert torch.equal(pages[:, : before.shape[-1]], before)
                else:
                    changed += before is not None
                    assert (pages.sum(-1) == 4).all()
                    before = pages
                assert (pages.sum(-1) == 4 + extra).all()
            assert changed == 10  # T = 204, 208, ... 240


def test_lserve_takes_three_pages_at_least_and_everything_below_the_budget():
    model = model_of()
    spy = spied(model, lserve(model, 16, sparsity=0.0), random_ids(1, 101), 100)
    assert int(spy.masks[0][0][0].sum()) == 2 * 16 + 5  # the last page holds 96..100
    spy = spied(model, lserve(model, 112, sparsity=0.0), random_ids(1, 101), 100)
    assert spy.masks[0][0].all()


def test_lserve_query_heads_of_a_group_differ():
    model = model_of()
    spy = spied(model, lserve(model, 48, sparsity=0.0), random_ids(1, 202), 200)
    assert any(not torch.equal(m[0][0], m[0][1]) for m in spy.masks.values())


def test_lserve_scores_a_page_by_its_best_sub_page():
    """Two tokens of opposite signs make a page box that promises 8 where nothing exceeds 4."""
    blank = [[0.0, 0.0]] * 4
    mixed = [[4.0, 0.0], [0.0, 4.0], *blank[:2]]
    strong = [[3.0, 3.0], *blank[:3]]
    keys = torch.tensor([*blank, *mixed, *strong, *blank, *blank, *blank])[None]
    query = torch.ones(1, 2)
    for sub_page, best in ((1, 2), (4, 1)):
        method = build("lserve", 8, page=4, sub_page=sub_page)
        selector = LServeSelector(method, torch.ones(1, 1, dtype=torch.bool))
        state = selector.begin(a_prompt(query[:, None].expand(-1, 23, -1), keys[:, :23]))
        selector.select(a_step(query, keys), state)
        scores = state.digest.scores(query[None], keys).unflatten(-1, (6, -1)).amax(-1)
        assert int(scores[0, 0].argmax()) == best
        assert state.chosen[0, best]
        assert int(state.chosen.sum()) == 3


@pytest.mark.parametrize("padded", [False, True])
def test_sparse_prefill_restricts_the_streaming_heads(padded):
    """With every head streaming, the prompt is a Λ-masked forward of the whole model."""
    model, ids = model_of(), random_ids(1, 80)
    method = lserve(model, sparse_prefill=True, prefill_local=24, sparsity=1.0)
    at = torch.arange(80)
    distance = at[:, None] - at
    band = (distance >= 0) & ((distance < 24) | (at < 8))
    with torch.no_grad():
        expected = model(ids, attention_mask=band[None, None]).logits
    fed = torch.cat([random_ids(1, 13, seed=9), ids], 1) if padded else ids
    mask = torch.cat([torch.zeros(1, fed.shape[1] - 80), torch.ones(1, 80)], 1).long()
    with method.session(model) as session:
        found = feed(model, session.new_cache(), fed, mask if padded else None)[:, -80:]
    assert_same(found, expected)
    assert not method.replays
    with (
        method.session(model) as session,
        pytest.raises(ValueError, match="does not take a recorded prompt"),
    ):
        session.new_cache(session.new_cache())


def test_sparse_prefill_leaves_retrieval_heads_and_short_prompts_alone():
    model, ids = model_of(), random_ids(1, 80)
    for options in ({"sparsity": 0.0}, {"sparsity": 1.0, "prefill_local": 72}):
        with lserve(model, sparse_prefill=True, **options).session(model) as session:
            assert_same(feed(model, session.new_cache(), ids), dense_logits(model, ids, 1))


def test_scaled_windows_are_declared():
    assert build("lserve", 4096).window == (128, 256)
    assert build("lserve", 1024).window == (128, 256)
    assert build("lserve", 512).window == (32, 64)
    assert build("lserve", 512, sink=16).window == (16, 64)
    assert "scaled" in build("lserve", 512).label
    assert "proxy-error" in build("lserve", 4096).label
    assert build("lserve", 4096, gates="trained.tsv").label == "LServe"


def test_streaming_prompt_is_exact_attention():
    torch.manual_seed(0)
    query, keys, values = (torch.randn(h, 30, 8).double() for h in (4, 2, 2))
    found = streaming_prompt(query, keys, values, 3, 5, 0.5)
    for row in range(30):
        seen = [at for at in range(row + 1) if at < 3 or row - at < 5]
        for head in range(4):
            weights = (query[head, row] @ keys[head // 2, seen].T * 0.5).softmax(-1)
            assert_same(found[head, row], weights @ values[head // 2, seen])


def test_duo_is_dense_while_the_window_covers_everything():
    model, ids = model_of(), random_ids(1, 60)
    method = make("duoattention", 1, model, sink=4, recent=56, sparsity=1.0)
    assert_same(run(model, method, ids, 40)[0], dense_logits(model, ids, 40))


def test_the_decay_proxy_prefers_heads_that_look_far_back():
    """A mean query along the mean key at distance d: mass lies where RoPE turns them together."""
    model = model_of()
    rope = Rope(model)
    proxy = Decay(rope=rope)
    key = torch.randn(16, generator=torch.Generator().manual_seed(1)).double()
    at = torch.arange(40)
    scores = []
    for distance in (0, 450):
        keys = rope.shift(key.expand(1, 40, -1), at)
        query = rope.shift(rope.shift((9 * key).expand(1, 40, -1), -distance), at)
        prompt = a_prompt(query, keys)
        scores.append(float(proxy.measure(prompt)))
    assert scores[0] < scores[1]
    assert 0 < scores[0] < 1


def test_the_error_proxy_is_the_change_of_the_layers_output():
    model, ids = model_of(), random_ids(1, 90)
    found = measure(model, [ids], OutputError(answer=4, sink=5, recent=11))
    assert found.shape == (4, 2)
    layer = model.model.layers[0].self_attn
    outputs = []
    for streamed in (None, 0, 1):
        kept = {}
        hook = layer.register_forward_hook(lambda m, a, out, kept=kept: kept.update(out=out[0]))
        gates = np.ones((4, 2))
        if streamed is not None:
            gates[0, streamed] = 0
        path = gates_file(4, 2) + f".{streamed}"
        np.savetxt(path, gates, delimiter="\t")
        options = {"sparsity": 0 if streamed is None else 1 / 8, "sink": 5, "recent": 11}
        with make("duoattention", 1, model, gates=path, **options).session(model) as session:
            cache = session.new_cache()
            feed(model, cache, ids[:, :86])
            feed(model, cache, ids[:, 86:])
        hook.remove()
        outputs.append(kept["out"][0])
    for head in range(2):
        change = (outputs[1 + head] - outputs[0]).norm(dim=-1) / outputs[0].norm(dim=-1)
        assert found[0, head] == pytest.approx(float(change.mean()), rel=1e-5)
