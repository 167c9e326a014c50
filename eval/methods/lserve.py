"""LServe: streaming heads by gates, and hierarchical page selection for the retrieval heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Method, Selector
from .duoattention import streaming_prompt
from .heads import PROXIES, load_gates, retrieval_heads
from .ledger import Footprint
from .pages import Digest, count_pages, pages_of, to_tokens, top_pages
from .streamingllm import sink_and_recent
from .views import Prompt, Step

MIN_PAGES = 3
PAPER_BUDGET = 4096
SCALED_BELOW = 1024  # budgets under this get the scaled window of (32, 64)


@dataclass(frozen=True)
class LServe(Method):
    """Streaming heads attend `sink + local` tokens. Each query head of a retrieval KV head attends
    budget / page pages: the last one, and those with the best sub-page bound.

    Pages are chosen again when T is a multiple of `interval` (positions, not steps) and reused in
    between with the current last page added. `sink` and `local` default to 128 and 256, and to 32
    and 64 for budgets under 1024, where 384 tokens would be most of the budget. `sparse_prefill`
    also restricts the streaming heads of the prompt, to `sink` and `prefill_local` tokens.
    Runs on unquantised keys, unlike the original.
    """

    page: int = 64
    sub_page: int = 16
    interval: int = 4
    sink: int | None = None
    local: int | None = None
    sparse_prefill: bool = False
    prefill_local: int = 4096
    gates: str = "proxy-error"
    sparsity: float = 0.5
    seed: int = 0

    name: ClassVar[str] = "lserve"
    title: ClassVar[str] = "LServe"
    paper: ClassVar[str] = "https://arxiv.org/abs/2502.14866"
    gqa: ClassVar[str] = "query head (of retrieval KV heads); raw bounds, no group combination"
    accounting: ClassVar[str] = (
        "budget = tokens of a retrieval head (at least 3 pages, one more on reuse across a page "
        "end); streaming heads attend and keep sink + local; resident = T for retrieval heads; "
        "metadata 1/sub_page of dense KV for retrieval heads"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        pages_of(self.budget, self.page)
        if self.sub_page < 1 or self.page % self.sub_page:
            raise ValueError(
                f"sub_page is {self.sub_page}, expected a divisor of the page size {self.page}"
            )
        if self.interval < 1:
            raise ValueError(f"interval is {self.interval}, expected at least 1 token")

    @property
    def window(self) -> tuple[int, int]:
        """(sink, local) of the streaming heads."""
        sink, local = (32, 64) if self.budget < SCALED_BELOW else (128, 256)
        return (
            sink if self.sink is None else self.sink,
            local if self.local is None else self.local,
        )

    def notes(self) -> list[str]:
        notes = [self.gates] if self.gates in PROXIES else []
        notes += ["scaled"] if self.budget < PAPER_BUDGET else []
        return notes + (["sparse prefill"] if self.sparse_prefill else [])

    @property
    def replays(self) -> bool:
        return not self.sparse_prefill

    def selector(self, model: Any) -> Selector:
        gates = load_gates(self.gates, model.config)
        return LServeSelector(self, retrieval_heads(gates, self.sparsity, self.seed))


@dataclass
class LServeState:
    digest: Digest  # of the retrieval heads' sub-pages
    chosen: Tensor | None = None  # bool [R g, N] pages, as chosen last


@dataclass(frozen=True)
class LServeSelector(Selector):
    method: LServe
    retrieval: Tensor  # bool [L, H_kv]

    def adjust_prompt(self, prompt: Prompt, output: Tensor) -> None:
        method = self.method
        streaming = ~self.retrieval[prompt.layer]
        if not method.sparse_prefill or not streaming.any():
            return
        if prompt.length <= method.window[0] + method.prefill_local:
            return
        if prompt.softcap is not None or prompt.sinks is not None:
            raise ValueError(
                "sparse_prefill is not available for models with soft-capped logits or attention "
                "sinks: set sparse_prefill=False"
            )
        sparse = streaming_prompt(
            prompt.per_group(prompt.query)[streaming].flatten(0, 1),
            prompt.keys[streaming],
            prompt.values[streaming],
            method.window[0],
            method.prefill_local,
            prompt.scaling,
        )
        output[:, streaming.repeat_interleave(prompt.groups)] = sparse.transpose(0, 1)

    def begin(self, prompt: Prompt) -> LServeState:
        state = LServeState(Digest(self.method.sub_page))
        state.digest.update(prompt.keys[self.retrieval[prompt.layer]])
        return state

    def select(self, step: Step, state: LServeState) -> Tensor:
        method, retrieval = self.method, self.retrieval[step.layer]
        sink, local = method.window
        window = sink_and_recent(step.length, sink, local, step.keys.device)
        mask = window.repeat(step.query.shape[0], 1)
        if not retrieval.any():
            return mask
        keys = step.keys[retrieval]
        state.digest.update(keys)
        pages = count_pages(step.length, method.page)
        if state.chosen is None or step.length % method.interval == 0:
            state.chosen = self._choose(step, keys, state.digest, pages)
        attended = F.pad(state.chosen, (0, pages - state.chosen.shape[-1]))
        attended[:, -1] = True
        heads = retrieval.repeat_interleave(step.groups)
        mask[heads] = to_tokens(attended, method.page, step.length)
        return mask

    def _choose(self, step: Step, keys: Tensor, digest: Digest, pages: int) -> Tensor:
        count = max(MIN_PAGES, self.method.budget // self.method.page)
        query = step.per_group(step.query)[self.retrieval[step.layer]]
        scores = digest.scores(query, keys).flatten(0, 1)
        subs = self.method.page // self.method.sub_page
        scores = F.pad(scores, (0, pages * subs - scores.shape[-1]), value=-torch.inf)
        last = torch.arange(pages, device=scores.device) == pages - 1
        return top_pages(scores.unflatten(-1, (pages, subs)).amax(-1), count, last)

    def footprint(self, step: Step, state: LServeState, mask: Tensor) -> Footprint:
        fraction = float(self.retrieval[step.layer].float().mean())
        streaming = min(step.length, sum(self.method.window))
        subs = count_pages(step.length, self.method.sub_page)
        return Footprint(
            resident=fraction * step.length + (1 - fraction) * streaming,
            metadata=fraction * 2 * subs * step.keys.shape[-1],
        )
