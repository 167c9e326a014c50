"""`profile="auto"`: heads are learned while generating, and nothing is lost on the way."""

from __future__ import annotations

import copy

import pytest
import torch
from delaying_queue import DelayingQueue
from helpers import decode, flexicache, forward, left_padding, random_ids, tiny_llama
from transformers import DynamicCache

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache, FlexiCacheWarning, HeadProfile
from flexicache_hf.models.embedded import reference_text
from flexicache_hf.profiles.collect import CollectSettings, PageRecorder, recording
from flexicache_hf.profiles.stability import StabilityVote, overlap

CONFIG = FlexiCacheConfig(token_budget=32, page_size=4, rerank_interval=4, auto_windows=3)
EVERY = [(layer, head) for layer in range(3) for head in range(4)]
LEARNING = 3 * 16  # decode steps


@pytest.fixture
def model():
    return tiny_llama(3, 4, 1, torch.float64)


def auto(model, **kwargs):
    return FlexiCacheDynamicCache(model, "auto", config=CONFIG, **kwargs)


def test_equals_all_unstable_while_learning_and_keeps_every_token(model):
    ids, tokens = random_ids(1, 90), random_ids(1, 80, seed=3)
    recorded = CONFIG.replace(digest="minmax")  # as profiles are recorded
    cache, twin = auto(model), flexicache(model, *EVERY, config=recorded)
    found = decode(model, cache, ids, LEARNING, None, tokens)
    assert torch.equal(found, decode(model, twin, ids, LEARNING, None, tokens))
    assert len(cache.profile.unstable_heads) == 12
    forward(model, cache, tokens[:, LEARNING : LEARNING + 1])
    assert len(cache.profile.unstable_heads) == 3
    assert cache.profile.num_windows == 3
    decode(model, cache, tokens[:, :1], 30, None, tokens[:, :30])
    # every full page of the stable heads reached the host as it was
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        keys, values, _ = layer.stable.row(0, 136)  # 34 pages of the 138 tokens both were fed
        expected = other.unstable.row(0, 136)
        assert torch.equal(keys, expected[0][layer.stable.heads])
        assert torch.equal(values, expected[1][layer.stable.heads])


def test_learns_what_recording_the_same_steps_finds(model):
    """The learner's vote against the offline one, over a text that both are fed."""
    ids, tokens = random_ids(1, 90), random_ids(1, LEARNING + 1, seed=3)
    big = CONFIG.replace(token_budget=64)
    cache = FlexiCacheDynamicCache(model, "auto", config=big)
    decode(model, cache, ids, LEARNING + 1, None, tokens)
    recorder = PageRecorder(CollectSettings(top_k=16, page_sizes=(4,)), 90)
    with recording(model, recorder):
        decode(model, DynamicCache(config=model.config), ids, LEARNING, None, tokens)
    record = recorder.record("any", "any", {})
    vote = StabilityVote(3, 4, 3)
    vote.add_pages(record.pages[4], record.num_pages[4])
    assert cache.profile.num_windows == vote.num_windows == 3
    # keys differ from layer 1 on, since the learning cache is sparse: the same in layer 0
    mine = torch.tensor(cache.profile.stability, dtype=torch.float64)
    torch.testing.assert_close(mine[0], vote.stability[0], rtol=0, atol=1e-6)
    assert len(set(cache.profile.unstable_heads) & set(vote.unstable_heads())) >= 2


def test_device_bytes_converge_to_those_of_the_profile(model):
    ids, tokens = random_ids(2, 600), random_ids(2, 60, seed=3)
    cache = auto(model)
    decode(model, cache, ids, 60, None, tokens)
    offline = FlexiCacheDynamicCache(model, cache.profile, config=CONFIG)
    decode(model, offline, ids, 60, None, tokens)
    assert cache.memory_usage().device == pytest.approx(offline.memory_usage().device, rel=0.02)
    assert cache.memory_usage().host == pytest.approx(offline.memory_usage().host, rel=0.1)
    assert cache.stats().total.promoted > 0


