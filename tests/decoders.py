"""Tiny random models of every decoder that transformers has, where a common recipe makes one.

`python tests/decoders.py` prints what becomes of each with this cache, with `--modes` also in every
mode of `modes.py` (minutes).
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as t
from families import BASE, VISION
from helpers import decode, random_ids
from mirror import DenseTwin, Mirrored, MirroredCache
from modes import COVERED, MODES, SPARSE
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from flexicache_hf import AttentionNotLinked, FlexiCacheDynamicCache, FlexiCacheWarning

DECODERS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
MOST_PARAMETERS = 60_000_000

SIZES: dict[str, Any] = BASE | {
    "max_position_embeddings": 512,
    "num_hidden_layers": 4,
    "is_decoder": True,
    "sliding_window": 24,
    "attention_chunk_size": 32,
    # names of older models
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 48,
    "rotary_dim": 8,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_layers": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    # latent attention and indexers
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 32,
    # linear layers
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_d_conv": 4,
    "ssm_state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "expand": 2,
    "num_heads": 8,
    "attn_layer_indices": [1, 3],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
LAYERS = {  # where nothing is said by default
    "granitemoehybrid": ["linear_attention", "full_attention"],
    "lfm2_moe": ["conv", "full_attention"],
}
ABSENT = ("sliding_window", "attention_chunk_size", "kv_lora_rank", "q_lora_rank", "rotary_dim")
"""What a model has only if its configuration says so by itself."""

PARTS: dict[str, Any] = VISION | {  # of the parts that see or hear
    "depth": 1,
    "num_heads": 2,
    "embed_dim": 32,
    "hidden_dim": 32,
    "out_hidden_size": 64,
    "projection_dim": 32,
    "num_position_embeddings": 16,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
    "text_hidden_size": 64,
}
TEXT_PARTS = ("text_config", "decoder", "llm_config", "language_config")


def tiny(usual: Any, sizes: dict[str, Any]) -> Any:
    """A configuration like `usual`, with those of `sizes` that it knows."""
    kind = type(usual)
    known = set(usual.to_dict()) | set(inspect.signature(kind.__init__).parameters)
    sizes = {
        field: value
        for field, value in sizes.items()
        if field in known and not (field in ABSENT and getattr(usual, field, None) is None)
    }
    if sizes.get("kv_lora_rank"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    field = kind.attribute_map.get("layer_types", "layer_types")
    if not isinstance(inspect.getattr_static(kind, field, None), property):
        usual_types = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
        if types := LAYERS.get(usual.model_type, usual_types):
            sizes["layer_types"] = (types * 4)[:4]
    return kind(**sizes)


def decoder(name: str) -> Any:
    """A tiny model; raises whatever goes wrong, for a recipe does not fit all."""
    usual = t.CONFIG_MAPPING[name]().get_text_config(decoder=True)
    return built(tiny(usual, SIZES), t.AutoModelForCausalLM)


def multimodal(name: str) -> Any:
    """A tiny model whose text part decodes; it also raises whatever goes wrong."""
    config = t.CONFIG_MAPPING[name]()
    for part in config.sub_configs:
        if (usual := getattr(config, part)) is not None:
            setattr(config, part, tiny(usual, SIZES if part in TEXT_PARTS else PARTS))
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if "rope_type" in rope:  # some split a head into time, height and width
        half = rope.get("partial_rotary_factor") == 0.5
        rope["mrope_section"] = [1, 1, 2] if half else [2, 3, 3]
    return built(config, t.AutoModelForImageTextToText)


def built(config: Any, kind: Any) -> Any:
    with torch.device("meta"):
        model = kind.from_config(copy.deepcopy(config))
    size = sum(weight.numel() for weight in model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters, expected at most {MOST_PARAMETERS}")
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    for weight in model.parameters():
        if not weight.isfinite().all():  # left uninitialised
            torch.nn.init.normal_(weight)
    return model


class NotMade(Exception):
    """The recipe makes no such model, or none that DynamicCache can decode with."""


def outcome(name: str, make: Callable[[str], Any] = decoder) -> str:
    """What becomes of a model with this cache: "tiered", "passed through" or "refused".

    Raises:
        NotMade: there is nothing to compare with.
        AssertionError: its logits are not DynamicCache's, or not those under the mask.
    """
    ids, tokens = random_ids(2, 60), random_ids(2, 12, seed=3)
    try:
        model = make(name)
        plain = copy.deepcopy(model)
        expected = decode(plain, t.DynamicCache(config=plain.config), ids, 12, None, tokens)
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    if expected.isnan().any():
        raise NotMade("its logits are not numbers")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FlexiCacheWarning)
            cache = FlexiCacheDynamicCache(model, **COVERED)
            small = MirroredCache(model, **SPARSE)
        found = decode(model, cache, ids, 12, None, tokens)
    except AttentionNotLinked:
        return "refused"
    except ValueError as error:
        if "transformers' own cache" not in str(error):
            raise
        return "refused"
    assert torch.equal(found, expected)
    tiered = len(cache._tiered())
    if not tiered:
        text, same = (each.config.get_text_config(decoder=True) for each in (model, plain))
        assert text._attn_implementation == same._attn_implementation
        return "passed through"
    other = decode(model, t.DynamicCache(config=plain.config), ids, 2, None, tokens)
    assert torch.equal(other, expected[:3]), "another cache of a model used with ours"
    with Mirrored(model, 1e-3) as mirror:
        decode(model, small, ids, 12, None, tokens)
    assert mirror.sparse == 12
    assert mirror.most >= tiered
    return "tiered"


def modes(name: str) -> Iterator[tuple[str, str]]:
    """`(mode, what is wrong)` for every mode of `modes.py`, covered and sparse; "" if nothing is.

    A mode that DynamicCache cannot do either is left out.
    """
    made = decoder(name)
    for mode, run in MODES.items():
        plain = copy.deepcopy(made)
        try:
            expected = run(plain, DenseTwin(plain.config))
        except (ValueError, RuntimeError, AttributeError):
            continue
        for kind, sizes in {"covered": COVERED, "sparse": SPARSE}.items():
            model, wrong = copy.deepcopy(made), ""
            cache = MirroredCache(model, **sizes)
            try:
                with Mirrored(model, 0.0 if kind == "covered" else 1e-3) as mirror:
                    found = run(model, cache)
                if kind == "covered" and not all(map(torch.equal, found, expected)):
                    wrong = "not DynamicCache's"
                elif kind == "sparse" and mirror.sparse < 2:
                    wrong = "was never sparse"
            except (ValueError, RuntimeError, AssertionError) as error:
                wrong = str(error).strip().splitlines()[0]
            yield f"{mode}, {kind}", wrong


def main(every_mode: bool) -> None:
    for kind, names, make in (
        ("decoders", DECODERS, decoder),
        ("multimodal models", MULTIMODAL, multimodal),
    ):
        counts: Counter[str] = Counter()
        for name in names:
            try:
                found = outcome(name, make)
                counts[found] += 1
            except NotMade as error:
                found = f"not made ({str(error).splitlines()[0][:90]})"
                counts["not made"] += 1
            print(f"{name}: {found}", flush=True)
            if not every_mode or found != "tiered" or make is multimodal:
                continue
            for mode, wrong in modes(name):
                counts["modes"] += 1
                if wrong:
                    counts["modes that are wrong or refused"] += 1
                    print(f"    {mode}: {wrong}", flush=True)
        print(f"{kind}: {dict(counts)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore", FlexiCacheWarning)
    torch.set_num_threads(1)  # tiny models lose more to threads than they gain
    main(every_mode="--modes" in sys.argv)
