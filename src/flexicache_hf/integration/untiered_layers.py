"""Layers that stay transformers' own (sliding, linear, dummy), when the whole cache changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from transformers.cache_utils import CacheLayerMixin


def cropped_layer(layer: Any, number: int, left: int, remove: int, stopped: bool) -> Any:
    """A copy of `layer` after a crop; the layer itself stays as it is, so that a cache whose last
    layer cannot be cropped has not lost a token of the first.

    Args:
        layer: one of transformers' own.
        number: its place in the model, for the message.
        left: columns that stay.
        remove: columns that go.
        stopped: the last forward did not come to its end; layers may or may not have seen it.

    Raises:
        RuntimeError: the layer cannot go back.
    """
    counts = isinstance(layer, CacheLayerMixin)  # it knows how many tokens it has seen
    linear = hasattr(layer, "conv_states")
    if (linear and stopped) or (linear and remove and not _can_go_back(layer)):
        why = (
            "cannot tell whether it took part in the forward that was interrupted"
            if stopped
            else "holds a recurrent state, which knows no past"
        )
        raise RuntimeError(
            f"layer {number} ({type(layer).__name__}) {why}: start over with cache.reset()"
        )
    twin = copy.copy(layer)
    if linear:
        twin.conv_states = dict(layer.conv_states)
    if not counts:
        twin.crop(-remove)
    elif layer.is_initialized:
        twin.crop(min(left - layer.get_seq_length(), 0))
    for held, needed in _held_and_needed(twin):
        if held < min(needed, left):
            raise RuntimeError(
                f"layer {number} ({type(layer).__name__}) has kept {held} of the "
                f"{min(needed, left)} tokens before the one to go back to, because it records its "
                "past from one crop to the next only: crop less, or start over with cache.reset()"
            )
    return twin


def _held_and_needed(layer: Any) -> Iterator[tuple[int, int]]:
    """Tokens a layer holds, and those that its next forward reads.

    transformers takes what is left, however little, and answers wrongly from there on.
    """
    if getattr(layer, "is_sliding", False) and layer.is_initialized:
        yield layer.keys.shape[-2], layer.sliding_window - 1
    for number, state in getattr(layer, "conv_states", {}).items():
        if state is not None:
            yield state.shape[-1], layer.conv_kernel_size[number]


def _can_go_back(layer: Any) -> bool:
    """transformers crops the convolution and leaves a recurrent state as it is."""
    return not (layer.record_past and any(layer.is_recurrent_states_initialized.values()))
