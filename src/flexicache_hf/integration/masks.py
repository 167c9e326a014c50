"""What an attention mask says about padding."""

from __future__ import annotations

import torch
from torch import Tensor


def read_mask(mask: Tensor, new: int, lengths: tuple[int, ...]) -> tuple[Tensor | None, bool, bool]:
    """What a mask says: which new columns are tokens (None for all), whether its last query sees
    exactly what is stored, and whether it tells of padding at all: a causal mask that shows every
    column is what transformers makes when nobody gave it a padding mask.

    A new column that no query sees is padding. A mask that says more (another one for each head, a
    bias) never shows exactly what is stored.

    Args:
        mask: `[B or 1, 1 or H_q, q, C]` bool or additive (the least number or -inf where hidden),
            or `[B, C]`.
        new: the last `new` of the C columns are new.
        lengths: tokens stored per row.
    """
    shown, plain = _shown(mask, slice(-1, None))
    visible = shown[:, -1]
    if min(visible.sum(-1).tolist()) == visible.shape[-1]:
        return None, plain, not plain
    earlier, fresh = visible[:, :-new].sum(-1).tolist(), visible[:, -new:]
    if new > 1 and mask.ndim == 4 and not fresh.all():
        fresh = _shown(mask, slice(None))[0][..., -new:].any(1)
    kept = fresh.sum(-1).tolist()
    if len(kept) == 1 and len(lengths) > 1:  # one mask for all rows
        earlier, kept = earlier * len(lengths), kept * len(lengths)
        fresh = fresh.expand(len(lengths), -1)
    stored = lengths or (0,) * len(kept)
    if len(stored) == len(kept):
        for row, (count, held) in enumerate(zip(earlier, stored, strict=True)):
            if count > held:
                raise ValueError(
                    f"attention_mask shows {count} earlier tokens in row {row}, but the cache "
                    f"holds {held}: tokens that were padding when fed are not stored"
                )
    all_kept = min(kept) == new
    agrees = plain and all_kept and tuple(earlier) == tuple(stored)
    return (None if all_kept else fresh.cpu()), agrees, True


def is_causal(mask: Tensor, new: int) -> bool:
    """Whether the `new` queries see the same but for each other, and of each other what came before
    (not so in a tree of candidates)."""
    if mask.ndim == 2 or new == 1:
        return True
    shown, _ = _shown(mask, slice(-new, None))
    causal = torch.ones(new, new, dtype=torch.bool, device=mask.device).tril()
    alike = (shown[..., :-new] == shown[:, -1:, :-new]).all()
    return bool(alike & (shown[..., -new:] == causal).all())


def _shown(mask: Tensor, queries: slice) -> tuple[Tensor, bool]:
    """Which columns a mask shows to some of its queries, `[B, q, C]`, and whether it says no more:
    one mask for all heads, and no bias."""
    if mask.ndim == 2:
        return mask[:, None].bool(), True
    rows, plain = mask[:, :, queries], mask.shape[1] == 1
    if mask.dtype == torch.bool:
        return rows.any(1), plain
    shown = rows > torch.finfo(mask.dtype).min / 2
    return shown.any(1), plain and not rows.masked_fill(~shown, 0).any()
