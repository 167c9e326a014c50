"""Device bytes follow the formula at every length, and a prompt's peak is a layer, not a model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers import decode, flexicache, forward, random_ids, tiny_llama
from live_bytes import LiveBytes
from transformers import LlamaConfig

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache, HeadProfile

K, PAGE = 1024, 16


def shapes(layers: int, heads: int, dim: int) -> LlamaConfig:
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=heads * dim,
        head_dim=dim,
    )
    config._attn_implementation = "sdpa"
    return config


def quarter(config: LlamaConfig) -> HeadProfile:
    """A quarter of all heads is unstable, spread unevenly over the layers."""
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    pairs = [(layer, head) for layer in range(layers // 4, layers) for head in range(heads)]
    return HeadProfile.from_unstable_heads(config, pairs[: round(layers * heads / 4)])


def feed(cache, config, length: int, dtype=torch.float32, rows: int = 1) -> None:
    """A forward of synthetic keys and values through every layer, without a model."""
    shape = (rows, config.num_key_value_heads, length, config.head_dim)
    for layer in cache.layers:
        keys = torch.randn(shape[-1], dtype=dtype).expand(shape).contiguous()
        layer.update(keys, keys.clone())
        query = torch.randn(rows, shape[1], min(length, 1), shape[3]).to(dtype)
        layer.attend(None, query, None, lambda module, q, *_, **__: (q.transpose(1, 2), None))


def expected_fraction(length: int, unstable: float) -> float:
    """Section 2 of docs/design.md: resident pages, working set with its tail page, digests."""
    working = min(length, K + PAGE) / length
    return unstable + (1 - unstable) * working + 1 / PAGE


@pytest.mark.parametrize("length", [1024, 4096, 8192, 20_000, 32_768, 131_072])
def test_device_bytes_follow_the_formula(length):
    config = shapes(30, 3, 64)  # SmolLM2-135M
    profile = quarter(config)
    cache = FlexiCacheDynamicCache(config, profile, token_budget=K)
    dtype = torch.float16 if length > 40_000 else torch.float32
    feed(cache, config, length - 8, dtype)
    for _ in range(8):
        feed(cache, config, 1, dtype)
    usage = cache.memory_usage()
    unstable = len(profile.unstable_heads) / 90
    assert usage.dense_equivalent == 2 * 90 * 64 * length * dtype.itemsize
    expected = expected_fraction(length, unstable) * usage.dense_equivalent
    assert usage.device == pytest.approx(expected, rel=0.02)
    if length == 20_000:
        assert usage.device_fraction <= 0.36


def test_reported_bytes_are_what_is_alive():
    """The report against an allocator's count: nothing allocated is left out."""
    config = shapes(4, 4, 32)
    with torch.no_grad(), LiveBytes() as memory:
        cache = FlexiCacheDynamicCache(config, quarter(config), token_budget=K)
        feed(cache, config, 5000)
        for _ in range(20):
            feed(cache, config, 1)
        usage = cache.memory_usage()
        small = 30_000  # index tensors of heads, and what the last step computed once for all
        assert usage.device <= memory.live <= usage.device + small
        assert memory.host == usage.host


def test_prefill_peak_is_below_45_percent_of_dense():
    length, config = 20_000, shapes(32, 4, 32)
    with torch.no_grad(), LiveBytes() as memory:
        cache = FlexiCacheDynamicCache(config, quarter(config), token_budget=K)
        feed(cache, config, length)
        dense = cache.memory_usage().dense_equivalent
    assert memory.peak < 0.45 * dense
    assert memory.peak > cache.memory_usage().device  # the layer in work was counted


def test_later_turn_peak_is_a_few_layers():
    """The history comes back layer by layer, not all at once."""
    length, config = 20_000, shapes(32, 4, 32)
    cache = FlexiCacheDynamicCache(config, quarter(config), token_budget=K)
    with torch.no_grad(), LiveBytes() as memory:
        feed(cache, config, length)
        feed(cache, config, 100)
        assert memory.peak < 0.5 * cache.memory_usage().dense_equivalent


def test_short_prompts_do_not_allocate_the_whole_budget():
    model = tiny_llama()
    cache = flexicache(model, (0, 0), token_budget=4096)
    forward(model, cache, random_ids(1, 64))
    assert cache.memory_usage().device_fraction < 1.1


def test_del_frees_everything_at_once():
    model = tiny_llama()
    gc.collect()
    gc.disable()
    try:
        cache = flexicache(model, (0, 0), token_budget=32)
        decode(model, cache, random_ids(2, 100), 30)
        held = [weakref.ref(layer) for layer in cache.layers]
        pools = [weakref.ref(layer.stable.working_set.keys) for layer in cache.layers]
        del cache
        assert not any(ref() is not None for ref in held + pools)
    finally:
        gc.enable()


def test_gradients_are_not_kept():
    model = tiny_llama()
    cache = flexicache(model, (0, 0), token_budget=32)
    for length in (100, 1, 1):
        model(random_ids(1, length), past_key_values=cache)
    assert not cache.layers[0].stable.working_set.keys.requires_grad
    assert not cache.layers[0].unstable.keys.requires_grad


def test_more_layers_than_memory_is_reported_per_kind():
    model = tiny_llama()
    cache = flexicache(model, (0, 0), config=FlexiCacheConfig(token_budget=32))
    forward(model, cache, random_ids(1, 320))
    usage = cache.memory_usage()
    token = 2 * 16 * 4  # K and V of one head, fp32
    assert usage.resident_pages == pytest.approx(320 * token, rel=0.02)
    assert usage.working_set == 3 * 32 * token
    assert usage.host == 3 * 320 * token
    assert usage.metadata == pytest.approx(4 * 20 * token, rel=0.06)
    assert usage.dense_equivalent == 4 * 320 * token
    assert usage.in_flight == usage.other_layers == 0
    assert set(usage.to_dict()) >= {"device", "host", "dense_equivalent", "device_fraction"}
