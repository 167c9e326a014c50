"""Recording page sets: the ranking against a slow one, and the model left exactly as it was."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from flexicache_hf.integration.attention import use_flexicache
from flexicache_hf.profiles import collect as module
from flexicache_hf.profiles.collect import (
    PageRecorder,
    collect,
    rank_pages,
    record_generation,
    recording,
)
from flexicache_hf.profiles.records import CollectSettings, load_record, save_record
from flexicache_hf.profiles.texts import Text

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TEXT = Text("task", "0000", "")


def tiny(attention="sdpa", config=None):
    torch.manual_seed(0)
    config = config or LlamaConfig(**SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def prompt(length):
    return torch.randint(2, 64, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def slow_ranking(query, key, size, top_k):
    """The paper's words: the bound of every full page, the best query head of the group."""
    total = -(-key.shape[1] // size)
    group = query.shape[0] // key.shape[0]
    result = []
    for head in range(key.shape[0]):
        scores = {total - 1: float("inf")}
        for page in range(total - 1):
            keys = key[head, page * size : (page + 1) * size].double()
            low, high = keys.amin(0), keys.amax(0)
            rows = query[head * group : (head + 1) * group].double()
            scores[page] = max(float(torch.maximum(q * low, q * high).sum()) for q in rows)
        order = sorted(scores, key=lambda page: (-scores[page], page))[:top_k]
        result.append(order + [-1] * (top_k - len(order)))
    return torch.tensor(result)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 30, 32, 33])
