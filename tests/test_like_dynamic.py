"""What code asks of a cache besides generating: its answers are DynamicCache's."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES, build, tiered_heads
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
from mirror import DenseTwin
from transformers import DynamicCache

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache

PROPERTIES = [
    "is_initialized",
    "is_compileable",
    "is_sliding",
    "is_linear",
    "is_dummy",
    "is_croppable",
    "__len__",
    "get_seq_length",
    "get_max_length",
]


def answers(cache) -> dict[str, object]:
    found = {}
    for name in PROPERTIES:
        if hasattr(DynamicCache, name):  # some versions have less
            answer = getattr(cache, name)
            found[name] = answer() if callable(answer) else answer
    for layer in range(len(cache)):
        try:
            found[f"mask sizes {layer}"] = cache.get_mask_sizes(3, layer)
        except (AttributeError, ValueError) as error:  # of layers without keys
            found[f"mask sizes {layer}"] = type(error)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_its_answers(family):
    model = copy.deepcopy(build(family))
    cache = flexicache(model, *tiered_heads(model)[::2], token_budget=32)
    dense = DenseTwin(model.config)
    changes = [
        lambda each: None,
        lambda each: forward(model, each, random_ids(2, 61)),
        lambda each: decode(model, each, random_ids(2, 1), 2),
        lambda each: each.batch_select_indices(torch.tensor([1])),
        lambda each: each.reset(),
    ]
    for change in changes:
        change(cache), change(dense)
        assert answers(cache) == answers(dense)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_everything_it_holds_becomes_a_dense_cache(family):
    """Its layers, in turn, as DynamicCache takes them; nothing was dropped."""
    model, tokens = copy.deepcopy(build(family)), random_ids(2, 30, seed=2)
    sizes = {"token_budget": 16, "page_size": 4}
    cache, dense = flexicache(model, *tiered_heads(model)[::2], **sizes), DenseTwin(model.config)
    for each in (cache, dense):
        forward(model, each, random_ids(2, 61))
    for (keys, values, window), other in zip(cache, dense, strict=True):
        assert torch.equal(keys, other[0])
        assert torch.equal(values, other[1])
        assert window is other[2] is None or torch.equal(window, other[2])
    if family != "llama":
        return  # DynamicCache's sliding layers lose count of what they no longer hold
    decode(model, cache, tokens[:, :1], 20, None, tokens[:, 1:])
    copied = DynamicCache(ddp_cache_data=cache, config=model.config)
    assert copied.get_seq_length() == cache.get_seq_length() == 82
    turn = random_ids(2, 5, seed=3)  # dense for both
    assert torch.equal(forward(model, cache, turn), forward(model, copied, turn))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_caches_of_the_model_go_on_as_before(family, kind):
    """A cache of ours changes the name of the model's attention, and nothing for others."""
    model, ids = copy.deepcopy(build(family)), random_ids(2, 40)
    options = {"cache_implementation": kind, "disable_compile": True}
    try:
        expected = generate(model, None, ids, 6, **options).logits
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        pytest.skip(f"transformers has no such cache for it: {error}")
    flexicache(model, *tiered_heads(model)[::2])
    assert model.config._attn_implementation.startswith("flexicache")
    tolerance = 1e-5 if family == "gemma4" else 0  # computes fewer of a prompt's queries
    for found, before in zip(generate(model, None, ids, 6, **options).logits, expected):
        torch.testing.assert_close(found, before, rtol=0, atol=tolerance)


def test_keys_cannot_be_set_from_outside():
    """They lie in two tiers; what is shown is a shape."""
    model = copy.deepcopy(tiny_llama())
    cache = flexicache(model, (0, 0), token_budget=16, page_size=4)
    assert cache.layers[0].keys is cache.layers[0].values is None
    expected = forward(model, copy.deepcopy(cache), random_ids(1, 30))
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match=f"{name} of a tiered layer cannot be set"):
            setattr(cache.layers[0], name, torch.zeros(1, 2, 3, 16))
    assert torch.equal(forward(model, cache, random_ids(1, 30)), expected)
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (1, 2, 30, 16)


