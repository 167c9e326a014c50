"""Models beyond plain decoders: served through their text part, passed through, or refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers as t
from families import BASE, VISION, build, tiered_heads
from helpers import (
    cache_argument,
    decode,
    flexicache,
    forward,
    generate,
    left_padding,
    profile_of,
    random_ids,
)
from mirror import Mirrored, MirroredCache

from flexicache_hf import (
    AttentionNotLinked,
    FlexiCacheConfig,
    FlexiCacheDynamicCache,
    FlexiCacheWarning,
)
from flexicache_hf.integration.layer import FlexiCacheLayer

SMALL = {"vocab_size": 97, "hidden_size": 64, "initializer_range": 0.2}
IMAGE = 96  # token that stands for a part of the image


def make(kind: str, config):
    torch.manual_seed(0)
    return getattr(t, kind)(config).eval()


def llava():
    vision = t.CLIPVisionConfig(**VISION)
    text = t.LlamaConfig(**BASE)
    config = t.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return make("LlavaForConditionalGeneration", config)


def gemma3():
    text = t.Gemma3TextConfig(
        **(BASE | {"num_hidden_layers": 4, "sliding_window": 24}),
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    config = t.Gemma3Config(
        text_config=text,
        vision_config=t.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    return make("Gemma3ForConditionalGeneration", config)


def picture_prompt(length: int) -> dict[str, torch.Tensor]:
    """Token ids with the four tokens of one picture, and the picture."""
    ids = random_ids(1, length).clamp(max=IMAGE - 1)
    ids[0, 5:9] = IMAGE
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}


@torch.no_grad()
def picture_logits(model, cache, inputs, tokens):
    """Logits after the prompt and after each of `tokens` `[1, n]`."""
    argument = cache_argument(model)
    extra = {}
    if isinstance(model, t.Gemma3ForConditionalGeneration):
        extra["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    found = [model(**inputs, **extra, **{argument: cache}).logits[:, -1]]
    for token in tokens.T:
        found.append(model(token[None], **{argument: cache}).logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("kind", [llava, gemma3])
def test_multimodal_model_is_tiered_through_its_text_part(kind):
    model, inputs, tokens = kind(), picture_prompt(60), random_ids(1, 30, seed=4)
    pairs = tiered_heads(model)[::2]
    dense = picture_logits(model, t.DynamicCache(config=model.config), inputs, tokens)
    vision = model.config.vision_config._attn_implementation
    covered = flexicache(model, *pairs, token_budget=256)
    assert torch.equal(picture_logits(model, covered, inputs, tokens), dense)
    assert model.config.vision_config._attn_implementation == vision == "sdpa"
    assert model.config.get_text_config()._attn_implementation == "flexicache"
    sparse = flexicache(model, *pairs, token_budget=40, page_size=8)
    found = picture_logits(model, sparse, inputs, tokens)
    assert sparse.stats().total.unstable_ranked > 0
    assert torch.equal(found[0], dense[0])
    assert not torch.allclose(found[-1], dense[-1])


def mllama():
    text = t.MllamaTextConfig(
        **(BASE | {"num_hidden_layers": 4, "vocab_size": 89}), cross_attention_layers=[1]
    )
    vision = t.MllamaVisionConfig(
        **VISION,
        num_global_layers=1,
        max_num_tiles=1,
        vision_output_dim=64,
        intermediate_layers_indices=[0],
        supported_aspect_ratios=[[1, 1]],
    )
    model = make(
        "MllamaForConditionalGeneration", t.MllamaConfig(text_config=text, vision_config=vision)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gate" in name and weight.numel() == 1:
                weight.fill_(1)  # closed at first: the picture would not matter
    return model


def picture_inputs(kind) -> dict[str, torch.Tensor]:
    inputs = picture_prompt(60)
    if kind is gemma3:
        inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    elif kind is mllama:
        inputs = {
            "input_ids": random_ids(1, 60).clamp(max=80),
            "pixel_values": inputs["pixel_values"][:, None, None],
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(1, 60, 1, 1, dtype=torch.long),
        }
    return inputs


@pytest.mark.parametrize("kind", [llava, gemma3, mllama])
@pytest.mark.parametrize("picture", [True, False], ids=["picture", "text"])
def test_multimodal_generate(kind, picture):
    model, inputs = kind(), picture_inputs(kind)
    ids = inputs.pop("input_ids") if picture else random_ids(1, 60).clamp(max=80)
    inputs = inputs if picture else {}
    heads = tiered_heads(model)[::2]
    expected = generate(model, t.DynamicCache(config=model.config), ids, 12, **inputs)
    covered = flexicache(model, *heads, token_budget=256)
    found = generate(model, covered, ids, 12, **inputs)
    assert all(map(torch.equal, found.logits, expected.logits))
    sparse = MirroredCache(model, profile_of(model, *heads), token_budget=16, page_size=4)
    with Mirrored(model, 1e-4) as mirror:
        generate(model, sparse, ids, 12, **inputs)
    assert mirror.sparse == 11
    assert mirror.most == len({layer for layer, _ in tiered_heads(model)})


def test_layers_that_attend_to_a_picture_stay_and_are_not_cropped():
    model, inputs = mllama(), picture_inputs(mllama)
    cache = flexicache(model, *tiered_heads(model)[::2], token_budget=64)
    assert [isinstance(layer, FlexiCacheLayer) for layer in cache.layers] == [
        True,
        False,
        True,
        True,
    ]
    generate(model, cache, inputs.pop("input_ids"), 4, **inputs)
    held = cache.layers[1].keys
    shape = cache.layers[0].keys.shape
    assert shape == (1, 2, 63, 16)  # models ask whether a layer holds anything
    cache.crop(-60)
    assert cache.get_seq_length() == 3
    assert torch.equal(cache.layers[1].keys, held)


def deepseek():
    config = t.DeepseekV3Config(
        **(BASE | {"num_key_value_heads": 4}),
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )
    return make("DeepseekV3ForCausalLM", config)


def mistral_v01():
    return make("MistralForCausalLM", t.MistralConfig(**BASE, sliding_window=24))


@pytest.mark.parametrize("kind", [deepseek, mistral_v01])
def test_nothing_to_tier_warns_and_equals_dense(kind):
    """Latent attention; one sliding window in every layer."""
    model = kind()
    with pytest.warns(FlexiCacheWarning, match="no full-attention layer.*like DynamicCache"):
        cache = FlexiCacheDynamicCache(model, profile_of(model), token_budget=32)
    assert not any(isinstance(layer, FlexiCacheLayer) for layer in cache.layers)
    ids, mask = random_ids(2, 70), left_padding(70, 0, 20)
    expected = decode(model, t.DynamicCache(config=model.config), ids, 20, mask)
    assert torch.equal(decode(model, cache, ids, 20, mask), expected)


def falcon():
    config = t.FalconConfig(
        **SMALL, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0, eos_token_id=2
    )
    return make("FalconForCausalLM", config)


def bloom():
    config = t.BloomConfig(**SMALL, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=2)
    return make("BloomForCausalLM", config)


@pytest.mark.parametrize("kind", [falcon, bloom])
def test_model_without_the_attention_interface_is_refused(kind):
    model = kind()
    before = model.config._attn_implementation
    for given in (model, model.config):
        with pytest.raises(ValueError, match=r"attention by itself.*transformers' own cache"):
            FlexiCacheDynamicCache(given)
    assert model.config._attn_implementation == before


def diffllama():
    return make("DiffLlamaForCausalLM", t.DiffLlamaConfig(**BASE))


def jetmoe():
    changed = {key: value for key, value in BASE.items() if key != "num_attention_heads"}
    config = t.JetMoeConfig(
        **(changed | {"num_key_value_heads": 2, "kv_channels": 16}),
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return make("JetMoeForCausalLM", config)


@pytest.mark.parametrize("kind", [diffllama, jetmoe])
def test_model_that_changes_what_the_cache_returned_is_refused(kind):
    """Their values are split, or heads repeated, on the way: pages would hold something else."""
    model = kind()
    cache = FlexiCacheDynamicCache(model, profile_of(model), token_budget=256)
    # transformers < 5.24 has a single link, and JetMoe cuts it: dense until that is certain
    with pytest.raises(AttentionNotLinked, match=r"changes keys or values|was never called"):
        generate(model, cache, random_ids(1, 40))
    if kind is diffllama:
        assert cache.get_seq_length() == 0


def test_encoder_decoder_is_refused():
    config = t.T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=48, num_layers=2, num_heads=4)
    for given in (config, make("T5ForConditionalGeneration", config)):
        with pytest.raises(ValueError, match=r"T5Config describes an encoder-decoder model"):
            FlexiCacheDynamicCache(given)


def test_model_without_attention_is_refused():
    config = t.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2)
    with pytest.raises(ValueError, match="MambaConfig has no attention heads"):
        FlexiCacheDynamicCache(config)


def test_keys_shared_across_devices_are_refused():
    model = copy.deepcopy(build("gemma3n"))
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(ValueError, match=r"share keys and values.*\['0', '1'\]; expected one"):
        FlexiCacheDynamicCache(model)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    FlexiCacheDynamicCache(model, profile_of(model))


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_heads_are_learned_where_layers_share_keys(family):
    """A layer that reads another's keys ranks them too; the keys' own layer alone votes."""
    model = build(family)
    sizes = {"token_budget": 32, "page_size": 4}
    config = FlexiCacheConfig(**sizes, auto_windows=2)
    cache = FlexiCacheDynamicCache(model, "auto", config=config)
    assert cache.profile.unstable_heads == tuple(tiered_heads(model))
    decode(model, cache, random_ids(1, 60), 48, None, random_ids(1, 48))
    learned = cache.profile
    assert learned.num_windows == 2
    assert len(learned.unstable_heads) == round(len(tiered_heads(model)) / 4)
    assert set(learned.unstable_heads) < set(tiered_heads(model))


def hybrid(first="linear_attention"):
    """A tiny Qwen3-Next, whose linear layers hold a recurrent state."""
    model = build("qwen3_next")
    if first == "linear_attention":
        return model
    config = copy.deepcopy(model.config)
    config.layer_types = config.layer_types[::-1]
    return make("Qwen3NextForCausalLM", config)


@pytest.mark.parametrize("first", ["linear_attention", "full_attention"])
def test_crop_of_linear_layers_is_refused_as_in_transformers(first):
    """By the same error, and where transformers has cropped the layers before, ours has not."""
    model, ids, token = hybrid(first), random_ids(1, 70), random_ids(1, 1, seed=2)
    cache = flexicache(model, *tiered_heads(model)[::2], token_budget=48)
    for each in (cache, t.DynamicCache(config=model.config)):
        decode(model, each, ids, 4)
        with pytest.raises(RuntimeError, match="does not track past states"):
            each.crop(-2)
    twin = flexicache(model, *tiered_heads(model)[::2], token_budget=48)
    decode(model, twin, ids, 4)
    assert cache.get_seq_length() == 74
    assert torch.equal(forward(model, cache, token), forward(model, twin, token))


def test_crop_of_a_recurrent_state_is_refused():
    """transformers crops what it can once the past is recorded, and the state stays in the future:
    the next logits are not those of the text that was left."""
    model, ids, token = hybrid(), random_ids(1, 70), random_ids(1, 1, seed=2)
    cache = flexicache(model, *tiered_heads(model)[::2], token_budget=256)
    dense, shorter = (t.DynamicCache(config=model.config) for _ in range(2))
    forward(model, shorter, ids[:, :66])
    expected = forward(model, shorter, token)
    for each in (cache, dense):
        each.activate_past_recording()
        forward(model, each, ids)
        each.crop(0)
        assert not each.is_croppable
    dense.crop(-4)
    assert not torch.allclose(forward(model, dense, token), expected, rtol=0.01, atol=0.01)
    with pytest.raises(RuntimeError, match=r"layer 0 .*recurrent state.*cache.reset\(\)"):
        cache.crop(-4)
    assert cache.get_seq_length() == 70
    cache.reset()
    forward(model, cache, ids[:, :66])
    assert torch.equal(forward(model, cache, token), expected)


@pytest.mark.parametrize("family", ["lfm2", "gemma3"])
def test_crop_of_recorded_layers_equals_dense(family):
    """Convolutions and sliding windows go back if their past was recorded."""
    model, ids, turn = build(family), random_ids(2, 70), random_ids(2, 6, seed=2)
    cache = flexicache(model, *tiered_heads(model)[::2], token_budget=256)
    dense = t.DynamicCache(config=model.config)
    logits = []
    for each in (cache, dense):
        each.activate_past_recording()
        found = []
        for fed, removed in ((ids, 0), (ids[:, :8], 3), (turn, 0), (turn[:, :1], 0)):
            found.append(forward(model, each, fed))
            each.crop(-removed)  # after every forward, or transformers 5.17 loses count
        assert each.get_seq_length() == 82
        logits.append(torch.stack(found))
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", ["lfm2", "gemma3", "llama4"])
def test_crop_further_than_recorded_is_refused(family):
    """Sliding windows and convolutions record their past from one crop to the next. transformers
    crops them further, and then answers wrongly or fails in a later forward."""
    model, ids, turn = build(family), random_ids(2, 90), random_ids(2, 6, seed=2)
    sizes = {"token_budget": 256}
    cache, twin = (flexicache(model, *tiered_heads(model)[::2], **sizes) for _ in range(2))
    for each in (cache, twin):
        each.activate_past_recording()
        forward(model, each, ids)
        each.crop(0)
    forward(model, cache, turn)
    with pytest.raises(RuntimeError, match=r"layer 0 .* records its past .*cache.reset\(\)"):
        cache.crop(-9)
    cache.crop(-6)  # nothing has changed, so this is still possible
    assert torch.equal(forward(model, cache, turn), forward(model, twin, turn))


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_an_interrupted_forward_of_linear_layers_needs_a_reset(family):
    """They cannot tell whether they took part in it."""
    model, ids = copy.deepcopy(build(family)), random_ids(1, 40)
    cache = flexicache(model, *tiered_heads(model)[::2], token_budget=256)
    cache.activate_past_recording()
    expected = forward(model, cache, ids)

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, ids[:, :1])
    hook.remove()
    with pytest.raises(RuntimeError, match=r"cache.reset\(\)"):
        forward(model, cache, ids[:, :1])
    with pytest.raises(RuntimeError, match=r"interrupted: start over with cache.reset\(\)"):
        cache.crop(-1)
    cache.reset()
    assert torch.equal(forward(model, cache, ids), expected)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "gemma3", "gemma2", "mistral_v01"])
def test_reset_takes_a_prompt_of_another_number_of_rows(family):
    """transformers' sliding and linear layers keep the sizes of what they held."""
    model = mistral_v01() if family == "mistral_v01" else build(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlexiCacheWarning)  # nothing is tiered in mistral_v01
        cache, new = (flexicache(model, *tiered_heads(model)[::2]) for _ in range(2))
    decode(model, cache, random_ids(1, 60), 3)
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = random_ids(3, 45, seed=4)
    assert torch.equal(decode(model, cache, ids, 5), decode(model, new, ids, 5))
