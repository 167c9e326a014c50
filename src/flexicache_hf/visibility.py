"""Masks of gathered pages: which of their tokens a query may see.

In the common decode step (one new token, rows of equal length) the pages are laid out so that all
valid tokens come first, and no mask exists. Everything else (rows of different length, several
tokens verified at once) asks for a mask here.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_PAGE = -1


def visible_tokens(pages: Tensor, queries: Tensor, page_size: int) -> Tensor:
    """Causal visibility by token position.

    Args:
        pages: `[B, H, n]` page numbers within the row, `NO_PAGE` for holes.
        queries: `[B, q]` positions of the query tokens within the row.

    Returns:
        `[B, H, q, n * P]` bool.
    """
    offsets = torch.arange(page_size, device=pages.device)
    tokens = (pages[..., None] * page_size + offsets).flatten(-2)  # [B, H, n * P]
    present = (pages != NO_PAGE).repeat_interleave(page_size, -1)
    causal = tokens[:, :, None, :] <= queries[:, None, :, None]
    return causal & present[:, :, None, :]
