"""Which heads a FlexiCache method treats as unstable: the profile's, or a control's."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from flexicache_hf import HeadProfile
from flexicache_hf.models.kv_heads import kv_heads
from flexicache_hf.profiles.default_rule import default_unstable_heads

Choice = Literal["profile", "none", "all", "random", "most-stable", "rule"]
CHOICES = ("profile", "none", "all", "random", "most-stable", "rule")


def choose_unstable(
    model: Any, choice: Choice, profile: str | None, fraction: float = 0.25, seed: int = 0
) -> HeadProfile:
    """The heads as a profile without measurements.

    "profile": those of `profile` (a file or directory), by default of the profile that belongs to
    the model. "most-stable": as many, from the other end of its stability. "random": as many, or
    `fraction` of all heads if there is no profile. "rule": the cache's guess without a profile.

    Raises:
        ValueError: the choice needs a profile, or something in it, that is not there.
    """
    text = model.config.get_text_config(decoder=True)
    layers = text.num_hidden_layers
    every = [(layer, head) for layer in range(layers) for head in range(kv_heads(text, layer))]
    if choice == "none":
        pairs = []
    elif choice == "all":
        pairs = every
    elif choice == "rule":
        pairs = default_unstable_heads(range(layers), layers, kv_heads(text), fraction)
        pairs = [pair for pair in pairs if pair in every]  # layers with fewer heads than most
    else:
        found = _find(model, profile)
        if choice == "random":
            count = round(fraction * len(every)) if found is None else len(found.unstable_heads)
            drawn = np.random.default_rng(seed).permutation(len(every))[:count]
            pairs = [every[at] for at in drawn]
        elif found is None:
            raise ValueError(
                f"unstable is {choice!r}, but there is no head profile of this model: give its "
                "path as profile, or choose one of 'none', 'all', 'random', 'rule'"
            )
        elif choice == "profile":
            pairs = list(found.unstable_heads)
        else:
            pairs = list(found.ranked_heads()[::-1][: len(found.unstable_heads)])
    return HeadProfile.from_unstable_heads(model.config, pairs)


def _find(model: Any, profile: str | None) -> HeadProfile | None:
    if profile is not None:
        found = HeadProfile.from_pretrained(profile)
        found.check(model.config)
        return found
    return HeadProfile.for_model(model)
