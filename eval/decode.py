"""Greedy decoding by plain forwards, the same loop for every method.

Position ids are always given: a cache that dropped tokens would otherwise yield wrong ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexicache_hf.models.versions import cache_argument

CHUNK = 32  # tokens a forward, where a method takes several decode steps in one


@torch.no_grad()
def forward(
    model: Any, cache: Any, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int = 1
) -> Tensor:
    """Logits `[B, keep, V]` (float32) of the last `keep` of the tokens `ids` `[B, n]`.

    positions: `[B, n]`; mask: `[B, T]` over cached and new tokens, None without padding.
    """
    arguments = {"input_ids": ids, "position_ids": positions, "use_cache": True}
    if mask is not None:
        arguments["attention_mask"] = mask
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = keep
    logits: Tensor = model(**arguments, **{cache_argument(model): cache}).logits
    return logits[:, -keep:].float()


class Stream:
    """One sequence in a cache: prefill once, then decode steps."""

    def __init__(self, model: Any, cache: Any, length: int = 0, several_steps: bool = False):
        self.model = model
        self.cache = cache
        self.length = length
        self.several_steps = several_steps  # n tokens in one forward count as n decode steps

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Logits `[V]` after the prompt `ids`."""
        return self._forward(ids, 1)[0]

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Logits `[len(ids), V]` after each of the tokens `ids`, every one a decode step."""
        size = CHUNK if self.several_steps else 1
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        return torch.cat([self._forward(part, len(part)) for part in parts])

    def _forward(self, ids: Sequence[int], keep: int) -> Tensor:
        device = self.model.device
        positions = torch.arange(self.length, self.length + len(ids), device=device)[None]
        tokens = torch.tensor([list(ids)], device=device)
        self.length += len(ids)
        return forward(self.model, self.cache, tokens, positions, None, keep)[0]


def next_token(logits: Tensor, banned: Sequence[int] = ()) -> int:
    """The most likely token that is not banned; `logits` is `[V]`."""
    if banned:
        logits = logits.index_fill(-1, torch.tensor(list(banned), device=logits.device), -torch.inf)
    return int(logits.argmax())


def complete(
    stream: Stream, logits: Tensor, stop: set[int], max_new: int, min_new: int = 0
) -> list[int]:
    """Greedy continuation after `logits` `[V]`, without the stop token that ended it."""
    found: list[int] = []
    while True:
        token = next_token(logits, sorted(stop) if len(found) < min_new else ())
        if token in stop:
            return found
        found.append(token)
        if len(found) == max_new:
            return found
        logits = stream.feed([token])[-1]


def complete_batch(
    model: Any,
    cache: Any,
    prompts: Sequence[Sequence[int]],
    stop: set[int],
    max_new: int,
    min_new: int = 0,
) -> list[list[int]]:
    """Greedy continuations of left-padded prompts of different length, all prefilled at once.

    Rows that have ended go on with padding until the last one ends; their texts do not change.
    """
    device, longest = model.device, max(map(len, prompts))
    pads = [longest - len(ids) for ids in prompts]
    pad = min(stop, default=0)
    ids = torch.tensor([[pad] * n + list(p) for n, p in zip(pads, prompts)], device=device)
    mask = torch.tensor([[0] * n + [1] * len(p) for n, p in zip(pads, prompts)], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    attention = mask if any(pads) else None
    while True:
        logits = forward(model, cache, ids, positions, attention)[:, -1]
        tokens = [pad] * len(prompts)
        for row in sorted(open_rows):
            banned = sorted(stop) if len(found[row]) < min_new else ()
            token = next_token(logits[row], banned)
            if token in stop:
                open_rows.discard(row)
                continue
            found[row].append(token)
            tokens[row] = token
            if len(found[row]) == max_new:
                open_rows.discard(row)
        if not open_rows:
            return found
        ids = torch.tensor(tokens, device=device)[:, None]
        positions = positions[:, -1:] + 1
        if attention is not None:
            attention = torch.cat([attention, attention.new_ones(len(prompts), 1)], -1)
