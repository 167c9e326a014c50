"""Conformance 14: the mask forms against implementations that really gather and evict."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from helpers import random_ids, tiny_llama
from method_helpers import build, steps

from eval.methods.gathered import gathered_cache

CASES = [
    ("quest", {"budget": 32, "page": 8}),
    ("quest", {"budget": 32, "page": 8, "last_page": "ranked"}),
    ("quest", {"budget": 48, "dense_layers": 0}),
    ("snapkv", {"budget": 32, "window": 8}),
    ("snapkv", {"budget": 32, "window": 8, "pooling": "avg", "kernel": 5}),
    ("snapkv", {"budget": 32, "window": 8, "group": "mean"}),
    ("tova", {"budget": 32}),
    ("tova", {"budget": 5}),
]


@lru_cache
def gentle(kv_heads, group):
    """The tiny model with a residual stream that does not blow rounding up."""
    model = copy.deepcopy(tiny_llama(layers=3, kv_heads=kv_heads, group=group))
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(0.5)
        layer.mlp.down_proj.weight.data.mul_(0.1)
    return model


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 3), (4, 1), (1, 7)])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_mask_and_gathered_forms_agree_in_fp32(name, options, kv_heads, group):
    model = gentle(kv_heads, group)
    ids = random_ids(2, 130, seed=kv_heads)
    with build(name, **options).session(model) as session:
        masked = steps(model, session.new_cache(), ids, 100)
        gathered = steps(model, gathered_cache(session), ids, 100)
    scale = masked.abs().max()
    assert (masked - gathered).abs().max() / scale < 1e-5
    with torch.no_grad():
        dense = model(ids).logits[:, 99:]
    assert (masked - dense).abs().max() / scale > 1e-2  # it is about something
