"""What an attention mask says about padding."""

from __future__ import annotations

import torch
from torch import Tensor


def read_mask(mask: Tensor, new: int, lengths: tuple[int, ...]) -> tuple[Tensor | None, bool, bool]:
    """What a mask says: which new columns are tokens (None for all), whether it shows exactly what
    is stored, and whether it tells of padding at all: a causal mask that shows every column is what
    transformers makes when nobody gave it a padding mask.

    Args:
        mask: `[B or 1, 1, q, C]` bool or additive (0 where visible), or `[B, C]`.
        new: the last `new` of the C columns are new.
        lengths: tokens stored per row.
    """
    last = mask if mask.ndim == 2 else mask[:, 0, -1]  # [B, C]: what the last query may see
    visible = last.bool() if last.dtype == torch.bool or mask.ndim == 2 else last >= 0
    fresh = visible[:, -new:]
    counts = visible.sum(-1).tolist()
    if min(counts) == visible.shape[-1]:
        return None, True, False
    kept = fresh.sum(-1).tolist()
    if len(counts) == 1 and len(lengths) > 1:  # one mask for all rows
        counts, kept, fresh = (
            counts * len(lengths),
            kept * len(lengths),
            fresh.expand(len(lengths), -1),
        )
    stored = lengths or (0,) * len(counts)
    if len(stored) == len(counts):
        for row, (count, mine, held) in enumerate(zip(counts, kept, stored, strict=True)):
            if count - mine > held:
                raise ValueError(
                    f"attention_mask shows {count - mine} earlier tokens in row {row}, but the "
                    f"cache holds {held}: tokens that were padding when fed are not stored"
                )
    all_kept = min(kept) == new
    agrees = all_kept and all(c - new == held for c, held in zip(counts, stored))
    return (None if all_kept else fresh.cpu()), agrees, True
