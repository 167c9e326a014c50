"""Tiny random models of every decoder family that is supported, and what is special about each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers as t

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {"num_hidden_layers": 4, "sliding_window": 24}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


def _config(kind: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(t, kind)(**(BASE | changes))


def _smollm3() -> Any:
    return t.SmolLM3Config(**BASE, no_rope_layers=[1, 0])


FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", _config("LlamaConfig")),
    "mistral": ("MistralForCausalLM", _config("MistralConfig", sliding_window=None)),
    "qwen2": ("Qwen2ForCausalLM", _config("Qwen2Config")),
    "qwen3": ("Qwen3ForCausalLM", _config("Qwen3Config")),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _config("Qwen3MoeConfig", **MOE)),
    "gemma2": (
        "Gemma2ForCausalLM",
        _config("Gemma2Config", **HYBRID, attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        _config("Gemma3TextConfig", **HYBRID, layer_types=ALTERNATING, query_pre_attn_scalar=16),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        _config(
            "GptOssConfig",
            **HYBRID,
            layer_types=ALTERNATING,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "phi3": ("Phi3ForCausalLM", _config("Phi3Config", sliding_window=None)),
    "mixtral": (
        "MixtralForCausalLM",
        _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    ),
    "olmo2": ("Olmo2ForCausalLM", _config("Olmo2Config")),
    "cohere2": (
        "Cohere2ForCausalLM",
        _config("Cohere2Config", **HYBRID, layer_types=ALTERNATING),
    ),
    "glm4": ("Glm4ForCausalLM", _config("Glm4Config")),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "granite": ("GraniteForCausalLM", _config("GraniteConfig", attention_multiplier=0.1)),
    "llama4": (
        "Llama4ForCausalLM",
        _config(
            "Llama4TextConfig",
            num_hidden_layers=4,
            num_local_experts=2,
            intermediate_size_mlp=48,
            attention_chunk_size=64,
            layer_types=["chunked_attention", "full_attention"] * 2,
            no_rope_layers=[1, 0, 1, 0],
        ),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        lambda: t.GPT2Config(
            vocab_size=97,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=2048,
            initializer_range=0.2,
            pad_token_id=0,
            eos_token_id=2,
        ),
    ),
}


@lru_cache
def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The tiny model of one family."""
    kind, config = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(t, kind)(config()).to(dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):  # gpt_oss leaves them uninitialised
            torch.nn.init.normal_(parameter)
    return model


def tiered_heads(model: Any) -> list[tuple[int, int]]:
    """Every (layer, KV head) of the layers that are real full attention."""
    layers = t.DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    full = [i for i, layer in enumerate(layers) if type(layer) is t.cache_utils.DynamicLayer]
    return [(layer, head) for layer in full for head in range(heads)]
