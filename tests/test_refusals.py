"""Bad input gets a clear error, and nothing that was cached is lost."""

from __future__ import annotations

import copy
import warnings
from typing import get_args

import pytest
import torch
from helpers import (
    cache_argument,
    decode,
    flexicache,
    forward,
    left_padding,
    profile_of,
    random_ids,
    tiny_llama,
)
from transformers import DynamicCache

from flexicache_hf import (
    AttentionNotLinked,
    FlexiCacheConfig,
    FlexiCacheDynamicCache,
    FlexiCacheWarning,
    HeadProfile,
    HostMemoryError,
    InterruptedForward,
)
from flexicache_hf.config import Digest, GroupReduction

PAIRS = [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("page_size", 0, "page_size is 0, expected an integer of at least 1"),
        ("token_budget", 8, "token_budget is 8, expected an integer of at least 16"),
        ("token_budget", 1000, "multiple of page_size .16.; try 992"),
        ("rerank_interval", 0, "rerank_interval is 0"),
        ("digests_per_page", 3, "expected a divisor of page_size"),
        ("digest", "mean", "digest is 'mean', expected one of minmax, cuboid_mean, mean_spread"),
        ("group_reduction", "min", "expected one of max, softmax_sum"),
        ("first_rank", "never", "expected one of prefill, decode"),
        ("sink_pages", -1, "sink_pages is -1"),
        ("recent_pages", 0, "the newest page is always attended"),
        ("host_memory_limit", -5, "host_memory_limit is -5"),
        ("verify_tokens", 2.5, "verify_tokens is 2.5"),
    ],
)
def test_configuration(field, value, says):
    with pytest.raises(ValueError, match=says):
        FlexiCacheConfig(**{field: value})


def test_profile_of_another_model_or_with_heads_out_of_range():
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"num_layers.* 3.* 2|num_layers.*2.*3"):
        FlexiCacheDynamicCache(model, profile_of(tiny_llama(layers=3), (0, 0)))
    for pair in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="layer"):
            profile_of(model, pair)


def test_no_profile_warns_once_and_works():
    model = tiny_llama()
    with pytest.warns(FlexiCacheWarning, match="no head profile") as caught:
        cache = FlexiCacheDynamicCache(model)
    assert len(caught) == 1
    assert len(cache.profile.unstable_heads) == 1  # a quarter of four
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlexiCacheWarning)
        decode(model, cache, random_ids(1, 40), 3)


def test_unknown_attention_implementation():
    model = copy.deepcopy(tiny_llama())
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"flex_attention.*expected one of sdpa, eager"):
        flexicache(model)


@pytest.mark.parametrize("when", ["before the prompt", "after the prompt"])
def test_foreign_attention_set_by_hand_is_refused_and_nothing_is_lost(when):
    model = copy.deepcopy(tiny_llama())
    ids, token = random_ids(1, 100), random_ids(1, 1, seed=4)
    expected = decode(model, flexicache(model, *PAIRS, token_budget=32), ids, 1, None, token)
    cache = flexicache(model, *PAIRS, token_budget=32)
    if when == "before the prompt":
        model.set_attn_implementation("sdpa")
        assert torch.equal(forward(model, cache, ids), expected[0])  # dense all the same
    else:
        forward(model, cache, ids)
        model.set_attn_implementation("sdpa")
    with pytest.raises(
        AttentionNotLinked, match=r"'sdpa'.*set_attn_implementation\('flexicache'\)"
    ):
        forward(model, cache, token)
    model.set_attn_implementation("flexicache")
    found = forward(model, cache, token)
    if when == "after the prompt":
        assert torch.equal(found, expected[1])
    else:  # the step caught up with the whole prompt: dense
        dense = decode(model, DynamicCache(config=model.config), ids, 1, None, token)
        assert torch.equal(found, dense[1])
    assert cache.get_seq_length() == 101


def test_config_the_model_does_not_read():
    """A copy of the configuration: dense results until it is certain, then an error."""
    model = copy.deepcopy(tiny_llama())
    model.config._attn_implementation = "sdpa"
    copied = copy.deepcopy(model.config)
    copied._attn_implementation = "sdpa"
    cache = FlexiCacheDynamicCache(copied, profile_of(model, *PAIRS), token_budget=16)
    ids, token = random_ids(1, 60), random_ids(1, 1)
    expected = decode(model, DynamicCache(config=model.config), ids, 1, None, token)
    assert torch.equal(decode(model, cache, ids, 1, None, token), expected)
    with pytest.raises(AttentionNotLinked, match="Pass the model"):
        forward(model, cache, token)


