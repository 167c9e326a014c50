"""Methods run on a model that a FlexiCache was made for, and leave it as it was."""

from __future__ import annotations

import copy

import torch
from helpers import flexicache, forward, random_ids, tiny_llama

from eval.methods import build


def test_a_model_that_had_a_flexicache_can_be_evaluated():
    model = copy.deepcopy(tiny_llama())
    ids = random_ids(1, 40)
    cache = flexicache(model, token_budget=32)
    expected = forward(model, cache, ids)
    with build("dense", 32).session(model) as session:
        assert torch.equal(forward(model, session.new_cache(), ids), expected)
    assert model.config._attn_implementation == "flexicache"
    forward(model, cache, ids[:, :1])
