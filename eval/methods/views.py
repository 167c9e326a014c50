"""What a selector sees: one row of one layer, without padding, and attention computed on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass
class _Row:
    layer: int
    module: Any  # the attention module, for methods that need its projections
    row: int  # row of the batch
    query: Tensor
    keys: Tensor  # [H_kv, T, D], rotated
    values: Tensor  # [H_kv, T, Dv]
    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [H_q], learned attention sinks of the model

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[0] // self.keys.shape[0]

    def per_group(self, per_query_head: Tensor) -> Tensor:
        """`[H_q, ...]` -> `[H_kv, g, ...]`."""
        return per_query_head.unflatten(0, (self.keys.shape[0], self.groups))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """`[H_q, n, D]`, `[H_kv, T, D]` -> `[H_q, n, T]`, scaled and soft-capped."""
        grouped = query.reshape(keys.shape[0], -1, query.shape[-1])
        logits = at_least_float32(grouped @ keys.transpose(1, 2)) * self.scaling
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits.view(query.shape[0], query.shape[1], -1)

    def softmax(self, logits: Tensor) -> Tensor:
        if self.sinks is None:
            return torch.softmax(logits, -1)
        sinks = self.sinks.to(logits.dtype).view(-1, *[1] * (logits.dim() - 1))
        padded = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
        return torch.softmax(padded, -1)[..., :-1]


@dataclass
class Prompt(_Row):
    """The whole prompt of one row at one layer; `query` is `[H_q, T, D]`."""

    def weights(self, start: int, stop: int | None = None, visible: Tensor | None = None) -> Tensor:
        """Causal attention weights of the prompt's queries `start..stop`, `[H_q, n, stop]`, also
        restricted to the positions of `visible` `[n, stop]`."""
        stop = self.length if stop is None else stop
        logits = self.scores(self.query[:, start:stop], self.keys[:, :stop])
        rows = torch.arange(start, stop, device=logits.device)
        hidden = torch.arange(stop, device=logits.device) > rows[:, None]
        if visible is not None:
            hidden |= ~visible
        return self.softmax(logits.masked_fill(hidden, -torch.inf))

    @cached_property
    def received(self) -> Tensor:
        """Attention that each position received from the whole prompt, summed over the queries of
        a group, at least float32 `[H_kv, T]`. Quadratic in T, and the same for every budget."""
        received = at_least_float32(torch.zeros_like(self.keys[..., 0]))
        for start, stop in self.chunks():
            received[:, :stop] += self.per_group(self.weights(start, stop).sum(1)).sum(1)
        return received

    def chunks(self, size: int = 256) -> Iterator[tuple[int, int]]:
        for start in range(0, self.length, size):
            yield start, min(start + size, self.length)


@dataclass
class Step(_Row):
    """One decode step of one row at one layer; `query` is `[H_q, D]`, T counts its own token.

    A method may replace `keys` or `values` before the logits are first read.
    """

    index: int = 0  # s = 1, 2, ...: tokens since the prompt
    token: int = 0  # index of this token inside the current forward
    _cached: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """`[H_q, T]` of all positions, computed once."""
        if self._cached is None:
            self._cached = self.scores(self.query[:, None], self.keys)[:, 0]
        return self._cached

    def weights(self, mask: Tensor | None = None) -> Tensor:
        """Softmax over the positions of `mask` (`[H_kv, T]` or `[H_q, T]`), `[H_q, T]`."""
        if mask is None:
            return self.softmax(self.logits)
        return self.softmax(self.logits.masked_fill(~self.expand(mask), -torch.inf))

    def output(self, weights: Tensor) -> Tensor:
        """`[H_q, T]` weights -> `[H_q, Dv]`."""
        grouped = self.per_group(weights.to(self.values.dtype))
        return (grouped @ self.values).flatten(0, 1)

    def expand(self, mask: Tensor) -> Tensor:
        """A mask per KV head or per query head, as one per query head."""
        if mask.shape[0] == self.query.shape[0]:
            return mask
        return mask.repeat_interleave(self.groups, 0)
