"""What transformers' own tests ask of a cache, asked of ours on SmolLM2-135M-Instruct.

Covered: tokens and logits are DynamicCache's, bit for bit. Sparse: as decoding one row one by one.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from helpers import cache_argument, left_padding, positions
from torch.nn.functional import rms_norm
from transformers import DynamicCache, TextIteratorStreamer

from flexicache_hf import FlexiCacheDynamicCache

pytestmark = pytest.mark.model

COVERED = {"token_budget": 2048}
SPARSE = {"token_budget": 64, "rerank_interval": 4}
STORY = (
    "Mira kept a small observatory on the hill above the harbour. Every clear night she counted "
    "the ships that came in, wrote the number in a green notebook, and pointed the telescope at "
    "the same three stars. In spring the notebook was full, so she bought a red one at the market "
    "and went on counting. Nobody in the town knew why, until the harbour master asked. "
)
QUESTIONS = ["What colour was the second notebook?", "Where did Mira live?"]
PROMPTS = ["The capital of France is", STORY + QUESTIONS[0], "Water boils at"]


@pytest.fixture(scope="module")
def model(smollm2):
    return copy.deepcopy(smollm2[0])


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2[1]


def ours(model, sizes):
    return FlexiCacheDynamicCache(model, **sizes)


def dense(model):
    return DynamicCache(config=model.config)


def generate(model, cache, ids, mask=None, new=8, **kwargs):
    kwargs |= {cache_argument(model): cache}
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **kwargs,
    )


def encode(tokenizer, texts, **kwargs):
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", **kwargs)
    return encoded["input_ids"], encoded["attention_mask"]


def assert_equal(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.logits, expected.logits))


def assert_close(found, expected):
    """The same text; logits differ by the order of sums only."""
    new = len(found.logits)
    assert torch.equal(found.sequences[:, -new:], expected.sequences[:, -new:])
    for left, right in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-3)


@pytest.mark.parametrize("beams", [1, 2])
def test_batched_when_covered(model, tokenizer, beams):
    batch = encode(tokenizer, PROMPTS)
    kwargs = {"num_beams": beams, "num_return_sequences": beams}
    found = generate(model, ours(model, COVERED), *batch, **kwargs)
    assert_equal(found, generate(model, dense(model), *batch, **kwargs))


@pytest.mark.parametrize("sizes", [COVERED, SPARSE], ids=["covered", "sparse"])
def test_extra_left_padding_gives_the_same_text(model, tokenizer, sizes):
    ids, mask = encode(tokenizer, PROMPTS[1:2])
    wide = [torch.nn.functional.pad(part, (37, 0)) for part in (ids, mask)]
    padded = generate(model, ours(model, sizes), *wide)
    assert_close(padded, generate(model, ours(model, sizes), ids, mask))
    if sizes is COVERED:
        assert_equal(padded, generate(model, dense(model), *wide))


@torch.no_grad()
def fed(model, cache, ids, mask, tokens):
    """Logits `[steps + 1, B, V]` of a prompt and of `tokens` `[B, steps]` after it."""
    kwargs = {cache_argument(model): cache, "logits_to_keep": 1}
    logits = []
    for new in (ids, *tokens.T[..., None]):
        if logits:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        at = positions(mask)[:, -new.shape[1] :]
        logits.append(model(new, attention_mask=mask, position_ids=at, **kwargs).logits[:, -1])
    return torch.stack(logits)


def in_float64(model):
    """A copy that computes in float64 throughout: Llama's norms round to float32 otherwise, which
    makes differences of 1e-16 into some of 1e-8."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if type(module).__name__.endswith("RMSNorm"):
            size, eps = module.weight.shape, module.variance_epsilon
            module.forward = partial(rms_norm, normalized_shape=size, weight=module.weight, eps=eps)
    return exact


