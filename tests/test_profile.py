"""HeadProfile: every field is checked, schemas load, stability chooses, lists are imported."""

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlavaConfig

from flexicache_hf.errors import FlexiCacheWarning
from flexicache_hf.profiles.profile import FILE_NAME, SCHEMA, HeadProfile
from flexicache_hf.profiles.published_lists import import_reference_list
from flexicache_hf.profiles.texts import data_dir

STABILITY = ((0.9, 0.1, 0.8), (0.7, 0.6, 0.2))
VOTES = ((0, 5, 0), (0, 1, 4))


def profile(**changes):
    values = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "unstable_heads": ((0, 1), (1, 2)),
        "provenance": {"note": "by hand", "list": [1, 2]},
        "model_id": "someone/small",
        "revision": "abc",
        "model_type": "llama",
        "head_dim": 8,
        "tasks": ("a", "b"),
        "top_k_pages": 4,
        "page_size": 16,
        "window": 16,
        "num_windows": 5,
        "stability": STABILITY,
        "votes": VOTES,
        "task_heads": {"a": ((0, 1), (1, 2)), "b": ((0, 1), (1, 1))},
        "tool_version": "flexicache_hf test",
    }
    return HeadProfile(**{**values, **changes})


def config(name="someone/small", **changes):
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
    }
    result = LlamaConfig(**{**sizes, **changes})
    result._name_or_path = name
    return result


WRONG = {
    "num_layers": [(0, "above 0"), ("2", "above 0"), (True, "above 0")],
    "num_kv_heads": [(-3, "above 0"), (3.0, "above 0")],
    "unstable_heads": [
        (((0, 3),), r"\(layer 0, KV head 3\), expected layers 0..1 and KV heads 0..2"),
        (((2, 0),), r"\(layer 2, KV head 0\)"),
        (((-1, 0),), r"\(layer -1, KV head 0\)"),
        (((1, 2), (0, 1)), "ascending order"),
        (((0, 1), (0, 1)), "each once"),
        (((0, 1.0),), "whole numbers"),
        (((0,),), "pairs"),
        ("all", "pairs"),
    ],
    "provenance": [(["x"], "object"), ({"x": math.nan}, "JSON can hold"), ({"x": {1}}, "JSON")],
    "model_id": [("", "not empty"), (7, "not empty")],
    "revision": [("", "not empty"), (7, "not empty")],
    "model_type": [("", "not empty"), (7, "not empty")],
    "head_dim": [(0, "above 0"), ("64", "above 0")],
    "tasks": [(("a", "a", "b"), "distinct"), ("ab", "list"), (("a", ""), "distinct task names")],
    "top_k_pages": [(0, "above 0"), (4.5, "above 0")],
    "page_size": [(0, "above 0"), (-16, "above 0")],
    "window": [(1, "at least 2"), (16.0, "at least 2")],
    "num_windows": [(0, "above 0"), (-1, "above 0")],
    "stability": [
        (((0.9, 0.1, 0.8),), r"rows of \[3\] values, expected 2 rows of 3 values"),
        (((0.9, 0.1), (0.7, 0.6)), r"rows of \[2, 2\]"),
        (
            ((0.9, 0.1, 1.5), (0.7, 0.6, 0.2)),
            r"stability\[0\]\[2\] is 1.5, expected a number from 0",
        ),
        (((0.9, 0.1, math.nan), (0.7, 0.6, 0.2)), r"stability\[0\]\[2\] is nan"),
        (((0.9, 0.1, "x"), (0.7, 0.6, 0.2)), r"stability\[0\]\[2\] is 'x'"),
        (((0.9, None, 0.8), (0.7, 0.6, 0.2)), "heads with a stability only"),
        (3, "rows"),
        (None, "none without stability"),
    ],
    "votes": [
        (((0, 6, 0), (0, 1, 4)), r"votes\[0\]\[1\] is 6, expected 0 to num_windows"),
        (((0, -1, 0), (0, 1, 4)), r"votes\[0\]\[1\] is -1"),
        (((0, 0.5, 0), (0, 1, 4)), r"votes\[0\]\[1\] is 0.5"),
        (((0, 5, 0),), r"rows of \[3\]"),
    ],
    "task_heads": [
        ({"c": ((0, 1), (1, 2))}, r"tasks \['c'\], expected tasks of profile.tasks"),
        ({"a": ((0, 9), (1, 2))}, r"task_heads\['a'\] is \(layer 0, KV head 9\)"),
        ({"a": ((0, 1),), "b": ((0, 1), (1, 1))}, "sets of one size"),
        ([["a", 1]], "object from task name"),
    ],
    "tool_version": [("", "not empty"), (None, "not empty")],
}