def test_attention_weights():
    """Sparse steps have none: they would be of other tokens in every head."""
    model = copy.deepcopy(tiny_llama())
    model.set_attn_implementation("eager")
    ids, kwargs = random_ids(1, 60), {"output_attentions": True}
    expected = generate(model, DynamicCache(config=model.config), ids, 4, **kwargs).attentions
    found = generate(model, flexicache(model, (0, 0), token_budget=256), ids, 4, **kwargs)
    for step, other in zip(found.attentions, expected, strict=True):
        assert all(map(torch.equal, step, other))
    sparse = flexicache(model, (0, 0), token_budget=16, page_size=4)
    prompt, *steps = generate(model, sparse, ids, 4, **kwargs).attentions
    assert all(map(torch.equal, prompt, expected[0]))
    assert not any(weights is not None for step in steps for weights in step)


def gradients(model, cache, embeddings, parts) -> list[torch.Tensor]:
    """Of the sum of the logits of every part's forward, with respect to the embeddings."""
    found = []
    for part in parts:
        new = embeddings[:, part].detach().requires_grad_()
        model(inputs_embeds=new, **{cache_argument(model): cache}).logits.sum().backward()
        found.append(new.grad)
    return found


def test_gradients_of_a_prompt_flow():
    model = copy.deepcopy(tiny_llama())
    embeddings = model.get_input_embeddings()(random_ids(1, 40))
    cache = flexicache(model, (0, 0), token_budget=16, page_size=4)
    for each in (model.eval(), model.train()):
        (found,) = gradients(each, cache, embeddings, [slice(None)])
        (expected,) = gradients(each, DynamicCache(config=model.config), embeddings, [slice(None)])
        assert torch.equal(found, expected)
        cache.reset()


def test_training_through_what_is_cached_is_refused():
    """There is no gradient into it; without one, or to evaluate, the same forward is fine."""
    model = copy.deepcopy(tiny_llama()).train()
    embeddings = model.get_input_embeddings()(random_ids(1, 40))
    cache = FlexiCacheDynamicCache(model, "auto", token_budget=256)
    with pytest.raises(ValueError, match="training mode"):
        gradients(model, cache, embeddings, [slice(0, 30), slice(30, 40)])
    assert cache.get_seq_length() == 30
    gradients(model.eval(), cache, embeddings, [slice(30, 40)])
    copy.deepcopy(cache)
    forward(model.train(), cache, random_ids(1, 1))
    assert cache.get_seq_length() == 41


@pytest.mark.parametrize("profile", ["auto", "measured"])
def test_a_loop_with_gradients_on_is_the_same_and_keeps_no_graph(profile):
    model = copy.deepcopy(tiny_llama())
    config = FlexiCacheConfig(token_budget=32, page_size=4, rerank_interval=4, auto_windows=2)
    chosen = "auto" if profile == "auto" else profile_of(model, (0, 0))
    found = []
    for on in (False, True):
        cache, logits = FlexiCacheDynamicCache(model, chosen, config=config), []
        with torch.set_grad_enabled(on):
            new = random_ids(2, 60)
            for _ in range(60):
                out = model(new, **{cache_argument(model): cache}).logits[:, -1]
                new = out.argmax(-1)[:, None]
                logits.append(out.detach())
        del out
        found.append(torch.stack(logits))
        stores = [store for layer in cache.layers for store in (layer.stable, layer.unstable)]
        held = [t for store in stores if store is not None for t in vars(store).values()]
        held += [t for layer in cache.layers for t in vars(layer.stable.working_set).values()]
        assert not any(t.requires_grad for t in held if torch.is_tensor(t))
        copy.deepcopy(cache)
    assert cache.stats().total.promoted > 0
    assert torch.equal(*found)
