"""What a tiered layer refuses, before anything has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import AttentionNotLinked, InterruptedForward
from .cache_state import Shared

if TYPE_CHECKING:
    from .layer import FlexiCacheLayer


def check_unchanged(layer: FlexiCacheLayer, keys: Tensor, values: Tensor) -> None:
    """Raises unless the attention function got the very tensors that update() returned."""
    marks = getattr(keys, "_flexi_layer", None), getattr(values, "_flexi_layer", None)
    if marks[0] is layer and marks[1] is layer:
        return
    layer.pending = layer.unanswered
    raise AttentionNotLinked(
        f"layer {layer.index}: the model changes keys or values after they were cached (as "
        "DiffLlama and JetMoe do), so attention over pages would not be this model's. Use "
        "transformers' own cache for it."
    )


def check_mask(layer: FlexiCacheLayer, mask: Tensor, columns: int) -> None:
    """Raises unless the mask covers everything cached and new, `columns` columns."""
    if mask.shape[-1] < columns:
        raise AttentionNotLinked(
            f"layer {layer.index}: the attention mask covers {mask.shape[-1]} keys, but there "
            f"are {columns}. The model makes it from what the cache returned (as Doge does), "
            "which is only the new keys and values: use transformers' own cache for it."
        )


def check_new(layer: FlexiCacheLayer, keys: Tensor) -> None:
    """Raises, with nothing changed, if these keys cannot follow what is cached."""
    layer.shared.table.check_whole()
    if not layer.is_initialized:
        held = layer.held_heads(keys)
        if layer.ordinal == 0 and len(held) < layer.config_heads:
            if layer.shared.learner is not None:
                raise ValueError(
                    f"profile is 'auto', but this process holds only {len(held)} of "
                    f"{layer.config_heads} KV heads: give a measured profile instead"
                )
            ranks = layer.config_heads // len(held)
            layer.shared.budget.share = (held.start // len(held), ranks)
    if layer.ordinal == 0 and (layer.columns or layer.pending is not None):
        _check_implementation(layer.shared)
    table = layer.shared.table
    between = layer.ordinal == 0 and table.progress[0] != table.forwards  # stored, but not left
    if layer.torn or between or (layer.pending is not None and layer.linked):
        raise InterruptedForward(
            f"layer {layer.index}: the last forward stopped inside this layer. "
            + (
                "Start over with cache.reset()."
                if layer.torn
                else "Take back its tokens with cache.crop(-n), or call cache.reset()."
            )
        )
    if layer.unanswered is not None and keys.shape[2] == 1:
        raise AttentionNotLinked(
            "the attention function of this cache was never called: the model reads another "
            "config object than the one this cache was given, or it does not use transformers' "
            "AttentionInterface. Pass the model, FlexiCacheDynamicCache(model), or call "
            "model.set_attn_implementation('flexicache')."
        )
    rows = layer.rows or (layer.pending[0].shape[0] if layer.pending is not None else 0)
    if rows and keys.shape[0] != rows:
        raise ValueError(
            f"batch size is {keys.shape[0]}, but this cache holds {rows} rows. Use a new "
            "cache, cache.reset(), or change its rows with cache.batch_select_indices() / "
            "cache.batch_repeat_interleave()."
        )


def _check_implementation(shared: Shared) -> None:
    name = shared.implementation()
    if name is None or not name.startswith("flexicache"):
        raise AttentionNotLinked(
            f"the model's attention implementation is {name!r}, expected 'flexicache': it was "
            "changed after this cache was made, and a decode step would miss pages. Nothing is "
            "lost: call model.set_attn_implementation('flexicache') (or 'flexicache_eager' for "
            "models without sdpa) and go on."
        )


def check_training(layer: FlexiCacheLayer, query: Tensor) -> None:
    """Raises if a gradient would have to flow into what is cached."""
    if layer.columns and query.requires_grad and getattr(layer.module(), "training", False):
        raise ValueError(
            "the model is in training mode, but no gradient flows into what this cache holds: "
            "call model.eval() or use torch.no_grad(), or train without a cache"
        )
