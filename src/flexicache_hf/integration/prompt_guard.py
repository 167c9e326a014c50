"""What generate() knows and a cache does not: where the prompt ends, and which text is cached.

A cache sees keys, never token ids, so it cannot tell a continued conversation from an unrelated
prompt, nor a prompt's last one-token chunk from a decode step. `prepare_inputs_for_generation`
sees both, before every forward. The guard wraps that method on one model object; it only watches,
and only caches of ours.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor


def guard_prompts(model: Any) -> bool:
    """Watch the prompts that `model.generate` feeds to our caches; returns whether that works.

    Watching a model twice is the same as watching it once.
    """
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return False
    if isinstance(prepare, partial) and prepare.func is _prepare:
        return True
    # a partial over the model, not a closure: copy.deepcopy(model) then guards the copy
    watching = partial(_prepare, model)
    watching.__signature__ = inspect.signature(prepare)  # type: ignore[attr-defined]
    model.prepare_inputs_for_generation = watching
    return True


def _prepare(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    from ..cache import FlexiCacheDynamicCache

    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if isinstance(cache, FlexiCacheDynamicCache):
        # generate() says how many of the ids are new if it passes all of them; a chunk of a prompt,
        # or a new part without the text before it, comes without that number
        whole = kwargs.get("next_sequence_length") is not None
        first = bool(kwargs.get("is_first_iteration"))
        cache._shared.prefilling = first or not whole
        if input_ids is not None and kwargs.get("inputs_embeds") is None:
            _check_continues(cache, input_ids, whole, first)
    prepare = type(model).prepare_inputs_for_generation
    return prepare(model, input_ids, *args, **kwargs)


def _check_continues(cache: Any, ids: Tensor, whole: bool, first: bool) -> None:
    """Raises ValueError unless `ids` continue the cached text; remembers them."""
    cache._table.check_whole()
    held = cache.get_seq_length()
    known = cache._prompt_ids
    if first and held and whole:
        if known is not None and len(known) != len(ids):
            raise ValueError(
                f"the prompt has {len(ids)} rows, but the cache holds {len(known)}: use a new "
                "cache, or cache.reset()"
            )
        if ids.shape[1] <= held:
            raise ValueError(
                f"the prompt has {ids.shape[1]} tokens, but the cache already holds {held}: pass "
                "the whole text so far and the new part, or use a new cache, or cache.reset()"
            )
        if known is not None:
            count = min(held, known.shape[1])  # an own loop may have fed more since
            if not torch.equal(known[:, :count].to(ids.device), ids[:, :count]):
                raise ValueError(
                    f"the prompt does not begin with the {held} tokens this cache holds: it "
                    "belongs to another text. Use a new cache, or cache.reset()"
                )
    if whole or not held:
        cache._prompt_ids = ids
    elif known is not None and len(known) == len(ids) and known.shape[1] >= held:
        cache._prompt_ids = torch.cat([known[:, :held].to(ids.device), ids], 1)
    else:
        cache._prompt_ids = None
