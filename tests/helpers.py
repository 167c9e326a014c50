"""Running a model step by step, and building the tiny ones."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flexicache_hf import FlexiCacheDynamicCache, HeadProfile


def cache_argument(model: Any) -> str:
    """`cache` since transformers 5.24, `past_key_values` before."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@lru_cache
def tiny_llama(
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16 * kv_heads * group,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        initializer_range=0.3,  # attention that differs between tokens, so that page choices matter
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def profile_of(model: Any, *pairs: tuple[int, int]) -> HeadProfile:
    return HeadProfile.from_unstable_heads(model.config, pairs)


def flexicache(model: Any, *pairs: tuple[int, int], **kwargs: Any) -> FlexiCacheDynamicCache:
    """A cache with exactly these unstable heads."""
    return FlexiCacheDynamicCache(model, profile_of(model, *pairs), **kwargs)


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def forward(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of the last position `[B, V]` after feeding `ids` `[B, q]`.

    `mask` `[B, C]` covers everything fed so far, `ids` included.
    """
    kwargs: dict[str, Any] = {cache_argument(model): cache}
    if mask is not None:
        kwargs |= {"attention_mask": mask, "position_ids": positions(mask)[:, -ids.shape[1] :]}
    return model(ids, **kwargs).logits[:, -1]


def decode(
    model: Any,
    cache: Any,
    ids: Tensor,
    steps: int,
    mask: Tensor | None = None,
    tokens: Tensor | None = None,
) -> Tensor:
    """Logits `[steps + 1, B, V]` of a prompt and of every step after it.

    Greedy, unless `tokens` `[B, steps]` says what to feed.
    """
    logits = [forward(model, cache, ids, mask)]
    for step in range(steps):
        fed = logits[-1].argmax(-1)[:, None] if tokens is None else tokens[:, step : step + 1]
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits.append(forward(model, cache, fed, mask))
    return torch.stack(logits)


def random_ids(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padding(length: int, *pads: int) -> Tensor:
    """`[B, length]` mask of rows with that many pad columns on the left."""
    mask = torch.ones(len(pads), length, dtype=torch.long)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask


def generate(model: Any, cache: Any, ids: Tensor | None, new: int = 24, **kwargs: Any) -> Any:
    """`model.generate` of exactly `new` tokens, greedy unless told otherwise, with the logits."""
    kwargs = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | kwargs
    return model.generate(
        ids,
        max_new_tokens=new,
        min_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        **{cache_argument(model): cache},
        **kwargs,
    )
