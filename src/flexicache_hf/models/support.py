"""Models that this cache cannot serve are refused when it is made, with what to do instead.

What cannot be known from the model is caught later: an attention function that never reports in, or
one that gets other keys than the cache returned, raises `AttentionNotLinked` (see `layer`).
"""

from __future__ import annotations

from typing import Any

from transformers import MODEL_MAPPING, PreTrainedConfig, cache_utils
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from .kv_heads import layer_configs

INSTEAD = "use transformers' own cache for this model (leave the cache argument out)"


def tiered_layers(text: Any, layers: list[Any]) -> list[int]:
    """Which of transformers' cache layers can be tiered: those of plain full attention.

    Args:
        text: configuration of the decoder.
        layers: what DynamicCache has for it.
    """
    if any(getattr(each, "kv_lora_rank", None) is not None for each in layer_configs(text)):
        return []  # latent attention: its cache is small already
    if any(map(_selects_by_itself, layers)):
        # such a model masks what it did not select only under transformers' own attention names
        return []
    cross = cross_layers(text)
    return [
        index
        for index, layer in enumerate(layers)
        if type(layer) is DynamicLayer and index not in cross
    ]


def cross_layers(text: Any) -> frozenset[int]:
    """Layers that attend to another input than the text: they hold none of it (Mllama)."""
    return frozenset(getattr(text, "cross_attention_layers", None) or ())


def _selects_by_itself(layer: Any) -> bool:
    """Its model was trained to attend to tokens or blocks that an indexer selects."""
    own = type(layer).__module__ != cache_utils.__name__
    return own or isinstance(layer, DynamicIndexedLayer)


def check_supported(model_or_config: Any, model_config: Any) -> None:
    """Raises ValueError, before anything is changed, if the model cannot work with this cache."""
    kind = type(model_config).__name__
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(
            f"{kind} describes an encoder-decoder model, which keeps a second cache for the "
            f"encoder's output; expected a decoder: {INSTEAD}"
        )
    text = model_config.get_text_config(decoder=True)
    if not getattr(text, "is_heterogeneous", False) and not getattr(
        text, "num_attention_heads", None
    ):
        raise ValueError(
            f"{type(text).__name__} has no attention heads, so there is nothing to keep in two "
            f"tiers: {INSTEAD}"
        )
    decoder = _decoder_class(model_or_config, text)
    if decoder is not None and not _follows_the_interface(decoder):
        raise ValueError(
            f"{decoder.__name__} computes attention by itself and not through transformers' "
            f"AttentionInterface, so decode steps would miss pages: {INSTEAD}"
        )
    devices = set((getattr(model_or_config, "hf_device_map", None) or {}).values())
    devices -= {"cpu", "disk"}  # offloaded: computed on the other device
    if len(devices) > 1 and getattr(text, "num_kv_shared_layers", None):
        raise ValueError(
            f"the layers of {type(text).__name__} share keys and values, and hf_device_map spreads "
            f"them over {sorted(map(str, devices))}; expected one device: load it on one, or "
            f"{INSTEAD}"
        )


def _decoder_class(model_or_config: Any, text: Any) -> type | None:
    """The class of the decoder; for a configuration alone, the one transformers makes from it."""
    if not isinstance(model_or_config, PreTrainedConfig):
        find = getattr(model_or_config, "get_decoder", None)
        return type((find() if find is not None else None) or model_or_config)
    made = MODEL_MAPPING.get(type(text), None)
    return made[0] if isinstance(made, tuple) else made


def _follows_the_interface(decoder: type) -> bool:
    """transformers judges by the source of its own models; others are left to the handshake."""
    judge = getattr(decoder, "_can_set_attn_implementation", None)
    if judge is None or not decoder.__module__.startswith("transformers."):
        return True
    return bool(judge())