def test_host_memory_limit_is_checked_before_anything_is_stored():
    model = tiny_llama()
    page = 2 * 2 * 16 * 16 * 4  # two stable heads, K and V, in bytes
    config = FlexiCacheConfig(token_budget=32, host_memory_limit=10 * page)
    cache = flexicache(model, *PAIRS, config=config)
    with pytest.raises(HostMemoryError, match="host_memory_limit is 40,960 bytes, but 12 pages"):
        forward(model, cache, random_ids(1, 180))
    assert cache.get_seq_length() == 0
    logits = forward(model, cache, random_ids(1, 140))
    assert cache.memory_usage().host <= 10 * page
    for length in range(141, 161):
        forward(model, cache, random_ids(1, 1, seed=length))
    with pytest.raises(HostMemoryError, match="11 pages"):
        forward(model, cache, random_ids(1, 1))
    cache.crop(-20)
    again = flexicache(model, *PAIRS, token_budget=32)
    assert torch.equal(forward(model, again, random_ids(1, 140)), logits)
    token = random_ids(1, 5)
    assert torch.equal(forward(model, cache, token), forward(model, again, token))


def test_more_rows_than_before():
    model = tiny_llama()
    cache = flexicache(model, *PAIRS, token_budget=32)
    forward(model, cache, random_ids(2, 40))
    with pytest.raises(ValueError, match="batch size is 3, but this cache holds 2 rows"):
        forward(model, cache, random_ids(3, 1))
    assert cache.get_seq_length() == 40
    forward(model, cache, random_ids(2, 1))


def generate(model, cache, ids, **kwargs):
    kwargs |= {cache_argument(model): cache}
    return model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0, **kwargs)


@pytest.mark.parametrize("prompt", ["shorter", "unrelated", "other rows"])
def test_used_cache_given_another_prompt(prompt):
    model = copy.deepcopy(tiny_llama())
    cache = flexicache(model, *PAIRS, token_budget=32)
    ids = random_ids(1, 60)
    text = generate(model, cache, ids)
    held = cache.get_seq_length()
    wrong, says = {
        "shorter": (ids[:, :30], "has 30 tokens, but the cache already holds 63"),
        "unrelated": (random_ids(1, 80, seed=8), "does not begin with the 63 tokens"),
        "other rows": (random_ids(2, 80), "has 2 rows, but the cache holds 1"),
    }[prompt]
    with pytest.raises(ValueError, match=says):
        generate(model, cache, wrong)
    assert cache.get_seq_length() == held
    longer = torch.cat([text, random_ids(1, 9)], 1)
    assert generate(model, cache, longer).shape[1] == longer.shape[1] + 4
    cache.reset()
    assert torch.equal(generate(model, cache, ids), text)


def test_mask_that_shows_what_was_never_stored():
    model = tiny_llama()
    cache = flexicache(model, *PAIRS, token_budget=32)
    forward(model, cache, random_ids(2, 60), left_padding(60, 0, 20))
    with pytest.raises(
        ValueError, match="shows 60 earlier tokens in row 1, but the cache holds 40"
    ):
        # row 0 is padded now, so that a mask exists at all
        forward(model, cache, random_ids(2, 1), left_padding(61, 1, 0))


def test_mask_that_hides_a_stored_token_is_obeyed():
    """Rare, and slow: such a step is dense."""
    model = tiny_llama()
    cache, dense = flexicache(model, *PAIRS, token_budget=32), DynamicCache(config=model.config)
    ids, mask = random_ids(1, 100), torch.ones(1, 101, dtype=torch.long)
    forward(model, cache, ids), forward(model, dense, ids)
    mask[0, 40:60] = 0
    token = random_ids(1, 1)
    with pytest.warns(FlexiCacheWarning, match="hides cached tokens"):
        found = forward(model, cache, token, mask)
    assert torch.equal(found, forward(model, dense, token, mask))
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    found = forward(model, cache, token, mask)  # says so once
    assert torch.equal(found, forward(model, dense, token, mask))


