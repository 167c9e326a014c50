"""ShadowKV: low-rank keys on the device, values on the host, chunks chosen by their mean key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Method, Selector
from .ledger import Footprint
from .rope import Rope
from .views import Prompt, Step, at_least_float32

PAPER_RANK = 160 / (8 * 128)  # of Llama-3.1-8B's keys, all KV heads side by side


@dataclass(frozen=True)
class ShadowKV(Method):
    """Keys of the prompt before RoPE, all KV heads side by side, are kept at rank `rank` (None: the
    paper's 160 of 1024, in proportion). A step takes budget / chunk chunks by the mean rotated key,
    with rebuilt keys and exact values. Outlier chunks, the last chunks of the prompt and every
    generated token are exact and always attended, on top of the budget.

    `outliers` is in chunks per 1024 tokens of budget; those whose keys are least like their mean.
    """

    chunk: int = 8
    rank: int | None = None
    outliers: int = 24
    local_chunks: int = 4

    name: ClassVar[str] = "shadowkv"
    title: ClassVar[str] = "ShadowKV"
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.21465"
    gqa: ClassVar[str] = "KV head; softmax over chunks per query head, max over the group"
    accounting: ClassVar[str] = (
        "budget = tokens of the chosen chunks; outlier, local and generated tokens come on top in "
        "attended and resident; moved = values of newly chosen chunks (half a token each); "
        "metadata = low-rank keys and landmarks"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1 or self.budget % self.chunk:
            raise ValueError(
                f"budget is {self.budget} tokens, expected a multiple of chunk ({self.chunk})"
            )
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank is {self.rank}, expected at least 1")

    @property
    def outlier_chunks(self) -> int:
        return round(self.outliers * self.budget / 1024)

    def selector(self, model: Any) -> Selector:
        return ShadowKVSelector(self, Rope(model))


@dataclass
class Shadow:
    keys: Tensor  # [H_kv, T', D], rebuilt and rotated, of the chunks that have a landmark
    landmarks: Tensor  # [H_kv, C, D]; zero where the chunk is an outlier
    outlier: Tensor  # bool [H_kv, C]
    rank: int
    chosen: Tensor | None = None  # bool [H_kv, C], the last step's
    fetched: int | Tensor = 0  # chunks the current step chose anew, over all heads


@dataclass(frozen=True)
class ShadowKVSelector(Selector):
    method: ShadowKV
    rope: Rope

    def begin(self, prompt: Prompt) -> Shadow:
        method, keys = self.method, prompt.keys
        chunks = max(prompt.length // method.chunk - method.local_chunks, 0)
        chunked = keys[:, : chunks * method.chunk].unflatten(1, (chunks, method.chunk))
        landmarks = chunked.mean(2)
        likeness = F.cosine_similarity(chunked, landmarks[:, :, None], dim=-1).amin(-1)
        count = min(method.outlier_chunks, chunks)
        outlier = torch.zeros_like(likeness, dtype=torch.bool)
        outlier.scatter_(1, likeness.topk(count, -1, largest=False).indices, True)
        width = keys.shape[0] * keys.shape[2]
        rank = min(method.rank or round(PAPER_RANK * width), width, prompt.length)
        rebuilt = self._low_rank(keys, rank)[:, : chunks * method.chunk]
        return Shadow(rebuilt, landmarks.masked_fill(outlier[..., None], 0), outlier, rank)

    def _low_rank(self, keys: Tensor, rank: int) -> Tensor:
        at = torch.arange(keys.shape[1], device=keys.device)
        flat = self.rope.shift(keys, -at).transpose(0, 1).flatten(1)  # [T, H_kv D]
        wide = at_least_float32(flat)
        # The right singular vectors, from the H_kv D x H_kv D Gram matrix.
        basis = torch.linalg.eigh(wide.mT @ wide).eigenvectors[:, -rank:]
        rebuilt = (wide @ basis @ basis.mT).to(keys.dtype)
        return self.rope.shift(rebuilt.unflatten(1, (keys.shape[0], -1)).transpose(0, 1), at)

    def select(self, step: Step, state: Shadow) -> Tensor:
        method, covered = self.method, state.keys.shape[1]
        chosen = self._choose(step, state)
        state.fetched = (chosen if state.chosen is None else chosen & ~state.chosen).sum()
        state.chosen = chosen
        rebuilt = chosen.repeat_interleave(method.chunk, 1)
        exact = state.outlier.repeat_interleave(method.chunk, 1)
        step.keys = torch.cat(
            [
                torch.where(rebuilt[..., None], state.keys, step.keys[:, :covered]),
                step.keys[:, covered:],
            ],
            1,
        )
        return F.pad(rebuilt | exact, (0, step.length - covered), value=True)

    def _choose(self, step: Step, state: Shadow) -> Tensor:
        scores = step.per_group(step.query) @ state.landmarks.transpose(1, 2) * step.scaling
        scores = at_least_float32(scores).masked_fill(state.outlier[:, None], -torch.inf)
        scores = scores.softmax(-1).amax(1).masked_fill(state.outlier, -1)
        count = min(self.method.budget // self.method.chunk, scores.shape[-1])
        best = scores.topk(count, -1).indices
        return torch.zeros_like(state.outlier).scatter_(1, best, True) & ~state.outlier

    def footprint(self, step: Step, state: Shadow, mask: Tensor) -> Footprint:
        heads, _, dim = step.keys.shape
        covered, chunks = state.keys.shape[1], state.landmarks.shape[1]
        low_rank = covered * state.rank / heads + state.rank * dim
        return Footprint(
            resident=mask.sum() / heads,
            moved=0.5 * self.method.chunk * state.fetched / heads,
            metadata=low_rank + chunks * dim,
        )
