"""InfiniGen: skewing, speculation from the layer below, and the shared count."""

from __future__ import annotations

import pytest
import torch
from helpers import random_ids
from method_helpers import Spy, assert_same, build, dense_logits, feed, model_of, run, spied
from transformers import Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from eval.methods.infinigen import partial_columns, skewing
from eval.methods.rope import Rope


def test_skewing_is_orthogonal_and_sorts_by_energy():
    """Conformance 10: (QA)(KA)^T = QK^T."""
    torch.manual_seed(0)
    queries = torch.randn(3, 200, 16) @ torch.randn(16, 16)
    skew = skewing(queries)
    identity = torch.eye(16).expand(3, -1, -1)
    assert (skew @ skew.transpose(1, 2) - identity).abs().max() < 1e-4
    energy = (queries @ skew).square().sum(1)
    assert (energy.diff(dim=-1) <= 1e-2).all()
    singular = torch.linalg.svdvals(queries).square()
    torch.testing.assert_close(energy, singular, rtol=1e-3, atol=1e-2)


def test_partial_columns_follow_queries_and_keys():
    skew = torch.eye(4)[None]
    query, keys = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 4)
    query[0, :, 0, 2] = torch.tensor([-6.0, 0.0])  # mean over the group: 3
    keys[0, 1, 1] = -5
    assert partial_columns(query, keys, skew, 0.25).tolist() == [[1]]
    assert sorted(partial_columns(query, keys, skew, 0.5)[0].tolist()) == [1, 2]


class Speculation(Spy):
    """Also keeps the guessed scores and what they should be."""

    def __init__(self, inner, layer, rope):
        super().__init__(inner)
        self.layer, self.rope, self.found = layer, rope, []

    def select(self, step, state):
        if step.layer == self.layer:
            guessed = self.inner.speculate(step, state)
            hidden = self.inner.inputs[self.layer - 1][0][0, -1]
            query = step.module.q_proj(hidden).view(-1, 1, step.query.shape[-1])
            query = self.rope.shift(query, step.length - 1)
            true = step.per_group(query[:, 0]) @ step.keys.transpose(1, 2) * step.scaling
            self.found.append((guessed, true))
        return super().select(step, state)


def test_with_all_columns_the_guess_is_the_lower_layers_query():
    """Conformance 10: skewing and its columns lose nothing at ratio 1."""
    model, ids = model_of(), random_ids(1, 70)
    with build("infinigen", 20, ratio=1.0).session(model) as session:
        spy = session._selector = Speculation(session._selector, 2, Rope(model))
        cache = session.new_cache()
        feed(model, cache, ids[:, :60])
        for at in range(60, 70):
            feed(model, cache, ids[:, at : at + 1])
    assert len(spy.found) == 10
    for guessed, true in spy.found:
        assert_same(guessed, true)


def test_no_threshold_and_no_cap_is_dense():
    model, ids = model_of(), random_ids(1, 70)
    logits, tokens = run(model, build("infinigen", 1000, alpha=1e9), ids, 60)
    assert_same(logits, dense_logits(model, ids, 60))
    assert tokens.attended == tokens.length


@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("alpha", [0.5, 3.0])
def test_all_heads_of_a_layer_take_the_same_count(alpha, per_query_head):
    model, budget = model_of(), 24
    method = build("infinigen", budget, alpha=alpha, per_query_head=per_query_head)
    spy = spied(model, method, random_ids(1, 90), 60)
    counts = set()
    for layer in range(4):
        for mask in spy.masks[layer]:
            assert len(mask) == (6 if per_query_head and layer > 1 else 2)
            if layer < 2:
                assert mask.all()
                continue
            (count,) = set(mask.sum(-1).tolist())
            assert count <= budget
            assert mask[:, -1].all()
            counts.add(count)
    assert len(counts) > 1  # alpha decides, not the cap alone


def test_norms_of_the_query_are_part_of_the_guess():
    """Qwen3 normalises queries between projection and RoPE."""
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config).double().eval()
    # Layers that hardly change the residual stream: the layer below then guesses its upper
    # neighbour's scores up to the input norm, provided q_norm is applied.
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(1e-6)
        layer.mlp.down_proj.weight.data.mul_(1e-6)
        torch.nn.init.uniform_(layer.self_attn.q_norm.weight, 0.5, 2.0)
    ids, found = random_ids(1, 41), []
    with build("infinigen", 20, ratio=1.0).session(model) as session:

        class Compare(Spy):
            def select(self, step, state):
                if step.layer >= 2:
                    found.append((self.inner.speculate(step, state).flatten(0, 1), step.logits))
                return super().select(step, state)

        session._selector = Compare(session._selector)
        cache = session.new_cache()
        feed(model, cache, ids[:, :40])
        feed(model, cache, ids[:, 40:])
    assert len(found) == 2
    for guessed, true in found:
        torch.testing.assert_close(guessed, true, atol=1e-3, rtol=1e-3)


def test_a_model_without_q_proj_is_refused():
    config = Phi3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = Phi3ForCausalLM(config)
    with (
        pytest.raises(ValueError, match="has no separate q_proj"),
        build("infinigen", 20).session(model),
    ):
        pass
    assert not any(m._forward_pre_hooks for m in model.modules())
