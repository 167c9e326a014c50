"""From records to a profile: planted unstable heads are found, and mixed records are refused."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from flexicache_hf import HeadProfile
from flexicache_hf.profiles.analysis import analyse, load_records
from flexicache_hf.profiles.records import CollectSettings, Record, save_record
from flexicache_hf.profiles.stability import StabilityVote

LAYERS, HEADS, TOP_K, STEPS, PAGES = 4, 4, 6, 64, 40
PLANTED = ((0, 3), (1, 1), (2, 0), (2, 2))
SETTINGS = CollectSettings(top_k=TOP_K, page_sizes=(16,), steps=STEPS)
INFO = {
    "model_id": "someone/planted",
    "revision": None,
    "model_type": "llama",
    "num_layers": LAYERS,
    "num_kv_heads": HEADS,
    "head_dim": 8,
    "prompt_tokens": 600,
    "settings": {"top_k": TOP_K, "page_sizes": [16], "steps": STEPS, "max_prompt_tokens": 4096},
}


def planted(task, name, seed, unstable=PLANTED, layers=tuple(range(LAYERS))):
    """Stable heads keep their pages but for one that wanders; unstable heads draw new ones."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.empty(STEPS, len(layers), HEADS, TOP_K, dtype=torch.int16)
    for place, layer in enumerate(layers):
        for head in range(HEADS):
            kept = torch.randperm(PAGES, generator=generator)
            for step in range(STEPS):
                fresh = torch.randperm(PAGES, generator=generator)
                if (layer, head) in unstable:
                    chosen = fresh[:TOP_K]
                else:
                    chosen = kept[:TOP_K].clone()
                    chosen[0] = kept[TOP_K + step % 20]
                pages[step, place, head] = chosen
    return Record(task, name, {16: pages}, {16: torch.full((STEPS,), PAGES)}, layers, dict(INFO))


def test_planted_heads_are_found_and_nothing_else():
    records = [planted(task, str(i), 10 * i + len(task)) for task in ("a", "bb") for i in range(2)]
    result = analyse(records, top_k=TOP_K)
    profile = result.profile
    assert profile.unstable_heads == PLANTED
    assert profile.task_heads == {"a": PLANTED, "bb": PLANTED}
    assert (profile.num_windows, profile.tasks, profile.top_k_pages) == (16, ("a", "bb"), TOP_K)
    assert all(profile.votes[layer][head] == 16 for layer, head in PLANTED)
    assert sum(map(sum, profile.votes)) == 16 * 4
    assert result.overlap.mean == 1.0
    assert result.overlap.chance == 0.25
    assert (result.between_windows.recall, result.between_documents.recall) == (1.0, 1.0)
    # A stable head keeps 5 of 6 pages of 40: (5/6 - 6/40) / (1 - 6/40).
    assert profile.stability[0][0] == pytest.approx((5 / 6 - 0.15) / 0.85, abs=1e-6)
    assert result.curves.shape == (15, LAYERS, HEADS)
    assert profile.stability[0][3] < 0.2
    assert profile.with_unstable_fraction(0.25).unstable_heads == PLANTED


def test_a_vote_fed_window_by_window_gives_the_same_profile():
    record = planted("a", "0", 7)
    offline = analyse([record], top_k=TOP_K).profile
    vote = StabilityVote(LAYERS, HEADS, 4)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, num_key_value_heads=HEADS, num_attention_heads=8, head_dim=8
    )
    with pytest.raises(ValueError, match="no window counted"):
        HeadProfile.from_vote(config, vote, top_k_pages=TOP_K, page_size=16)
    for start in range(0, STEPS, 16):
        part = slice(start, start + 16)
        assert vote.add_pages(record.pages[16][part], record.num_pages[16][part]) == 1
    online = HeadProfile.from_vote(config, vote, top_k_pages=TOP_K, page_size=16, source="online")
    for name in ("unstable_heads", "stability", "votes", "num_windows", "head_dim", "window"):
        assert getattr(online, name) == getattr(offline, name)
    assert HeadProfile.from_dict(online.to_dict()) == online


def test_layers_without_a_record_stay_unmeasured():
    records = [planted("a", str(i), i, layers=(1, 2)) for i in range(2)]
    result = analyse(records, top_k=TOP_K, unstable_fraction=3 / 8)
    assert result.profile.unstable_heads == PLANTED[1:]
    assert result.profile.stability[0] == result.profile.stability[3] == (None,) * HEADS
    assert result.profile.votes[0] == (None,) * HEADS
    assert result.profile.num_heads == 8
    assert result.between_documents.chance == 3 / 8


def test_a_task_without_a_counting_window_keeps_its_name_only():
    short = planted("short", "0", 5)
    short = replace(short, num_pages={16: torch.full((STEPS,), TOP_K)})
    result = analyse([planted("a", "0", 1), short], top_k=TOP_K)
    assert result.profile.tasks == ("a", "short")
    assert list(result.profile.task_heads) == ["a"]
    assert result.overlap is None
    assert result.between_documents is None
    with pytest.raises(ValueError, match="no window counted"):
        analyse([short], top_k=TOP_K)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 16}, "records differ in head_dim: a/0 has 8, a/1 has 16"),
        ({"model_id": "other"}, "records differ in model_id"),
        ({"settings": {}}, "records differ in settings"),
    ],
)
def test_records_that_do_not_belong_together_are_refused(change, message):
    other = replace(planted("a", "1", 2), info={**INFO, **change})
    with pytest.raises(ValueError, match=message):
        analyse([planted("a", "0", 1), other], top_k=TOP_K)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 7}, "top_k is 7, but the records hold 6 pages"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 6, "page_size": 32}, r"page_size 32 was not recorded, only \[16\]"),
        ({"top_k": 6, "unstable_fraction": 0.0}, "makes 0 of 16 heads unstable"),
        ({"top_k": 6, "unstable_fraction": 1.0}, "makes 16 of 16 heads unstable"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        analyse([planted("a", "0", 1)], **arguments)


def test_records_are_read_from_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no records under"):
        load_records(tmp_path)
    for index in range(2):
        record = planted("a", str(index), index)
        info = {k: v for k, v in record.info.items() if k != "settings"}
        path = tmp_path / "a" / f"{index}.safetensors"
        save_record(replace(record, info=info), SETTINGS, path)
    records = load_records(tmp_path)
    assert [record.name for record in records] == ["0", "1"]
    assert analyse(records, top_k=TOP_K).profile.unstable_heads == PLANTED