def own_mask(kind: str, queries: int, keys: int) -> torch.Tensor:
    """An additive mask `[1, 1 or 4, q, C]` that says more than what is padding."""
    position = torch.arange(keys)
    distance = position[-queries:, None] - position
    causal = torch.zeros(queries, keys).masked_fill(distance < 0, torch.finfo(torch.float32).min)
    if kind == "bias":
        return (causal - 0.1 * distance.clamp(min=0))[None, None]
    heads = causal.repeat(1, 4, 1, 1)
    for head in range(1, 4):  # the first sees everything
        heads[0, head, :, 10 * head : 10 * head + 5] = torch.finfo(torch.float32).min
    heads[0, :, position[:queries], position[-queries:]] = 0  # everyone sees itself
    return heads


@pytest.mark.filterwarnings("ignore:attention_mask is not the padding")
@pytest.mark.parametrize("kind", ["bias", "one for each head"])
@pytest.mark.parametrize("budget", [16, 256])
def test_masks_that_say_more_than_padding_are_obeyed(kind, budget):
    """Such a step is dense: pages are chosen for all tokens alike. Nothing counts as padding."""
    model, ids = tiny_llama(), random_ids(1, 64)
    cache = flexicache(model, *PAIRS, token_budget=budget, page_size=4)
    dense = DynamicCache(config=model.config)
    name = cache_argument(model)
    for fed in (60, 1, 1, 2):
        held = dense.get_seq_length()
        kwargs = {"attention_mask": own_mask(kind, fed, held + fed)}
        with torch.no_grad():
            found, expected = (
                model(ids[:, held : held + fed], **kwargs, **{name: each}).logits
                for each in (cache, dense)
            )
        assert torch.equal(found, expected)
        assert not cache.stats().current.decode
    assert cache.lengths == (64,)


