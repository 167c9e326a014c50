"""What a prompt keeps, against kvpress (NVIDIA's library) where it can be imported.

kvpress 0.5.5 pins transformers below 5.3, and its hooks read arguments that attention modules are
no longer given, so only its scores are used: they are plain functions of a layer's hidden states
and keys. To have it next to this project's versions:

    pip install --no-deps kvpress==0.5.5 "cachetools<6" "fire<0.7" "peft>=0.20" termcolor
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from helpers import random_ids
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eval.methods import build, record

CAPACITY = 96


@pytest.fixture(scope="module")
def kvpress():
    """The library; importing it wraps transformers' attention functions, which is undone."""
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    library = pytest.importorskip(
        "kvpress", reason="kvpress is not installed (see this file for how)", exc_type=ImportError
    )
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    return library


@lru_cache
def model_and_prompt(name: str) -> tuple[Any, Any]:
    if name == "tiny":
        from helpers import tiny_llama

        return tiny_llama(layers=3, kv_heads=2, group=3), random_ids(1, 300)
    from flexicache_hf.models.embedded import load_model

    model, tokenizer = load_model()
    text = " ".join(
        f"Gate {n} opens at {n % 12} and was last painted in {1900 + n}." for n in range(30)
    )
    return model, torch.tensor([tokenizer(text).input_ids[:400]])


@lru_cache
@torch.no_grad()
def layers_of(name: str) -> list[tuple[Any, Any, dict[str, Any]]]:
    """For every layer: its attention module, our view of the prompt, what the module was given."""
    model, ids = model_and_prompt(name)
    given: dict[int, dict[str, Any]] = {}

    def keep(module, args, kwargs):
        given[module.layer_idx] = kwargs

    modules = [layer.self_attn for layer in model.model.layers]
    handles = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in modules]
    cache, _ = record(model, ids)
    for handle in handles:
        handle.remove()
    return [(m, cache.layers[m.layer_idx].states[0], given[m.layer_idx]) for m in modules]


def kept_by(press, module, prompt, given, attentions=None):
    """Scores `[H_kv, T]` and the best CAPACITY positions, bool `[H_kv, T]`."""
    keys, values = prompt.keys[None], prompt.values[None]
    scores = press.score(module, given["hidden_states"], keys, values, attentions, given)[0]
    best = scores.topk(CAPACITY, -1).indices
    return scores, torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def begun(name, prompt, model, budget=CAPACITY, **options):
    return build(name, budget, **options).selector(model).begin(prompt)


MODELS = pytest.mark.parametrize("name", ["tiny", "smollm2"])


@MODELS
@torch.no_grad()
def test_snapkv_keeps_the_same_tokens(kvpress, name):
    """With kvpress's choices: mean over the group, average pooling, kernel 5."""
    model, _ = model_and_prompt(name)
    options = {"window": 32, "kernel": 5, "pooling": "avg", "group": "mean"}
    for module, prompt, given in layers_of(name):
        press = kvpress.SnapKVPress(window_size=32, kernel_size=5)
        _, theirs = kept_by(press, module, prompt, given)
        ours = begun("snapkv", prompt, model, **options)
        # Rounding may swap tokens of equal score at the border.
        assert (ours ^ theirs).sum() <= 2, module.layer_idx


@MODELS
@torch.no_grad()
def test_tova_keeps_the_same_tokens_but_the_last(kvpress, name):
    """kvpress always keeps the last token; the authors' code, and ours, let it compete."""
    model, _ = model_and_prompt(name)
    for module, prompt, given in layers_of(name):
        _, theirs = kept_by(kvpress.TOVAPress(), module, prompt, given)
        ours = begun("tova", prompt, model).mask
        differ = (ours ^ theirs[0]).nonzero()[:, 0]
        assert torch.equal(theirs, theirs[:1].expand_as(theirs))
        if ours[-1]:
            assert len(differ) <= 2, module.layer_idx  # rounding at the border
        else:
            assert len(differ) <= 4 and prompt.length - 1 in differ, module.layer_idx


@MODELS
@torch.no_grad()
def test_streamingllm_keeps_the_same_tokens(kvpress, name):
    """kvpress counts the prompt alone, we count the current token too: a budget one larger."""
    from eval.methods.streamingllm import sink_and_recent

    for module, prompt, given in layers_of(name):
        ratio = 1 - (CAPACITY + 0.5) / prompt.length
        _, theirs = kept_by(kvpress.StreamingLLMPress(ratio), module, prompt, given)
        method = build("streamingllm", CAPACITY + 1)
        window = sink_and_recent(prompt.length + 1, method.sink, method.budget - method.sink)
        assert torch.equal(theirs, window[:-1].expand_as(theirs)), module.layer_idx


@MODELS
@torch.no_grad()
def test_observed_attention_is_h2os_sum_over_the_queries_that_see_a_token(kvpress, name):
    """Not H2O: without the division early tokens, which more queries see, are favoured, and H2O
    keeps half of the budget for recent ones. The sums before that are the same."""
    for module, prompt, given in layers_of(name):
        weights = prompt.weights(0)[None]
        press = kvpress.ObservedAttentionPress()
        theirs, _ = kept_by(press, module, prompt, given, weights)
        visible = torch.arange(prompt.length, 0, -1)
        ours = prompt.received / prompt.groups / visible
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