@pytest.mark.parametrize("top_k", [1, 2, 8, 20])
def test_ranking_equals_the_slow_one(tokens, top_k):
    torch.manual_seed(tokens)
    key, query, size = torch.randn(2, tokens, 8), torch.randn(6, 8), 4
    full = tokens // size
    pages = key[:, : full * size].reshape(2, full, size, 8)
    bounds = torch.cat((pages.amax(2), pages.amin(2)), dim=-1)
    found = rank_pages(query, bounds, -(-tokens // size), top_k)
    assert torch.equal(found, slow_ranking(query, key, size, top_k))


def test_equal_scores_go_to_the_earlier_page():
    bounds = torch.ones(1, 5, 4)
    assert rank_pages(torch.ones(1, 2), bounds, 6, 4).tolist() == [[5, 0, 1, 2]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_step_equals_the_slow_ranking_of_the_models_own_tensors(attention, monkeypatch):
    seen = []
    original = PageRecorder.observe

    def spy(self, layer, query, key):
        if query.shape[2] == 1:
            seen.append((layer, query[0, :, 0].clone(), key[0].clone()))
        original(self, layer, query, key)

    monkeypatch.setattr(PageRecorder, "observe", spy)
    settings = CollectSettings(top_k=6, page_sizes=(4, 8), steps=11)
    record = record_generation(tiny(attention), prompt(27), settings, TEXT)
    assert record.layers == (0, 1, 2)
    assert len(seen) == 3 * 11
    for size in (4, 8):
        assert record.pages[size].shape == (11, 3, 2, 6)
        assert record.num_pages[size].tolist() == [-(-(28 + s) // size) for s in range(11)]
    for index, (layer, query, key) in enumerate(seen):
        for size in (4, 8):
            expected = slow_ranking(query, key, size, 6)
            assert torch.equal(record.pages[size][index // 3, layer].long(), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_generates_the_same_while_recorded_and_is_restored(attention):
    model, ids = tiny(attention), torch.tensor([prompt(40)])
    settings = CollectSettings(top_k=4, page_sizes=(4,), steps=12)
    options = {"max_new_tokens": 13, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    plain = model.generate(ids, **options)
    with recording(model, PageRecorder(settings, 40)):
        watched = model.generate(ids, **options)
    assert model.config._attn_implementation == attention
    assert torch.equal(plain.sequences, watched.sequences)
    for a, b in zip(plain.logits, watched.logits, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(KeyboardInterrupt), recording(model, PageRecorder(settings, 40)):
        raise KeyboardInterrupt
    assert model.config._attn_implementation == attention
    with recording(model, PageRecorder(settings, 40)):
        other = tiny(attention)
        with (
            pytest.raises(RuntimeError, match="another recording"),
            recording(other, PageRecorder(settings, 40)),
        ):
            pass


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_a_flexicache_was_made_for_is_recorded_alike(attention):
    settings = CollectSettings(top_k=4, page_sizes=(4,), steps=6)
    before = record_generation(tiny(attention), prompt(40), settings, TEXT)
    used = tiny(attention)
    use_flexicache(used.config)
    name = used.config._attn_implementation
    after = record_generation(used, prompt(40), settings, TEXT)
    assert used.config._attn_implementation == name != attention
    assert torch.equal(before.pages[4], after.pages[4])


def test_end_of_sequence_never_stops_a_recording():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[:] = 0.0
    model.generation_config.eos_token_id = list(range(60))
    settings = CollectSettings(top_k=4, page_sizes=(4,), steps=9)
    assert record_generation(model, prompt(30), settings, TEXT).pages[4].shape[0] == 9


def test_sliding_layers_are_not_recorded():
    config = Gemma2Config(**{**SIZES, "num_hidden_layers": 4}, sliding_window=512)
    settings = CollectSettings(top_k=3, page_sizes=(4,), steps=5)
    record = record_generation(tiny("eager", config), prompt(30), settings, TEXT)
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert list(record.layers) == full == [1, 3]
    assert record.pages[4].shape == (5, 2, 2, 3)


def test_latent_attention_is_refused():
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = tiny()
    model.config = config
    with pytest.raises(ValueError, match="no full-attention layer"):
        record_generation(model, prompt(8), CollectSettings(steps=2), TEXT)


def test_a_flash_model_is_refused_with_advice():
    model = tiny()
    model.config.__dict__["_attn_implementation_internal"] = "flash_attention_2"
    with (
        pytest.raises(ValueError, match="attn_implementation='sdpa'"),
        recording(model, PageRecorder(CollectSettings(), 1)),
    ):
        pass


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="max_position_embeddings = 256"):
        record_generation(tiny(), prompt(250), CollectSettings(steps=6), TEXT)


def word_tokenizer():
    words = {"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 64)}}
    raw = Tokenizer(WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")


def document(seed, length=60):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(2, 64, (length,), generator=generator).tolist())


def test_collect_resumes_shares_and_remakes(tmp_path, monkeypatch):
    model, tokenizer = tiny(), word_tokenizer()
    texts = [Text(f"t{i % 2}", f"{i:04d}", document(i), "w2 w3") for i in range(5)]
    settings = CollectSettings(top_k=4, page_sizes=(4,), steps=8, max_prompt_tokens=50)
    calls = []
    original = record_generation
    monkeypatch.setattr(
        module, "record_generation", lambda *a: calls.append(a[3].name) or original(*a)
    )
    reports = []
    first = collect(
        model, tokenizer, texts, tmp_path, settings, share=(0, 2),
        report=lambda progress, text: reports.append((progress.done, progress.total, text.name)),
    )  # fmt: skip
    assert calls == ["0000", "0002", "0004"]
    assert reports == [(1, 3, "0000"), (2, 3, "0002"), (3, 3, "0004")]
    assert first.skipped == 0
    everything = collect(model, tokenizer, texts, tmp_path, settings)
    assert calls[3:] == ["0001", "0003"]
    assert everything.skipped == 3
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.safetensors")) == [
        "t0/0000.safetensors", "t0/0002.safetensors", "t0/0004.safetensors",
        "t1/0001.safetensors", "t1/0003.safetensors",
    ]  # fmt: skip
    record = load_record(everything.files[0])
    assert record.info["prompt_tokens"] == 50
    assert record.pages[4].dtype == torch.int16
    longer = CollectSettings(top_k=4, page_sizes=(4,), steps=9, max_prompt_tokens=50)
    collect(model, tokenizer, texts[:1], tmp_path, longer)
    assert load_record(everything.files[0]).pages[4].shape[0] == 9


def test_a_record_survives_the_disk(tmp_path):
    settings = CollectSettings(top_k=5, page_sizes=(4, 8), steps=6)
    record = record_generation(tiny(), prompt(30), settings, Text("a/b", "7", ""))
    path = tmp_path / "deep" / "r.safetensors"
    save_record(record, settings, path)
    loaded = load_record(path)
    assert (loaded.task, loaded.name, loaded.layers) == ("a/b", "7", (0, 1, 2))
    for size in (4, 8):
        assert torch.equal(loaded.pages[size].long(), record.pages[size])
        assert torch.equal(loaded.num_pages[size].long(), record.num_pages[size])
    assert [p.name for p in path.parent.iterdir()] == ["r.safetensors"]


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "r.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"flexicache": json.dumps({"format": "old"})})
    with pytest.raises(ValueError, match="format is 'old', expected 'flexicache-page-sets-1'"):
        load_record(path)
