"""Turning keys to other positions, with the model's own rotary embedding."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


class Rope:
    """Rotary positions of one model. Rotations add up: a key turned by position 7 and then by -7
    is the key before RoPE.

    Raises:
        ValueError: the model has no rotary embedding, or not one for all layers.
    """

    def __init__(self, model: Any) -> None:
        found = [m for m in model.modules() if hasattr(m, "inv_freq")]
        if len(found) != 1:
            raise ValueError(
                f"{type(model).__name__} has {len(found)} plain rotary embeddings, expected 1: "
                "this method moves keys to other positions and needs to know how they are rotated"
            )
        self.rotary = found[0]
        attention = next(m for m in model.modules() if hasattr(m, "layer_idx"))
        self.apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb

    def shift(self, keys: Tensor, by: int | Tensor) -> Tensor:
        """Keys `[H, n, D]` moved `by` positions, one number or one per token `[n]`."""
        by = torch.as_tensor(by, device=keys.device).expand(keys.shape[1])
        cos, sin = self.rotary(keys[None], by[None])
        scale = getattr(self.rotary, "attention_scaling", 1.0)
        return self.apply(keys[None], keys[None], cos / scale, sin / scale)[1][0]
