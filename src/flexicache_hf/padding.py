"""What an attention mask says about padding."""

from __future__ import annotations

import torch
from torch import Tensor


def read_mask(mask: Tensor, new: int, lengths: tuple[int, ...]) -> tuple[Tensor | None, bool, bool]:
    """What a mask says: which new columns are tokens (None for all), whether it shows exactly what
    is stored, and whether it tells of padding at all: a causal mask that shows every column is what
    transformers makes when nobody gave it a padding mask.

    A mask that says more (another one for each head, a bias) never shows exactly what is stored.

    Args:
        mask: `[B or 1, 1 or H_q, q, C]` bool or additive (the least number or -inf where hidden),
            or `[B, C]`.
        new: the last `new` of the C columns are new.
        lengths: tokens stored per row.
    """
    last = mask[:, None] if mask.ndim == 2 else mask[:, :, -1]  # [B, H, C]: of the last query
    plain = last.shape[1] == 1
    if mask.ndim == 2 or last.dtype == torch.bool:
        visible = last.bool()
    else:
        visible = last > torch.finfo(last.dtype).min / 2
        plain = plain and not last.masked_fill(~visible, 0).any()
    visible = visible.any(1)
    fresh = visible[:, -new:]
    counts = visible.sum(-1).tolist()
    if min(counts) == visible.shape[-1]:
        return None, plain, not plain
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
    agrees = plain and all_kept and all(c - new == held for c, held in zip(counts, stored))
    return (None if all_kept else fresh.cpu()), agrees, True