def test_rows_vote_together_and_padding_does_not_matter(model):
    ids, mask = random_ids(3, 90), left_padding(90, 0, 11, 33)
    cache = auto(model)
    decode(model, cache, ids, 17, mask, random_ids(3, 17, seed=3))
    assert cache.profile.num_windows == 3  # one window of three rows


def test_changes_of_the_cache_start_the_window_again(model):
    tokens = random_ids(1, 40, seed=3)
    cache = auto(model)
    decode(model, cache, random_ids(1, 90), 10, None, tokens)
    learner = cache._shared.learner
    assert len(learner.window) == 10
    cache.crop(-2)
    assert not learner.window
    decode(model, cache, tokens[:, :1], 9, None, tokens)
    forward(model, cache, random_ids(1, 5))  # the next turn
    decode(model, cache, tokens[:, :1], 5, None, tokens)
    assert len(learner.window) == 6
    cache.reset()
    assert not learner.window
    copied = copy.deepcopy(cache)
    decode(model, copied, random_ids(1, 90), LEARNING + 1, None, random_ids(1, LEARNING + 1))
    assert len(copied.profile.unstable_heads) == 3
    assert len(cache.profile.unstable_heads) == 12


def test_learned_caches_go_on_through_every_change(model):
    """After the hand-over the cache is an ordinary one, with delayed copies too."""
    results = []
    for factory in (None, DelayingQueue):
        cache = auto(model, queue_factory=factory)
        tokens = random_ids(1, 60, seed=3)
        logits = [decode(model, cache, random_ids(1, 90), 50, None, tokens)]
        cache.batch_repeat_interleave(2)
        logits.append(decode(model, cache, random_ids(2, 1), 12, None, random_ids(2, 12)))
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.crop(-9)
        logits.append(decode(model, cache, random_ids(2, 7), 12, None, random_ids(2, 12)))
        results.append(logits)
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_no_room_on_the_host_keeps_all_heads_on_the_device(model):
    config = CONFIG.replace(host_memory_limit=10_000)
    cache = FlexiCacheDynamicCache(model, "auto", config=config)
    tokens = random_ids(1, LEARNING + 5, seed=3)
    with pytest.warns(FlexiCacheWarning, match=r"all stay on the device: host_memory_limit"):
        decode(model, cache, random_ids(1, 90), LEARNING + 5, None, tokens)
    assert cache.memory_usage().host == 0


def test_one_page_is_not_enough_to_learn(model):
    with pytest.raises(ValueError, match="expected at least two pages"):
        FlexiCacheDynamicCache(model, "auto", token_budget=16)


def test_the_learned_profile_can_be_saved(model, tmp_path):
    cache = auto(model)
    decode(model, cache, random_ids(1, 90), LEARNING + 1, None, random_ids(1, LEARNING + 1))
    cache.profile.save_pretrained(tmp_path)
    again = HeadProfile.from_pretrained(tmp_path)
    assert again.unstable_heads == cache.profile.unstable_heads
    assert again.stability == cache.profile.stability


@pytest.mark.model
def test_real_model_learns_the_heads_that_recording_finds(smollm2):
    """The same text, taught to both: the sparse cache's vote is within 0.10 of the dense one's."""
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer(reference_text()[:30_000])["input_ids"][:1500]])
    prompt, tokens = ids[:, :1400], ids[:, 1400:]
    config = FlexiCacheConfig(token_budget=512, auto_windows=6)
    cache = FlexiCacheDynamicCache(model, "auto", config=config)
    decode(model, cache, prompt, 6 * 16 + 1, None, tokens)
    recorder = PageRecorder(CollectSettings(top_k=32), 1400)
    with recording(model, recorder):
        decode(model, DynamicCache(config=model.config), prompt, 6 * 16, None, tokens)
    record = recorder.record("reference", "any", {})
    vote = StabilityVote(30, 3, 22)
    vote.add_pages(record.pages[16], record.num_pages[16])
    shared = overlap(cache.profile.unstable_heads, vote.unstable_heads())
    assert shared >= 0.9, shared
