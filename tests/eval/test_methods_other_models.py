"""Models whose layers differ in their KV heads, or share them."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from families import FAMILIES
from families import build as build_family
from helpers import random_ids
from method_helpers import dense_logits, run, small

from eval.methods import build
from eval.methods.unstable import choose_unstable
from eval.models import identity


@pytest.fixture(scope="module")
def gemma4():
    """Sliding layers of two KV heads and full-attention layers of one, none shared."""
    kind, config = FAMILIES["gemma4"]
    settings = config().to_dict() | {"num_kv_shared_layers": 0}
    torch.manual_seed(0)
    return getattr(transformers, kind)(type(config())(**settings)).eval()


def test_layers_of_different_heads_are_dense_under_dense(gemma4):
    ids = random_ids(1, 80)
    logits, tokens = run(gemma4, build("dense", 16), ids, 60)
    torch.testing.assert_close(logits, dense_logits(gemma4, ids, 60), atol=1e-4, rtol=1e-4)
    assert tokens.attended == tuple(range(61, 81))


@pytest.mark.parametrize("unstable", ["none", "all", "random", "rule"])
def test_mask_form_and_cache_agree_where_layers_differ(gemma4, unstable):
    ids, found = random_ids(1, 110), []
    for name in ("flexicache", "flexicache-mask"):
        method = small(name, 32, gemma4, unstable=unstable)
        found.append(run(gemma4, method, ids, 90))
    (logits, tokens), (masked, counted) = found
    torch.testing.assert_close(logits, masked, atol=1e-4, rtol=1e-4)
    assert (logits - dense_logits(gemma4, ids, 90)).abs().max() > 1e-3
    for column in ("attended", "resident", "moved", "length"):
        assert getattr(tokens, column) == pytest.approx(getattr(counted, column)), column


@pytest.mark.parametrize("name", ["oracle", "quest", "snapkv", "h2o", "tova"])
def test_methods_run_where_layers_differ(gemma4, name):
    ids = random_ids(1, 110)
    logits, tokens = run(gemma4, small(name, 24, gemma4), ids, 90)
    assert (logits - dense_logits(gemma4, ids, 90)).abs().max() > 1e-3
    assert all(attended < length for attended, length in zip(tokens.attended, tokens.length))


def test_every_head_exists(gemma4):
    heads = [2, 1] * 3
    chosen = choose_unstable(gemma4, "all", None).unstable_heads
    assert chosen == tuple((layer, head) for layer in range(6) for head in range(heads[layer]))
    for choice in ("random", "rule"):
        pairs = choose_unstable(gemma4, choice, None, fraction=0.9).unstable_heads
        assert pairs and set(pairs) <= set(chosen)


def test_its_identity_goes_into_results(gemma4):
    found = identity(gemma4)
    assert found["kv_heads"] == 2  # the most of any layer
    json.dumps(found)


@pytest.mark.parametrize("name", ["lserve", "duoattention"])
def test_gates_are_refused_where_layers_differ(gemma4, name):
    method = build(name, 512, gates="gates.tsv")
    with pytest.raises(ValueError, match="differ in their KV heads"), method.session(gemma4):
        pass


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_shared_keys_are_refused_in_mask_form(family):
    model, ids = build_family(family), random_ids(1, 80)
    with (
        pytest.raises(ValueError, match=r"the last 2 layers .* read the keys of earlier layers"),
        build("quest", 64).session(model),
    ):
        pass
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    method = build("flexicache", 128, unstable="random")
    logits, _ = run(model, method, ids, 60)
    torch.testing.assert_close(logits, dense_logits(model, ids, 60), atol=1e-3, rtol=1e-3)
