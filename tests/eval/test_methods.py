"""What every method promises, on tiny random models."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from helpers import left_padding, positions, random_ids
from method_helpers import (
    MASKED,
    SPARSE,
    assert_same,
    dense_logits,
    feed,
    make,
    model_of,
    run,
    small,
    steps,
)
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from eval.methods import METHODS, build, names, record

COVERING = {
    "infinigen": {"alpha": 1e9},  # alpha decides below the cap
    "infllm": {"local": 96},  # a window of less moves what has left it to other positions
    "shadowkv": {"rank": 32},  # the full rank, else chosen keys are approximate
}
DENSE_PROMPT = {"infllm": {"sparse_prefill": False}}  # others have one already


@pytest.mark.parametrize("name", names())
def test_a_budget_of_everything_is_dense(name):
    model, ids = model_of(), random_ids(1, 90)
    logits, tokens = run(model, make(name, 128, model, **COVERING.get(name, {})), ids, 60)
    assert_same(logits, dense_logits(model, ids, 60))
    assert tokens.attended == tokens.length == tuple(range(61, 91))


@pytest.mark.parametrize("name", SPARSE)
def test_a_small_budget_changes_the_output_and_repeats_itself(name):
    model, ids = model_of(), random_ids(1, 120)
    method = small(name, 32, model)
    first, tokens = run(model, method, ids, 90)
    again, _ = run(model, method, ids, 90)
    assert torch.equal(first, again)
    assert (first - dense_logits(model, ids, 90)).abs().max() > 0.1
    assert all(attended < length for attended, length in zip(tokens.attended, tokens.length))


@pytest.mark.parametrize("name", MASKED)
def test_a_forward_of_several_tokens_is_as_many_steps(name):
    model, ids = model_of(), random_ids(1, 120)
    with small(name, 32, model).session(model) as session:
        one = session.new_cache()
        single = steps(model, one, ids, 90)[:, 1:]
        several = session.new_cache()
        feed(model, several, ids[:, :90])
        at_once = torch.cat([feed(model, several, part) for part in ids[:, 90:].split(13, 1)], 1)
        assert_same(at_once, single)
        assert session.tokens(one) == session.tokens(several)


@pytest.mark.parametrize("name", names())
def test_left_padded_rows_equal_their_solo_run(name):
    """Conformance 13: pads never enter pages, ranks, counts or attention."""
    model, lengths = model_of(), (100, 83, 60)
    rows = [random_ids(1, 20 + n, seed=n) for n in lengths]
    padded = torch.cat([torch.nn.functional.pad(r, (120 - r.shape[1], 0)) for r in rows])
    mask = left_padding(120, *(100 - n for n in lengths))
    method = small(name, 32, model)
    together, _ = run(model, method, padded, 100, mask)
    for row, (ids, length) in enumerate(zip(rows, lengths)):
        alone, _ = run(model, method, ids, length)
        assert_same(together[row], alone[0])


@pytest.mark.parametrize("name", MASKED)
def test_a_recorded_prompt_stands_in_for_the_prompt(name):
    model, ids = model_of(), random_ids(2, 110)
    mask = left_padding(110, 0, 13)
    method = small(name, 32, model, **DENSE_PROMPT.get(name, {}))
    own, tokens = run(model, method, ids, 90, mask)
    given = {"attention_mask": mask[:, :90], "position_ids": positions(mask[:, :90])}
    prompt, logits = record(model, ids[:, :90], **given)
    with method.session(model) as session:
        assert method.replays
        cache = session.new_cache(prompt)
        parts = [
            feed(model, cache, ids[:, at : at + 1], mask[:, : at + 1]) for at in range(90, 110)
        ]
        assert_same(logits, own[:, 0])
        assert_same(torch.cat(parts, 1), own[:, 1:])
        assert session.tokens() == tokens


@pytest.mark.parametrize("name", MASKED)
def test_a_copied_cache_is_a_branch(name):
    """One document, two questions: neither sees the other."""
    model, ids, other = model_of(), random_ids(1, 110), random_ids(1, 20, seed=5)
    method = small(name, 32, model)
    branch = torch.cat([ids[:, :90], other], 1)
    with method.session(model) as session:
        document = session.new_cache()
        feed(model, document, ids[:, :90])
        copied = copy.deepcopy(document)
        found = [
            torch.cat([feed(model, cache, text[:, at : at + 1]) for at in range(90, 110)], 1)
            for cache, text in ((copied, branch), (document, ids))
        ]
        tokens = session.tokens(copied)
    for logits, text in zip(found, (branch, ids)):
        torch.testing.assert_close(logits, run(model, method, text, 90)[0][:, 1:])
    assert tokens == run(model, method, branch, 90)[1]


def test_every_method_says_what_it_is():
    for name, cls in METHODS.items():
        assert cls.name == name
        assert cls.paper.startswith("https://arxiv.org/abs/")
        assert cls.gqa and cls.accounting
        method = build(name, 512)
        assert method.label
        assert dataclasses.is_dataclass(method)
        json.dumps(dataclasses.asdict(method))  # goes into result files
        with pytest.raises(dataclasses.FrozenInstanceError):
            method.budget = 1
    labels = [build(name, 512).label for name in names()]
    assert len(set(labels)) == len(labels)


def test_every_method_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    for name, cls in METHODS.items():
        assert f"`{name}`" in text
        assert cls.paper.rsplit("/", 1)[1] in text or name == "dense"


def test_options_are_converted_and_checked():
    assert build("quest", 64, dense_layers="0").dense_layers == 0
    assert build("lserve", 512, sparse_prefill="true", sink="none").sparse_prefill is True
    assert build("infinigen", 64, alpha="4.5").alpha == 4.5
    assert build("h2o", 64, heavy="16").recent == 48
    assert build("flexicache-mask", 64, stagger="false").config.stagger is False
    for name, options, message in (
        ("nothing", {}, "there is no method 'nothing'; known are dense, "),
        ("quest", {"pages": 4}, "quest has no option 'pages'; it takes page, "),
        ("quest", {"page": "x"}, "page is 'x', expected a number"),
        ("lserve", {"sparse_prefill": "maybe"}, "expected true or false"),
        ("quest", {"page": 24}, "budget is 64 tokens, expected a multiple of the page size 24"),
        ("quest", {"last_page": "free"}, "last_page is 'free', expected 'forced' or 'ranked'"),
        ("snapkv", {"window": 64}, "window is 64, expected 1 to 63"),
        ("infllm", {"local": 50}, r"leave -2, expected a positive multiple of block \(16\)"),
        ("infllm", {"representatives": 17}, "representatives is 17, expected 1 to 16"),
        ("streamingllm", {"sink": 64}, "sink is 64, expected fewer than the budget of 64"),
        ("flexicache-mask", {"digest": "box"}, "digest is 'box', expected one of minmax"),
        ("flexicache-mask", {"unstable": "some"}, "unstable is 'some', expected one of"),
        ("streaming-pages", {"sink_pages": 4}, "sink_pages is 4, expected fewer than the 4 pages"),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, 64, **options)
    with pytest.raises(ValueError, match="budget is 0, expected at least 1 token"):
        build("tova", 0)


@pytest.mark.parametrize("name", names())
def test_the_session_gives_the_model_back(name):
    model = model_of()
    method = small(name, 32, model)
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    session = method.session(model)
    with pytest.raises(KeyError, match="mine"), session:
        raise KeyError("mine")
    assert model.config._attn_implementation == "sdpa"
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    with pytest.raises(RuntimeError, match="use it inside `with session`"):
        session.new_cache()


def test_a_session_that_cannot_start_leaves_no_trace():
    model = model_of()
    with (
        pytest.raises(ValueError, match="there is no file"),
        build("duoattention", 64, gates="nowhere.tsv").session(model),
    ):
        pass
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "flex_attention"
    try:
        with (
            pytest.raises(ValueError, match="implementation is 'flex_attention'"),
            build("quest", 64).session(model),
        ):
            pass
        assert model.config._attn_implementation == "flex_attention"
    finally:
        model.config._attn_implementation = "sdpa"


def test_a_cache_outside_its_session_is_refused():
    model, ids = model_of(), random_ids(1, 40)
    with build("tova", 32).session(model) as session:
        cache = session.new_cache()
        feed(model, cache, ids[:, :30])
        with pytest.raises(NotImplementedError, match=r"copy\.deepcopy"):
            cache.crop(-1)
    feed(model, cache, ids[:, 30:31])  # the model's own attention, not noticed yet
    with pytest.raises(RuntimeError, match="never attended by the method"):
        feed(model, cache, ids[:, 31:32])


def test_right_padding_is_refused():
    model, ids = model_of(), random_ids(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 25:] = 0
    with (
        build("tova", 32).session(model) as session,
        pytest.raises(ValueError, match="padding_side = 'left'"),
    ):
        feed(model, session.new_cache(), ids, mask)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_soft_caps_sinks_and_sliding_layers_are_kept(family):
    """Models whose attention is more than a softmax: under `dense` nothing may change."""
    shape = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 32,
        "initializer_range": 0.3,
    }
    if family == "gemma2":
        model = Gemma2ForCausalLM(
            Gemma2Config(**shape, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
        )
    else:
        config = GptOssConfig(**shape, num_local_experts=2, num_experts_per_tok=1)
        model = GptOssForCausalLM(config)
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    model = model.eval()
    model.set_attn_implementation("eager")
    ids = random_ids(1, 80)
    logits, tokens = run(model, build("dense", 16), ids, 60)
    torch.testing.assert_close(logits, dense_logits(model, ids, 60), atol=1e-4, rtol=1e-4)
    assert tokens.length[-1] == 80
    sparse, _ = run(model, small("quest", 24, model, dense_layers=0), ids, 60)
    assert (sparse - logits).abs().max() > 1e-3
