"""The attention functions registered with transformers: the package's only global state.

One name per implementation that a model may have had before: the name says where everything goes
that is not ours (prompts, other caches, no cache, vision towers). The names avoid the words that
transformers reacts to ("flash", "sdpa", "paged|", "org/repo").
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask

from ..tiers.attend import BaseAttention
from .checks import check_unchanged
from .compiled import attend
from .layer import FlexiCacheLayer

NAMES = {
    "sdpa": "flexicache",
    "eager": "flexicache_eager",
    "flash_attention_2": "flexicache_fa2",
    "flash_attention_3": "flexicache_fa3",
}
"""The model's own implementation -> the name that replaces it."""


def _sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    # No mask means causal, counted from the first token. Layers that share keys (of Gemma 4) ask
    # with a prompt's last few tokens only, and the model minds that under the name "sdpa" alone.
    if mask is None and getattr(module, "is_kv_shared_layer", False):
        mask = _mask_of_last(query.shape[2], key.shape[2], kwargs.get("position_ids"), key.device)
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    return out


def _mask_of_last(
    queries: int, keys: int, positions: Tensor | None, device: torch.device
) -> Tensor | None:
    """Causal mask `[1, 1, q, K]` of a prompt's last queries; None if they are all it has, or see
    everything. A static cache has more keys than the prompt's."""
    tokens = positions.shape[-1] if positions is not None else queries
    if queries == tokens or (queries == 1 and tokens == keys):
        return None
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(tokens - queries)
    return visible[None, None]


def _eager(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    # every modeling file has its own: with sinks, soft caps, or whatever the architecture needs
    own: BaseAttention = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return own(module, *args, **kwargs)


def _flash(implementation: str) -> BaseAttention:
    def attend(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # transformers loads the kernel by the name on module.config, which is ours
        stand_in = _Renamed(module, implementation)
        out: tuple[Tensor, None] = flash_attention_forward(stand_in, *args, **kwargs)
        return out

    return attend


class _Renamed:
    """A module whose configuration names another attention implementation."""

    def __init__(self, module: torch.nn.Module, implementation: str) -> None:
        self._module = module
        self.config = SimpleNamespace(_attn_implementation=implementation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attention_over(
    base: BaseAttention, ignored: frozenset[str]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def flexicache_attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`query` `[B, H_q, q, D]`; `key`, `value` as the cache returned them."""
        layer = kwargs.pop("flexi_layer", None) or getattr(key, "_flexi_layer", None)
        if not isinstance(layer, FlexiCacheLayer):
            return base(module, query, key, value, attention_mask, **kwargs)
        if layer.linked and torch.compiler.is_compiling():
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
            place = layer.number, getattr(module, "layer_idx", layer.index) == layer.index
            out = attend(query, key, value, attention_mask, *place, scaling, softcap, sinks)
            return out, None
        check_unchanged(layer, key, value)
        return layer.attend(module, query, attention_mask, base, ignored, **kwargs)

    return flexicache_attention


def register() -> None:
    """Make our names known to transformers; done when the package is imported."""
    for implementation, base, mask in (
        ("sdpa", _sdpa, sdpa_mask),
        ("eager", _eager, eager_mask),
        ("flash_attention_2", _flash("flash_attention_2"), flash_attention_mask),
        ("flash_attention_3", _flash("flash_attention_3"), flash_attention_mask),
    ):
        # sdpa computes neither; where transformers lets it pass, our decode steps must not either
        ignored = frozenset({"softcap", "s_aux"} if implementation == "sdpa" else ())
        AttentionInterface.register(NAMES[implementation], _attention_over(base, ignored))
        AttentionMaskInterface.register(NAMES[implementation], mask)


def use_flexicache(model_config: Any) -> None:
    """Point the model that reads `model_config` at our attention function.

    Only the text part of a multimodal model changes. Models read the configuration at every
    forward, so this takes effect at once, and for caches of other kinds changes nothing but the
    name: they go on through the model's own function.
    """
    text = model_config.get_text_config(decoder=True)
    current = text._attn_implementation
    if current in NAMES.values():
        return
    if current is None:
        current = "sdpa"
    if current not in NAMES:
        raise ValueError(
            f"the model's attention implementation is {current!r}, expected one of "
            f"{', '.join(NAMES)}: load it with attn_implementation='sdpa' "
            "(or 'eager' where the architecture has no sdpa)"
        )
    text._attn_implementation = NAMES[current]


def restore_attention(model_or_config: Any) -> None:
    """Undo `use_flexicache`, for code that insists on one of transformers' own names."""
    config = getattr(model_or_config, "config", model_or_config)
    text = config.get_text_config(decoder=True)
    for implementation, name in NAMES.items():
        if text._attn_implementation == name:
            text._attn_implementation = implementation