@pytest.mark.filterwarnings("ignore:attention_mask is not the padding")
@pytest.mark.parametrize("given", ["model", "configuration"])
@pytest.mark.parametrize("budget", [16, 256])
def test_a_tree_of_candidates_is_no_padding(given, budget):
    """Candidates that do not see each other are stored, and attend as the mask says."""
    model = copy.deepcopy(tiny_llama())
    what = model if given == "model" else model.config
    sizes = {"token_budget": budget, "page_size": 4}
    cache = FlexiCacheDynamicCache(what, profile_of(model, *PAIRS), **sizes)
    cache.activate_past_recording()
    dense, ids = DynamicCache(config=model.config), random_ids(1, 65)
    for each in (cache, dense):
        forward(model, each, ids[:, :60])
    mask = torch.ones(1, 1, 5, 65, dtype=torch.bool)
    mask[..., 60:] = torch.tensor(  # two branches of two after the first
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    )
    kwargs = {"attention_mask": mask, "position_ids": torch.tensor([[60, 61, 62, 61, 62]])}
    with torch.no_grad():
        found, expected = (
            model(ids[:, 60:], **kwargs, **{cache_argument(model): each}).logits
            for each in (cache, dense)
        )
    assert torch.equal(found, expected)
    assert cache.lengths == (65,)
    for each in (cache, dense):
        each.crop(-2)
    if given == "configuration" and budget == 16:
        return  # takes the turn for candidates again, now plain ones
    assert torch.equal(forward(model, cache, ids[:, :7]), forward(model, dense, ids[:, :7]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("reduction", get_args(GroupReduction))
@pytest.mark.parametrize("digest", get_args(Digest))
def test_keys_that_are_not_numbers_behave_as_in_dense_attention(value, digest, reduction):
    """One bad token far back: its page must be selected, so that the output is as bad as dense."""
    model = tiny_llama()
    config = FlexiCacheConfig(token_budget=64, digest=digest, group_reduction=reduction)
    cache, dense = flexicache(model, *PAIRS, config=config), DynamicCache(config=model.config)
    ids = random_ids(1, 300)

    def spoil(module, args, output):
        if output.shape[1] == 300:
            output = output.clone()
            output[:, 70] = value
        return output

    layer = model.model.layers[0].self_attn.k_proj
    with_hook = layer.register_forward_hook(spoil)
    try:
        first = decode(model, cache, ids, 4, None, random_ids(1, 4))
        second = decode(model, dense, ids, 4, None, random_ids(1, 4))
    finally:
        with_hook.remove()
    assert torch.equal(first.isnan(), second.isnan())


def test_interrupted_forward_refuses_until_it_is_taken_back():
    model = copy.deepcopy(tiny_llama(layers=3))
    cache, other = (flexicache(model, (1, 0), token_budget=32) for _ in range(2))
    ids, token = random_ids(1, 100), random_ids(1, 1)
    for each in (cache, other):
        decode(model, each, ids, 5, None, random_ids(1, 5))

    def fail(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, token)
    hook.remove()
    with pytest.raises(InterruptedForward, match=r"cache.crop\(-n\).*cache.reset\(\)"):
        forward(model, cache, token)
    cache.crop(-1)
    assert torch.equal(forward(model, cache, token), forward(model, other, token))


def test_crop_takes_no_positive_number():
    cache = flexicache(tiny_llama())
    with pytest.raises(ValueError, match="tokens_to_remove is 5"):
        cache.crop(5)


def test_profile_none_of_a_model_without_tiered_layers_warns():
    from transformers import MistralConfig

    config = MistralConfig(
        num_hidden_layers=2, sliding_window=32, num_attention_heads=2, num_key_value_heads=1
    )
    config._attn_implementation = "sdpa"
    profile = HeadProfile.from_unstable_heads(config, [])
    with pytest.warns(FlexiCacheWarning, match="no full-attention layer"):
        FlexiCacheDynamicCache(config, profile)


@pytest.mark.parametrize("change", ["repeat", "crop", "join"])
def test_host_memory_limit_holds_when_rows_change(change):
    """The copies of an open page, and the pages of rows that join, count before they are made."""
    model = tiny_llama()
    page = 4 * (16 + 16) * 4  # bytes of a page's keys and values; a stable head in each layer
    held, pages = {"repeat": (18, 5 + 1), "crop": (16, 4 + 1), "join": (16, 4)}[change]
    limit = 2 * page * pages
    sizes = {"token_budget": 8, "page_size": 4}
    config = FlexiCacheConfig(**sizes, host_memory_limit=limit)
    cache, other = (flexicache(model, *PAIRS, config=config) for _ in range(2))
    twin = flexicache(model, *PAIRS, **sizes)
    for each in (cache, twin, other):
        forward(model, each, random_ids(1, held))
        if change == "crop":
            each.batch_repeat_interleave(4)
    operation = {
        "repeat": lambda: cache.batch_repeat_interleave(4),
        "crop": lambda: cache.crop(-1),
        "join": lambda: cache.join(other),
    }[change]
    with pytest.raises(HostMemoryError, match=r"host_memory_limit.*Nothing was stored"):
        operation()
    assert cache.memory_usage().host <= limit
    assert cache.lengths == twin.lengths
    for each in (cache, twin):
        each.batch_select_indices(torch.tensor([0]))
    if change != "join":
        turn = random_ids(1, 1, seed=2)
        assert torch.equal(forward(model, cache, turn), forward(model, twin, turn))
    cache.reset()
    assert torch.equal(
        forward(model, cache, random_ids(1, 8)),
        forward(model, flexicache(model, *PAIRS, **sizes), random_ids(1, 8)),
    )


def test_rows_that_are_not_there():
    model = tiny_llama()
    cache, twin = (flexicache(model, *PAIRS, token_budget=32) for _ in range(2))
    for each in (cache, twin):
        forward(model, each, random_ids(2, 60))
    for change in (cache.reorder_cache, cache.batch_select_indices):
        with pytest.raises(IndexError):
            change(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="cannot join itself"):
        cache.join(cache)
    cache.reorder_cache(torch.tensor([-1, 0]))
    twin.reorder_cache(torch.tensor([1, 0]))
    token = random_ids(2, 1, seed=3)
    assert torch.equal(forward(model, cache, token), forward(model, twin, token))
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert (cache.get_seq_length(), cache.memory_usage().device) == (0, 0)
    forward(model, cache, random_ids(3, 20))


def test_rows_of_another_model_do_not_join():
    first, second = tiny_llama(), tiny_llama(dtype=torch.float64)
    caches = [flexicache(model, *PAIRS, token_budget=32) for model in (first, second)]
    for model, cache in zip((first, second), caches):
        forward(model, cache, random_ids(1, 60))
    with pytest.raises(ValueError, match=r"layer 0 of the caches differs.*float32.*float64"):
        caches[0].join(caches[1])
    assert caches[0].lengths == caches[1].lengths == (60,)