def test_every_field_has_a_wrong_value_below():
    assert set(WRONG) == {item.name for item in fields(HeadProfile)}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(name, value, message) for name, cases in WRONG.items() for value, message in cases],
)
def test_each_wrong_field_is_refused_with_its_own_message(name, value, message):
    with pytest.raises(ValueError, match=message) as refusal:
        profile(**{name: value})
    if not (name == "stability" and (value is None or "only" in message)):  # seen at its partner
        assert f"profile.{name}" in str(refusal.value)
    assert "expected" in str(refusal.value)
    assert "; " in str(refusal.value)  # what to do


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "profile.num_layers is 2, but the model has 3"),
        ({"num_key_value_heads": 1}, "profile.num_kv_heads is 3, but the model has 1"),
        ({"head_dim": 16}, "profile.head_dim is 8, but the model has 16"),
    ],
)
def test_another_shape_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as refusal:
        profile().check(config(**changes))
    assert "someone/small" in str(refusal.value)
    assert "flexicache profile collect" in str(refusal.value)


def test_another_architecture_is_refused_and_another_name_warned_about():
    profile().check(config())
    profile().check(config("mirror/Small"))
    profile().check(config(""))
    with pytest.raises(ValueError, match=r"profile\.model_type is 'mistral', but the model has 'l"):
        profile(model_type="mistral").check(config())
    with pytest.warns(FlexiCacheWarning, match="the model is 'someone/large'"):
        profile().check(config("someone/large"))


def test_a_local_directory_is_not_a_name(tmp_path):
    profile().check(config(str(tmp_path)))


def test_a_multimodal_config_is_read_through_its_text_part():
    whole = LlavaConfig(text_config=config().to_dict())
    made = HeadProfile.from_unstable_heads(whole, [(1, 2)])
    assert (made.num_layers, made.num_kv_heads, made.model_type) == (2, 3, "llama")
    made.check(whole)


def test_from_unstable_heads_sorts_and_keeps_provenance():
    made = HeadProfile.from_unstable_heads(config(), [(1, 2), (0, 1), (1, 2)], source="me")
    assert made.unstable_heads == ((0, 1), (1, 2))
    assert made.provenance == {"source": "me"}
    assert (made.model_id, made.head_dim, made.stability) == ("someone/small", 8, None)
    assert (made.unstable_in(0), made.unstable_in(1)) == ((1,), (2,))
    with pytest.raises(ValueError, match=r"\(layer 5, KV head 0\)"):
        HeadProfile.from_unstable_heads(config(), [(5, 0)])


def test_save_and_load(tmp_path):
    path = profile().save_pretrained(tmp_path / "new" / "place")
    assert path.name == FILE_NAME
    assert HeadProfile.from_pretrained(path) == profile()
    assert HeadProfile.from_pretrained(path.parent) == profile()
    assert HeadProfile.from_pretrained(str(path)) == profile()
    document = json.loads(path.read_text())
    assert document["schema"] == SCHEMA
    assert document["num_unstable"] == 2


def test_schema_1_still_loads(tmp_path):
    path = tmp_path / FILE_NAME
    old = {
        "schema": 1,
        "num_layers": 2,
        "num_kv_heads": 3,
        "unstable_heads": [[0, 1], [1, 2]],
        "provenance": {"source": "old"},
    }
    path.write_text(json.dumps(old))
    loaded = HeadProfile.from_pretrained(tmp_path)
    assert loaded.unstable_heads == ((0, 1), (1, 2))
    assert loaded.provenance == {"source": "old"}
    assert loaded.stability is None
    assert "schema 1" in loaded.tool_version
    loaded.check(config())
    with pytest.raises(ValueError, match="stability is missing"):
        loaded.with_unstable_fraction(0.5)
    assert HeadProfile.from_dict(loaded.to_dict()) == loaded  # saved anew, in today's schema


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, "profile.schema is 3, expected 1 to 2; a newer schema needs a newer"),
        ({"schema": "2"}, "profile.schema is '2'"),
        ({"schema": None}, "profile.schema is None"),
        ({"num_unstable": 3}, "profile.num_unstable is 3, expected 2"),
        ({"colour": "red"}, r"unknown fields \['colour'\]"),
    ],
)
def test_wrong_documents_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        HeadProfile.from_dict({**profile().to_dict(), **change})


