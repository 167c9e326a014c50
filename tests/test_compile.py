"""torch.compile: the decode attention is one operator, and a generation is one graph."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from families import build, tiered_heads
from helpers import cache_argument, decode, flexicache, forward, left_padding, positions, random_ids
from torch._dynamo.testing import CompileCounter

from flexicache_hf.integration import compiled

SMALL = {"token_budget": 32, "page_size": 4, "rerank_interval": 4}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_steps(model, cache, tokens, mask=None, **options):
    """Logits of one-token forwards through a compiled model, and the graphs it took."""
    counter = CompileCounter()
    step = torch.compile(model.forward, backend=counter, **options)
    logits = []
    with torch.no_grad():
        for at in range(tokens.shape[1]):
            kwargs = {cache_argument(model): cache}
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                kwargs |= {"attention_mask": mask, "position_ids": positions(mask)[:, -1:]}
            logits.append(step(tokens[:, at : at + 1], **kwargs).logits[:, -1])
    return torch.stack(logits), counter.frame_count


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
@pytest.mark.parametrize("sizes", [SMALL, {"token_budget": 1024}], ids=["sparse", "covered"])
def test_a_generation_is_one_graph_without_breaks(family, sizes):
    """The first step compiles for its length, the second for any; then nothing is compiled again,
    through page fills, rankings and promotions."""
    model, pairs = copy.deepcopy(build(family)), tiered_heads(build(family))[::2]
    ids, tokens = random_ids(1, 90), random_ids(1, 40, seed=3)
    expected = decode(model, flexicache(model, *pairs, **sizes), ids, 40, None, tokens)
    cache = flexicache(model, *pairs, **sizes)
    forward(model, cache, ids)
    found, graphs = compiled_steps(model, cache, tokens, fullgraph=True)
    assert torch.equal(found, expected[1:])
    assert graphs <= 2
    assert cache.get_seq_length() == 130


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3n"])
def test_sliding_layers_sinks_and_shared_keys_still_run(family):
    model, pairs = copy.deepcopy(build(family)), tiered_heads(build(family))[::2]
    if family == "gemma3n" and cache_argument(model) != "cache":
        pytest.skip("before transformers 5.24 shared keys leave a graph, and lose their mark")
    ids, tokens = random_ids(1, 60), random_ids(1, 10, seed=3)
    expected = decode(model, flexicache(model, *pairs, **SMALL), ids, 10, None, tokens)
    cache = flexicache(model, *pairs, **SMALL)
    forward(model, cache, ids)
    found, _ = compiled_steps(model, cache, tokens)
    torch.testing.assert_close(found, expected[1:], rtol=1e-4, atol=1e-4)


def test_padded_rows_and_a_second_cache():
    model, pairs = copy.deepcopy(build("llama")), [(0, 1)]
    ids, tokens, mask = random_ids(3, 70), random_ids(3, 20, seed=3), left_padding(70, 0, 9, 41)
    expected = decode(model, flexicache(model, *pairs, **SMALL), ids, 20, mask, tokens)
    for _ in range(2):
        cache = flexicache(model, *pairs, **SMALL)
        forward(model, cache, ids, mask)
        found, _ = compiled_steps(model, cache, tokens, mask)
        assert torch.equal(found, expected[1:])


def test_layers_vanish_from_the_operators_table_with_their_cache():
    model = build("llama")
    gc.collect()
    gc.disable()
    try:
        before = len(compiled._layers)
        cache = flexicache(model, **SMALL)
        forward(model, cache, random_ids(1, 20))
        copied = copy.deepcopy(cache)
        assert len(compiled._layers) == before + 4
        assert {x.number for x in copied.layers}.isdisjoint(x.number for x in cache.layers)
        del cache, copied
        assert len(compiled._layers) == before
    finally:
        gc.enable()
