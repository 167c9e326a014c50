"""What generate() and the cache contract do beyond test_matrix.py: against the same text decoded in
another way, in what rows share, and in order with one's own loops."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers import (
    cache_argument,
    decode,
    flexicache,
    forward,
    generate,
    profile_of,
    random_ids,
    tiny_llama,
)
from transformers import DynamicCache, pipeline

from flexicache_hf import FlexiCacheDynamicCache

PAIRS = [(0, 0), (1, 1)]
BIG = {"token_budget": 2048}
SMALL = {"token_budget": 32, "page_size": 4, "rerank_interval": 4}


@pytest.fixture
def model():
    return copy.deepcopy(tiny_llama())


def assert_same_generation(found, expected, atol=0.0):
    assert torch.equal(found.sequences, expected.sequences)
    for left, right in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=atol)


@pytest.mark.parametrize("returned", [1, 4])
def test_sparse_beams_equal_their_text_decoded_alone(model, returned):
    """A beam's history, replayed token by token without any reordering, has the same logits."""
    ids = random_ids(2, 90)
    cache = flexicache(model, *PAIRS, **SMALL)
    output = generate(model, cache, ids, 20, num_beams=4, num_return_sequences=returned)
    best = output.sequences[0, 90:]
    alone = decode(model, flexicache(model, *PAIRS, **SMALL), ids[:1], 19, None, best[None, :-1])
    # scores of the beam that won, step by step
    beams = output.beam_indices[0].tolist()
    for step, beam in enumerate(beams):
        torch.testing.assert_close(output.logits[step][beam], alone[step, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [7, 16, 89])
def test_sparse_generation_after_a_prompt_in_chunks(model, chunk):
    """Chunks change nothing, not even a last chunk of one token (89 + 1)."""
    ids = random_ids(1, 90)
    whole = generate(model, flexicache(model, *PAIRS, **SMALL), ids)
    parts = generate(model, flexicache(model, *PAIRS, **SMALL), ids, prefill_chunk_size=chunk)
    assert_same_generation(parts, whole, atol=2e-5)


def test_sparse_prompt_lookup_stays_sparse_and_croppable(model):
    """Verified tokens attend sparsely; what is rejected leaves no trace in lengths or pages."""
    ids = random_ids(1, 12, seed=2).repeat(1, 8)  # a text that repeats itself, so that drafts exist
    cache = flexicache(model, *PAIRS, **SMALL)
    output = generate(model, cache, ids, 30, prompt_lookup_num_tokens=5)
    assert output.sequences.shape[1] == 96 + 30
    steps = [step for step in cache.stats().steps if step.decode]
    assert any(step.tokens > 1 for step in steps)
    assert cache._table.lengths == (cache.get_seq_length(),)
    held = cache.get_seq_length()
    text = output.sequences[:, :held]
    heads = 4
    for step in steps:
        assert step.attended <= heads * (8 + 3) * 1  # K pages and the tail, per head
    cache.crop(96 - held)
    dense = DynamicCache(config=model.config)
    forward(model, dense, text[:, :96])
    token = random_ids(1, 7, seed=8)
    assert torch.equal(forward(model, cache, token), forward(model, dense, token))


def test_verifying_several_tokens_is_causal(model):
    """A later token of the verified ones must not change an earlier one's logits."""
    ids = random_ids(1, 90)
    logits = []
    for last in (3, 4):
        # all heads stable: their pages are chosen before, so only causality is at stake. Given the
        # configuration alone, the cache takes a short forward for verification by itself.
        cache = FlexiCacheDynamicCache(model.config, profile_of(model), **SMALL)
        forward(model, cache, ids)
        forward(model, cache, random_ids(1, 1))
        cache.activate_past_recording()
        tokens = torch.tensor([[5, 9, 11, 7, last]])
        with torch.no_grad():
            logits.append(model(tokens, **{cache_argument(model): cache}).logits)
        assert cache.stats().current.decode
    assert torch.equal(logits[0][:, :4], logits[1][:, :4])
    assert not torch.equal(logits[0][:, 4], logits[1][:, 4])


def test_fan_out_shares_pages_and_equals_separate_rows(model):
    ids = random_ids(1, 91)
    cache = flexicache(model, *PAIRS, **SMALL)
    forward(model, cache, ids)
    before = cache.memory_usage()
    cache.batch_repeat_interleave(3)
    after = cache.memory_usage()
    assert after.host - before.host <= 16 * 4 * 512  # one small chunk, for three open pages
    assert after.resident_pages <= before.resident_pages * 1.1
    tokens = random_ids(3, 30, seed=6)
    with torch.no_grad():
        together = torch.stack([forward(model, cache, tokens[:, i : i + 1]) for i in range(30)])
    for row in range(3):
        alone = flexicache(model, *PAIRS, **SMALL)
        forward(model, alone, ids)
        for i in range(30):
            logits = forward(model, alone, tokens[row : row + 1, i : i + 1])
            torch.testing.assert_close(together[i, row], logits[0], rtol=1e-4, atol=1e-4)
    cache.batch_select_indices(torch.tensor([False, True, False]))
    assert cache._table.rows == 1
    assert sum(count > 0 for count in cache._table.references) == -(-121 // 4)  # others are free


def test_crop_takes_a_tensor(model):
    """Some versions of generate() compute the number on the device."""
    cache = flexicache(model, *PAIRS, **SMALL)
    forward(model, cache, random_ids(1, 60))
    cache.crop(torch.tensor(-7))
    length = cache.get_seq_length()
    forward(model, cache, random_ids(1, 5))
    assert (length, cache.get_seq_length()) == (53, 58)


def test_reset_makes_it_as_good_as_new(model):
    ids = random_ids(2, 70)
    cache = flexicache(model, *PAIRS, **SMALL)
    first = generate(model, cache, ids)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.memory_usage().device == 0
    assert_same_generation(generate(model, cache, ids), first)
    cache.reset()
    generate(model, cache, random_ids(3, 20))


def test_given_the_configuration_alone():
    model = copy.deepcopy(tiny_llama())
    ids = random_ids(1, 70)
    cache = FlexiCacheDynamicCache(model.config, profile_of(model, *PAIRS), **SMALL)
    found = generate(model, cache, ids)
    assert cache.stats().total.unstable_ranked > 0
    assert_same_generation(found, generate(model, flexicache(model, *PAIRS, **SMALL), ids))


def test_a_pipeline_does_not_leak_one_prompt_into_the_next(smollm2):
    """transformers hands the one cache to every prompt of a list; ours refuses the second."""
    model, tokenizer = smollm2
    model = copy.deepcopy(model)
    cache = flexicache(model, (0, 0), token_budget=64)
    run = pipeline("text-generation", model=model, tokenizer=tokenizer)
    kwargs = {"max_new_tokens": 4, "do_sample": False, cache_argument(model): cache}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"does not begin with|already holds"):
            run(["The capital of France is", "One two three four five six seven"], **kwargs)
        cache.reset()
        (answer,) = run("The capital of France is", **kwargs)
    assert "Paris" in answer["generated_text"]


@pytest.mark.parametrize("sizes", [BIG, SMALL], ids=["covered", "sparse"])
def test_crop_anywhere_then_continue(model, sizes):
    """A dense turn after a crop sees the text that was left, as if the rest had never been."""
    ids = random_ids(2, 100)
    for removed in (1, 3, 4, 5, 16, 40, 99, 100):
        cache, twin = (flexicache(model, *PAIRS, **sizes) for _ in range(2))
        decode(model, cache, ids[:, :80], 20, None, ids[:, 80:])
        cache.crop(-removed)
        left = 100 - removed
        assert cache.get_seq_length() == left
        if left:
            decode(model, twin, ids[:, : min(left, 80)], max(left - 80, 0), None, ids[:, 80:])
        turn = random_ids(2, 6, seed=removed)
        torch.testing.assert_close(
            forward(model, cache, turn), forward(model, twin, turn), rtol=0, atol=2e-5
        )
        token = turn[:, :1]
        torch.testing.assert_close(
            forward(model, cache, token), forward(model, twin, token), rtol=0, atol=2e-5
        )


def test_rows_that_were_repeated_still_continue_their_text(model):
    """The text that generate() fed is remembered row by row."""
    cache = flexicache(model, *PAIRS, **SMALL)
    text = generate(model, cache, random_ids(1, 60), 6).sequences
    cache.batch_repeat_interleave(3)
    longer = torch.cat([text.expand(3, -1), random_ids(3, 5)], 1)
    assert generate(model, cache, longer, 4).sequences.shape == (3, 75)


@pytest.mark.parametrize("cropped", [0, 3])
def test_generate_again_after_an_own_loop(model, cropped):
    """The text that generate() knows ends where the own loop began."""
    cache, dense = flexicache(model, *PAIRS, **BIG), DynamicCache(config=model.config)
    text = generate(model, cache, random_ids(1, 60), 6).sequences
    generate(model, dense, random_ids(1, 60), 6)
    more = random_ids(1, 5, seed=3)
    for each in (cache, dense):
        each.crop(-cropped)
        forward(model, each, more)
    whole = torch.cat([text[:, : 65 - cropped], more, random_ids(1, 4, seed=4)], 1)
    found = generate(model, cache, whole, 8)
    assert_same_generation(found, generate(model, dense, whole, 8))
    other = whole.clone()
    other[0, 10] += 1
    with pytest.raises(ValueError, match="does not begin with"):
        generate(model, cache, other.repeat(1, 2), 4)
