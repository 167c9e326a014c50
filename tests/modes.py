"""Everything that is done with a cache: a way to generate, or a loop that changes it on the way.

A mode takes a model and an empty cache of any kind, and returns tensors that tell all it found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import helpers
import torch
from helpers import cache_argument, decode, forward, left_padding, random_ids
from torch import Tensor

from flexicache_hf import FlexiCacheDynamicCache

LENGTH, NEW = 61, 9  # tokens of a prompt, and after it
COVERED = {"token_budget": 1024}  # more than any mode feeds
SPARSE = {"token_budget": 32, "page_size": 4, "rerank_interval": 4}


def generate(model: Any, cache: Any, ids: Tensor | None, new: int = NEW, **kwargs: Any):
    """The text and the logits of every step."""
    torch.manual_seed(7)
    output = helpers.generate(model, cache, ids, new, **kwargs)
    return [output.sequences, *output.logits]


def generated(rows: int, *, padded: bool = False, repeats: int = 1, **kwargs: Any):
    """Mode: one call of generate()."""

    def mode(model: Any, cache: Any) -> list[Tensor]:
        ids = random_ids(rows, LENGTH // repeats, seed=2).repeat(1, repeats)
        given = dict(kwargs)
        if padded:
            given["attention_mask"] = left_padding(ids.shape[1], 0, 13, 40)[:rows]
        return generate(model, cache, ids, **given)

    return mode


def with_a_draft_model(model: Any, cache: Any) -> list[Tensor]:
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():  # so that it is sometimes wrong
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    draft.generation_config.num_assistant_tokens = 3
    return generate(model, cache, random_ids(1, LENGTH), assistant_model=draft)


def with_embeddings(model: Any, cache: Any) -> list[Tensor]:
    ids = random_ids(2, LENGTH)
    embeddings = model.get_input_embeddings()(ids).detach()
    return generate(model, cache, None, inputs_embeds=embeddings)


def several_turns(model: Any, cache: Any) -> list[Tensor]:
    ids, found = random_ids(2, LENGTH), []
    for turn in range(2):
        mask = torch.ones_like(ids)  # an answer may hold the padding token
        found += generate(model, cache, ids, 6, attention_mask=mask)
        ids = torch.cat([found[-7], random_ids(2, 5, seed=turn)], 1)
    return found


def copied_prefix(model: Any, cache: Any) -> list[Tensor]:
    prefix, found = random_ids(1, LENGTH), []
    found.append(forward(model, cache, prefix))
    for seed in range(2):
        whole = torch.cat([prefix, random_ids(1, 5, seed=seed)], 1)
        found += generate(model, copy.deepcopy(cache), whole, 6)
    return found


def rows_fanned_out(model: Any, cache: Any) -> list[Tensor]:
    found, tokens = [forward(model, cache, random_ids(2, LENGTH))], random_ids(4, 12, seed=3)
    cache.batch_repeat_interleave(2)
    found.append(decode(model, cache, tokens[:, :1], 5, None, tokens[:, 1:6]))
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    return [*found, decode(model, cache, tokens[:3, 6:7], 5, None, tokens[:3, 7:])]


def cropped(model: Any, cache: Any) -> list[Tensor]:
    """Within the newest page, over several, and into the prompt; never further than the forward
    before, because sliding windows and convolutions record no more."""
    cache.activate_past_recording()
    tokens, found = random_ids(2, 30, seed=3).split((1, 1, 1, 1, 12, 1, 5, 1, 7), 1), []
    for new, removed in zip((random_ids(2, LENGTH), *tokens), (2, 0, 1, 0, 0, 9, 0, 3, 0, 0)):
        found.append(forward(model, cache, new))
        cache.crop(-removed)
    return found


def last_logits_of_several(model: Any, cache: Any) -> list[Tensor]:
    """Logits of some of the new tokens only: layers that share keys then compute no others."""
    name, found = cache_argument(model), []
    cache.activate_past_recording()
    if isinstance(cache, FlexiCacheDynamicCache):
        cache._shared.guarded = False  # as if given the configuration alone: a few tokens verify
    for fed, kept in ((LENGTH, 3), (4, 2), (1, 1), (5, 1), (3, 3)):
        with torch.no_grad():
            ids = random_ids(2, fed, seed=fed)
            found.append(model(ids, logits_to_keep=kept, **{name: cache}).logits)
        cache.crop(0)
    return found


def reset_and_again(model: Any, cache: Any) -> list[Tensor]:
    found = generate(model, cache, random_ids(2, LENGTH), 6)
    cache.reset()
    return found + generate(model, cache, random_ids(3, LENGTH + 4, seed=4), 6)


def own_loop(model: Any, cache: Any) -> list[Tensor]:
    """Left-padded rows, with a mask and explicit positions."""
    ids, tokens = random_ids(3, LENGTH), random_ids(3, 20, seed=3)
    return [decode(model, cache, ids, 20, left_padding(LENGTH, 0, 17, 40), tokens)]


def own_loop_in_chunks(model: Any, cache: Any) -> list[Tensor]:
    """A left-padded prompt, whose first chunk is all padding in a row."""
    ids, tokens, found = random_ids(3, LENGTH), random_ids(3, 8, seed=3), []
    mask = left_padding(LENGTH, 0, 17, 40)
    for begin, end in ((0, 20), (20, 40), (40, LENGTH)):
        logits = forward(model, cache, ids[:, begin:end], mask[:, :end])
        found.append(logits[mask[:, end - 1].bool()])  # of padding they mean nothing
    mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
    return [*found, decode(model, cache, tokens[:, :1], 7, mask, tokens[:, 1:])]


Mode = Callable[[Any, Any], list[Tensor]]
MODES: dict[str, Mode] = {
    "greedy": generated(3, padded=True),
    "sampling": generated(2, do_sample=True, top_k=20, num_return_sequences=2),
    "beam search": generated(2, padded=True, num_beams=3, num_return_sequences=2),
    "beam sampling": generated(1, num_beams=3, do_sample=True),
    "chunks": generated(1, prefill_chunk_size=7),
    "last chunk of one": generated(2, prefill_chunk_size=LENGTH - 1),
    "prompt lookup": generated(1, repeats=5, prompt_lookup_num_tokens=4),
    "draft model": with_a_draft_model,
    "embeddings": with_embeddings,
    "several turns": several_turns,
    "copied prefix": copied_prefix,
    "rows fanned out": rows_fanned_out,
    "crop": cropped,
    "last logits": last_logits_of_several,
    "reset": reset_and_again,
    "own loop": own_loop,
    "own loop in chunks": own_loop_in_chunks,
}
