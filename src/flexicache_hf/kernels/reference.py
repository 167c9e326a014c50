"""What the kernels compute, in plain torch: exact attention over the pages a head group attends to.

This form is the meaning; a kernel for the GPU is a faster way to the same numbers. Query heads of a
KV head (and query tokens, when several are verified at once) are packed as rows of one matrix, so
keys and values are read once per KV head and never repeated.

In the common decode step (one new token, rows of equal length) the pages are laid out so that all
valid tokens come first, and no mask exists. Everything else (rows of different length, several
tokens verified at once) asks `visible_tokens` for one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NO_PAGE = -1


def attend_pages(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one head group.

    Args:
        queries: `[B, H, G, q, D]`: G query heads per KV head, q query tokens.
        keys, values: `[B, H, T, D]`.
        mask: `[B, H, q, T]` bool, True where a token is visible; None if all are.
        scaling: multiplies the dot products.
        softcap: soft limit of the scaled dot products (Gemma 2).
        sinks: `[H, G]` logits of attention sinks (GPT-OSS).

    Returns:
        `[B, H, G, q, D_v]`.
    """
    group, tokens = queries.shape[2:4]
    packed = queries.flatten(2, 3)  # [B, H, G * q, D]
    if mask is not None:
        mask = mask[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(packed, keys, values, mask, scale=scaling)
        return out.unflatten(2, (group, tokens))

    scores = packed @ keys.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks[None, :, :, None].expand(len(scores), -1, -1, tokens).flatten(2, 3)
        scores = torch.cat([scores, column[..., None].to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights[..., : keys.shape[2]].to(values.dtype)
    return (weights @ values).unflatten(2, (group, tokens))


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
