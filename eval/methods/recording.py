"""A dense prompt run once for several methods.

Every method that `replays` starts from the same queries, keys and values, so that a table of
ten methods needs one prefill and not ten:

    prompt, logits = record(model, input_ids)
    with method.session(model) as session:
        cache = session.new_cache(prompt)  # as if the model had just been run on the prompt
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexicache_hf.models.versions import cache_argument

from .base import MaskSession, Method, Selector
from .cache import MaskCache
from .views import Prompt


class Recorder(Selector):
    """Its states are the prompts themselves."""

    def begin(self, prompt: Prompt) -> Prompt:
        return prompt


@dataclass(frozen=True)
class _Recording(Method):
    def selector(self, model: Any) -> Selector:
        return Recorder()


@torch.no_grad()
def record(model: Any, input_ids: Tensor, **inputs: Any) -> tuple[MaskCache, Tensor]:
    """Run the prompt `[B, T]` densely: what replays it, and the logits `[B, V]` after it.

    Takes the memory of the queries on top of a dense cache until it is dropped.
    """
    with MaskSession(_Recording(budget=1), model) as session:
        cache = session.new_cache()
        inputs |= {cache_argument(model): cache, "logits_to_keep": 1, "use_cache": True}
        logits: Tensor = model(input_ids, **inputs).logits[:, -1]
    return cache, logits