@pytest.mark.slow
def test_sparse_rows_of_very_different_length_equal_each_row_alone(model, tokenizer):
    """In float64. In float32 a batch sums in another order than a row alone, and where two pages
    score alike to the last digits, a head may take the other one: a choice as good, but other
    logits from there on."""
    lengths, steps = (437, 250, 40), 12
    text = encode(tokenizer, [STORY * 8])[0][0]
    tokens = text[: 3 * steps].view(3, steps)
    rows = [text[7 * row : 7 * row + length] for row, length in enumerate(lengths)]
    mask = left_padding(lengths[0], *(lengths[0] - length for length in lengths))
    ids = torch.zeros_like(mask)
    for row, prompt in enumerate(rows):
        ids[row, -len(prompt) :] = prompt
    exact, sizes = in_float64(model), {"token_budget": 128, "rerank_interval": 4}
    cache = ours(exact, sizes)
    together = fed(exact, cache, ids, mask, tokens)
    assert cache.stats().total.promoted > 0
    for row, prompt in enumerate(rows):
        prompt = prompt[None]
        alone = ours(exact, sizes)
        expected = fed(exact, alone, prompt, torch.ones_like(prompt), tokens[row : row + 1])[:, 0]
        error = (together[:, row] - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert error.max() < 1e-12, f"row {row}: {error}"


def test_beams_when_sparse_equal_their_own_text(model, tokenizer):
    """The winning beam's text, fed token by token without reordering, has the beam's logits."""
    ids, _ = encode(tokenizer, PROMPTS[1:2])
    beams = generate(model, ours(model, SPARSE), ids, num_beams=2, new=10)
    text, cache, fed = beams.sequences, ours(model, SPARSE), ids
    for step, beam in enumerate(beams.beam_indices[0].tolist()):
        with torch.no_grad():
            logits = model(fed, **{cache_argument(model): cache}).logits[0, -1]
        torch.testing.assert_close(beams.logits[step][beam], logits, rtol=0, atol=2e-3)
        fed = text[:, ids.shape[1] + step][:, None]


@pytest.mark.parametrize("sizes", [COVERED, SPARSE], ids=["covered", "sparse"])
def test_prefix_prefilled_once_and_copied(model, tokenizer, sizes):
    prefix, _ = encode(tokenizer, [STORY])
    shared, plain = ours(model, sizes), dense(model)
    for cache in (shared, plain):
        with torch.no_grad():
            model(prefix, **{cache_argument(model): cache})
    for question in QUESTIONS:
        ids = torch.cat([prefix, encode(tokenizer, [question])[0]], 1)
        found = generate(model, copy.deepcopy(shared), ids)
        if sizes is COVERED:
            assert_equal(found, generate(model, copy.deepcopy(plain), ids))
        else:
            assert_close(found, generate(model, ours(model, sizes), ids))
    assert shared.get_seq_length() == prefix.shape[1]


def test_continue_from_the_cache(model, tokenizer):
    ids, _ = encode(tokenizer, [PROMPTS[1]])
    found, plain = ours(model, COVERED), dense(model)
    for question in QUESTIONS:
        first = generate(model, found, ids)
        assert_equal(first, generate(model, plain, ids))
        ids = torch.cat([first.sequences, encode(tokenizer, [question])[0]], 1)


def test_continue_from_the_cache_when_sparse(model, tokenizer):
    """Each turn is dense over everything before, its answer sparse: as an own loop feeds it."""
    ids, _ = encode(tokenizer, [PROMPTS[1]])
    cache, loop = ours(model, SPARSE), ours(model, SPARSE)
    for question in QUESTIONS:
        found = generate(model, cache, ids)
        answer = found.sequences[:, ids.shape[1] :]
        new = ids[:, loop.get_seq_length() :]
        logits = []
        for step in range(answer.shape[1]):
            with torch.no_grad():
                logits.append(model(new, **{cache_argument(model): loop}).logits[:, -1])
            new = answer[:, step : step + 1]
        torch.testing.assert_close(
            torch.stack(found.logits), torch.stack(logits), rtol=0, atol=2e-3
        )
        assert cache.get_seq_length() == loop.get_seq_length()
        ids = torch.cat([found.sequences, encode(tokenizer, [question])[0]], 1)


@pytest.mark.parametrize("mode", ["prompt lookup", "draft model", "early exit"])
def test_assisted(model, tokenizer, mode):
    ids, _ = encode(tokenizer, [STORY + STORY])
    draft = copy.deepcopy(model)
    kwargs = {
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "draft model": {"assistant_model": draft},
        "early exit": {"assistant_early_exit": 20},  # layers
    }[mode]
    found = generate(model, ours(model, COVERED), ids, **kwargs)
    assert_equal(found, generate(model, dense(model), ids, **kwargs))
    cache = ours(model, SPARSE)
    sparse = generate(model, cache, ids, **kwargs)
    assert any(step.decode and step.tokens > 1 for step in cache.stats().steps)
    assert sparse.sequences.shape == found.sequences.shape


def test_streamer(model, tokenizer):
    """The text comes piece by piece, and is the text."""
    ids, _ = encode(tokenizer, PROMPTS[1:2])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    text = generate(model, ours(model, SPARSE), ids, streamer=streamer).sequences
    pieces = list(streamer)
    assert len(pieces) > 4
    assert "".join(pieces) == tokenizer.decode(text[0, ids.shape[1] :])


@pytest.mark.parametrize("chunk", [16, 33])
def test_prefill_in_chunks(model, tokenizer, chunk):
    ids, _ = encode(tokenizer, [PROMPTS[1]])
    kwargs = {"prefill_chunk_size": chunk}
    found = generate(model, ours(model, COVERED), ids, **kwargs)
    assert_equal(found, generate(model, dense(model), ids, **kwargs))
    parts = generate(model, ours(model, SPARSE), ids, **kwargs)
    assert_close(parts, generate(model, ours(model, SPARSE), ids))
