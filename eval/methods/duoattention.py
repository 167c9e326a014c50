"""DuoAttention: full cache for retrieval heads, sinks and recent tokens for streaming heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Method, Selector
from .heads import PROXIES, load_gates, retrieval_heads
from .ledger import Footprint
from .streamingllm import sink_and_recent
from .views import Step


@dataclass(frozen=True)
class DuoAttention(Method):
    """The prompt is dense (one chunk); the window of the streaming heads moves along in decode.

    `gates` is a table's path or "proxy-decay" / "proxy-error" (see `heads`): only a table trained
    for the model makes this the published method.
    """

    gates: str = "proxy-error"
    sparsity: float = 0.5
    sink: int = 64
    recent: int = 256
    seed: int = 0

    name: ClassVar[str] = "duoattention"
    title: ClassVar[str] = "DuoAttention"
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.10819"
    gqa: ClassVar[str] = "KV head; a fixed split"
    accounting: ClassVar[str] = (
        "the budget is not used: retrieval heads attend and keep T tokens, streaming heads "
        "sink + recent; attended = resident = (1-sparsity) T + sparsity min(T, sink + recent)"
    )

    def notes(self) -> list[str]:
        return [self.gates] if self.gates in PROXIES else []

    def selector(self, model: Any) -> Selector:
        gates = load_gates(self.gates, model.config)
        return DuoSelector(self, retrieval_heads(gates, self.sparsity, self.seed))


@dataclass(frozen=True)
class DuoSelector(Selector):
    method: DuoAttention
    retrieval: Tensor  # bool [L, H_kv]

    def select(self, step: Step, state: Any) -> Tensor:
        device = step.keys.device
        window = sink_and_recent(step.length, self.method.sink, self.method.recent, device)
        return self.retrieval[step.layer].to(device)[:, None] | window

    def footprint(self, step: Step, state: Any, mask: Tensor) -> Footprint:
        return Footprint(resident=mask.sum() / len(mask))


def streaming_prompt(
    query: Tensor, keys: Tensor, values: Tensor, sink: int, local: int, scaling: float
) -> Tensor:
    """Causal attention `[H_q, T, Dv]` over the first `sink` and the last `local` positions."""
    length = keys.shape[1]
    at = torch.arange(length, device=keys.device)
    distance = at[:, None] - at
    mask = (distance >= 0) & ((distance < local) | (at < sink))
    groups = query.shape[0] // keys.shape[0]
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        keys.repeat_interleave(groups, 0),
        values.repeat_interleave(groups, 0),
        attn_mask=mask,
        scale=scaling,
    )