def test_files_that_are_no_profile_are_refused(tmp_path):
    path = tmp_path / FILE_NAME
    for text, message in (
        ("[1]", "not a head profile"),
        ('{"a": 1}', "no 'schema' field"),
        (
            '{"schema": 2, "num_layers": 2}',
            r"lacks the fields \['num_kv_heads', 'unstable_heads'\]",
        ),
        ("not json", "head_profile.json"),
        ("", "head_profile.json"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            HeadProfile.from_pretrained(path)


def test_another_fraction_without_measuring_again():
    made = profile()
    # Votes first (5, 4, 1), then stability (0.7, 0.8, 0.9).
    assert made.ranked_heads() == ((0, 1), (1, 2), (1, 1), (1, 0), (0, 2), (0, 0))
    assert made.with_unstable_fraction(1 / 3).unstable_heads == made.unstable_heads
    assert made.with_unstable_fraction(0.5).unstable_heads == ((0, 1), (1, 1), (1, 2))
    assert made.with_unstable_fraction(0.0).unstable_heads == ()
    assert len(made.with_unstable_fraction(1.0).unstable_heads) == 6
    assert made.with_unstable_fraction(0.5).stability == STABILITY
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="from 0 to 1"):
            made.with_unstable_fraction(wrong)


def test_rank_periods_by_hand():
    # Stable heads, least stable first: (1,1) (1,0) (0,2) (0,0).
    assert profile().rank_periods((4, 8, 16, 32)) == ((32, 1, 16), (8, 4, 1))
    assert profile().rank_periods((8, 16)) == ((16, 1, 16), (8, 8, 1))
    for wrong in ((), (8, 4), (0, 4)):
        with pytest.raises(ValueError, match="ascending positive"):
            profile().rank_periods(wrong)


def test_heads_that_were_not_measured_stay_out():
    made = profile(
        stability=((None, None, None), (0.7, 0.6, 0.2)),
        votes=((None, None, None), (0, 1, 5)),
        unstable_heads=((1, 2),),
        task_heads={},
    )
    assert made.num_heads == 3
    assert made.ranked_heads() == ((1, 2), (1, 1), (1, 0))
    assert made.with_unstable_fraction(2 / 3).unstable_heads == ((1, 1), (1, 2))
    assert made.rank_periods((4, 8)) == ((1, 1, 1), (8, 4, 1))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fractions_are_nested_and_periods_follow_stability(data):
    layers, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    rows = st.lists(st.floats(0, 1), min_size=heads, max_size=heads).map(tuple)
    stability = tuple(data.draw(st.lists(rows, min_size=layers, max_size=layers)))
    made = HeadProfile(layers, heads, (), stability=stability)
    low, high = sorted(data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    few, many = made.with_unstable_fraction(low), made.with_unstable_fraction(high)
    assert set(few.unstable_heads) <= set(many.unstable_heads)
    assert len(few.unstable_heads) == round(low * layers * heads)
    assert HeadProfile.from_dict(json.loads(few.to_json())) == few
    periods = few.rank_periods()
    for layer in range(layers):
        for head in range(heads):
            assert (periods[layer][head] == 1) == ((layer, head) in few.unstable_heads)
    stable = [(stability[i][j], periods[i][j]) for i in range(layers) for j in range(heads)]
    stable = [pair for pair in stable if pair[1] > 1]
    for score, period in stable:
        assert all(other <= period for value, other in stable if value < score)


def llama_8b(**changes):
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaConfig(**{**sizes, "hidden_size": 4096, **changes})


def published(tmp_path, name="unstable-2-profile-gov_report-topk-64"):
    path = tmp_path / "lists.json"
    path.write_text(json.dumps({"org/Model": {name: [[3, 1], [0, 2]]}}))
    return path


def test_import_of_a_published_list(tmp_path):
    made = import_reference_list(
        published(tmp_path), llama_8b(), model_id="org/Model", task="gov_report", top_k_pages=64
    )
    assert made.unstable_heads == ((0, 2), (3, 1))
    assert (made.model_id, made.tasks, made.top_k_pages) == ("org/Model", ("gov_report",), 64)
    assert (made.page_size, made.window, made.head_dim) == (16, 16, 128)
    assert made.task_heads == {"gov_report": ((0, 2), (3, 1))}


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [
        ({"model_id": "org/Other"}, None, r"no model 'org/Other'; it has \['org/Model'\]"),
        ({"task": "legal"}, None, r"no list for task 'legal' and K = 64; it has"),
        ({"top_k_pages": 128}, None, "no list for task 'gov_report' and K = 128"),
        ({}, "unstable-3-profile-gov_report-topk-64", "says 3 heads, but holds 2"),
    ],
)
def test_import_refuses_what_is_not_there(tmp_path, arguments, name, message):
    path = published(tmp_path, name) if name else published(tmp_path)
    wanted = {"model_id": "org/Model", "task": "gov_report", "top_k_pages": 64, **arguments}
    with pytest.raises(ValueError, match=message):
        import_reference_list(path, llama_8b(), **wanted)


@pytest.mark.skipif(
    data_dir() is None or not (data_dir() / "flexicache_reference_heads.json").is_file(),
    reason="the authors' lists are not at $FLEXICACHE_DATA or ../shared/data",
)
def test_the_authors_own_lists_give_their_own_overlap():
    path = data_dir() / "flexicache_reference_heads.json"
    name = "meta-llama/Llama-3.1-8B-Instruct"
    load = {
        (task, top_k): import_reference_list(
            path, llama_8b(), model_id=name, task=task, top_k_pages=top_k
        )
        for task, top_k in (("gov_report", 64), ("gov_report", 128), ("paper_assistant", 64))
    }
    assert all(len(made.unstable_heads) == 64 for made in load.values())
    first, second = (set(load["gov_report", top_k].unstable_heads) for top_k in (64, 128))
    assert first - second == {(14, 3), (22, 2), (25, 3)}
    assert second - first == {(6, 5), (7, 5), (13, 6)}


def test_replace_is_checked_too():
    with pytest.raises(ValueError, match=r"profile\.page_size is 0"):
        replace(profile(), page_size=0)
