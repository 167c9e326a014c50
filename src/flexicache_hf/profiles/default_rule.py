"""Which profile a cache takes, and which heads count as unstable when there is none."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import FlexiCacheWarning
from ..models.kv_heads import kv_heads
from .profile import HeadProfile

FRACTION = 0.25  # of all KV heads, as in the paper


def default_unstable_heads(
    layers: Sequence[int], depth: int, heads: int, fraction: float = FRACTION
) -> list[tuple[int, int]]:
    """A quarter of the KV heads, in the middle of the stack.

    The rule: go through the tiered layers from the middle of the stack outwards and take the first
    half of each one's heads (rounded up) until a quarter of all heads is taken. In the profiles the
    FlexiCache authors publish, unstable heads crowd in the middle (52 of Llama-3.1-8B's 64 lie in
    layers 7 to 23); which head of a layer it is cannot be guessed.

    Args:
        layers: model layers that are tiered.
        depth: layers of the model.
        heads: KV heads per layer.

    Returns:
        Sorted `(layer, kv_head)` pairs.
    """
    wanted = round(fraction * len(layers) * heads)
    middle = (depth - 1) / 2
    outwards = sorted(layers, key=lambda layer: (abs(layer - middle), layer))
    pairs = [(layer, head) for layer in outwards for head in range((heads + 1) // 2)]
    return sorted(pairs[:wanted])


def choose_profile(
    profile: HeadProfile | str | Path | None, model: Any, config: Any, tiered: list[int]
) -> HeadProfile:
    """The profile that was given, or the model's own, or else the rule's, with a warning.

    Args:
        profile: as `FlexiCacheDynamicCache` takes it, except "auto".
        tiered: model layers that are tiered.

    Raises:
        ValueError: the profile is for another model.
    """
    if isinstance(profile, HeadProfile):
        found = profile
    elif profile is not None:
        found = HeadProfile.from_pretrained(profile)
    elif (own := HeadProfile.for_model(model, hub=False)) is not None:
        found = own
    else:
        text = config.get_text_config(decoder=True)
        heads = max((kv_heads(text, index) for index in tiered), default=kv_heads(text))
        pairs = default_unstable_heads(tiered, text.num_hidden_layers, heads)
        if tiered:
            warnings.warn(
                "no head profile was given: the unstable heads are guessed from their place in the "
                "stack (see default_unstable_heads). Measure them once: flexicache profile collect",
                FlexiCacheWarning,
                stacklevel=3,
            )
        return HeadProfile.from_unstable_heads(config, pairs, rule="middle of the stack")
    found.check(config)
    return found
