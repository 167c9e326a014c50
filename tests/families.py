"""Tiny random models of every decoder family that is supported, and what is special about each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers as t

from flexicache_hf.models.kv_heads import kv_heads
from flexicache_hf.models.support import tiered_layers

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
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {"num_hidden_layers": 4, "sliding_window": 24}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
# the last two of six layers have no keys of their own: they attend to those of layers 2 and 3
SHARING = {
    "num_hidden_layers": 6,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
GEMMA3N = {
    "intermediate_size": [48] * 6,
    "activation_sparsity_pattern": None,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}


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
    "ministral": (
        "MinistralForCausalLM",
        _config("MinistralConfig", **HYBRID, layer_types=ALTERNATING),
    ),
    "ministral3": ("Ministral3ForCausalLM", _config("Ministral3Config", rope_parameters=YARN)),
    "gemma3n": ("Gemma3nForCausalLM", _config("Gemma3nTextConfig", **SHARING, **GEMMA3N)),
    "gemma4": (
        "Gemma4ForCausalLM",
        _config(
            "Gemma4TextConfig",
            **SHARING,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            global_head_dim=32,
            vocab_size_per_layer_input=97,
            hidden_size_per_layer_input=8,
        ),
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        _config(
            "Qwen3NextConfig",
            **MOE,
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            shared_expert_intermediate_size=32,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
        ),
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        _config("Lfm2Config", num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
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
    config = model.config.get_text_config(decoder=True)
    full = tiered_layers(config, t.DynamicCache(config=config).layers)
    return [(layer, head) for layer in full for head in range(kv_heads(config, layer))]
