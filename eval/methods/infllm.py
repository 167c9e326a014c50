"""InfLLM: a local window, and blocks of the distant past looked up by representative tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Method, Selector
from .growing import Growing
from .ledger import Footprint
from .rope import Rope
from .views import Prompt, Step, at_least_float32

PAPER_INIT, PAPER_LOCAL, PAPER_BLOCK, PAPER_BLOCKS = 128, 4096, 128, 16
PAPER_BUDGET = PAPER_INIT + PAPER_LOCAL + PAPER_BLOCK * PAPER_BLOCKS
SCALED_BLOCK = 16


@dataclass(frozen=True)
class InfLLM(Method):
    """A query attends the first `init` tokens, the last `local` ones, and the blocks whose
    representatives its heads together match best; a block not yet full is attended whole.

    Tokens that have left the window are seen from a constant distance of `local`. A block is looked
    up by the mean of its `representatives`: those of its tokens that received most attention while
    in the window, before RoPE. The prompt is streamed by the same rule, `execution` tokens at a
    time, which share a lookup; `sparse_prefill=False` leaves it dense.

    From a budget of 6,272 tokens on, init, local and block are the paper's 128, 4096 and 128. Under
    it a block is 16 tokens, init is one, and local takes two thirds of the others, as in the paper.
    """

    init: int | None = None
    local: int | None = None
    block: int | None = None
    representatives: int = 4
    execution: int = 512
    sparse_prefill: bool = True

    name: ClassVar[str] = "infllm"
    title: ClassVar[str] = "InfLLM"
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.04617"
    gqa: ClassVar[str] = (
        "layer; products summed over all query heads, representatives per query head"
    )
    accounting: ClassVar[str] = (
        "budget = init + local + looked-up blocks; the block that is not full yet comes on top; "
        "attended = resident; moved = tokens of blocks that the step before did not attend; "
        "metadata = block keys of every query head, and attention received"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        init, local, block = self.layout
        if init < 0 or local < 1 or block < 1:
            raise ValueError(
                f"init is {init}, local is {local} and block is {block}, expected at least 0, 1, 1"
            )
        blocks = self.budget - init - local
        if blocks < block or blocks % block:
            raise ValueError(
                f"budget is {self.budget} tokens, of which init ({init}) and local ({local}) leave "
                f"{blocks}, expected a positive multiple of block ({block})"
            )
        if not 1 <= self.representatives <= block:
            raise ValueError(
                f"representatives is {self.representatives}, expected 1 to {block}, the tokens of "
                "a block"
            )
        if self.execution < 1:
            raise ValueError(f"execution is {self.execution}, expected at least 1 token")

    @property
    def layout(self) -> tuple[int, int, int]:
        """(init, local, block) in tokens."""
        if self.budget >= PAPER_BUDGET:
            init, local, block = PAPER_INIT, PAPER_LOCAL, PAPER_BLOCK
        else:
            block = SCALED_BLOCK if self.block is None else self.block
            init = block
            local = round((self.budget // max(block, 1) - 1) * 2 / 3) * block
        return (
            init if self.init is None else self.init,
            local if self.local is None else self.local,
            block if self.block is None else self.block,
        )

    @property
    def blocks(self) -> int:
        """Blocks looked up by a query."""
        init, local, block = self.layout
        return (self.budget - init - local) // block

    @property
    def replays(self) -> bool:
        return not self.sparse_prefill

    def notes(self) -> list[str]:
        scaled = self.layout != (PAPER_INIT, PAPER_LOCAL, PAPER_BLOCK)
        return ["scaled"] * scaled + ["dense prefill"] * (not self.sparse_prefill)

    def selector(self, model: Any) -> Selector:
        return InfLLMSelector(self, Rope(model))


@dataclass
class Memory:
    """The past of one row at one layer."""

    bare: Growing = field(default_factory=Growing)  # keys before RoPE, [H_kv, T, D]
    received: Tensor | None = None  # weight received inside the window, float32 [H_q, T]
    block_keys: Growing = field(default_factory=Growing)  # before RoPE, [H_q, N, D]
    chosen: Tensor | None = None  # the blocks of the last lookup, sorted
    fetched: int = 0  # blocks of it that the lookup before did not have

    @property
    def blocks(self) -> int:
        return self.block_keys.length


@dataclass(frozen=True)
class InfLLMSelector(Selector):
    method: InfLLM
    rope: Rope

    def adjust_prompt(self, prompt: Prompt, output: Tensor) -> None:
        if self.method.sparse_prefill:
            self._stream(prompt, output)

    def begin(self, prompt: Prompt) -> Memory:
        if self.method.sparse_prefill:
            return self._stream(prompt, None)
        state = self._empty(prompt)
        for start, stop in prompt.chunks():
            self._receive(state, prompt.weights(start, stop), torch.arange(stop), start)
        return state

    def _empty(self, prompt: Prompt) -> Memory:
        state = Memory()
        at = torch.arange(prompt.length, device=prompt.keys.device)
        state.bare.append(self.rope.shift(prompt.keys, -at))
        state.received = at_least_float32(torch.zeros_like(prompt.query[..., 0]))
        return state

    def _stream(self, prompt: Prompt, output: Tensor | None) -> Memory:
        """The state after the prompt, whose attention is written to `output` `[T, H_q, Dv]`."""
        state, local = self._empty(prompt), self.method.layout[1]
        device = prompt.keys.device
        for start in range(0, prompt.length, self.method.execution):
            stop = min(start + self.method.execution, prompt.length)
            query, rows = prompt.query[:, start:stop], torch.arange(start, stop, device=device)
            at = self._attended(state, query, start, stop).nonzero()[:, 0]
            distance = rows[:, None] - at
            near = prompt.scores(query, prompt.keys[:, at])
            far = prompt.scores(self._far(query, rows), state.bare.view[:, at])
            logits = torch.where(distance < local, near, far)
            weights = prompt.softmax(logits.masked_fill(distance < 0, -torch.inf))
            self._receive(state, weights, at, start)
            if output is not None:
                grouped = prompt.per_group(weights.to(prompt.values.dtype)).flatten(1, 2)
                mixed = grouped @ prompt.values[:, at]  # [H_kv, g n, Dv]
                output[start:stop] = mixed.view(len(query), len(rows), -1).transpose(0, 1)
        return state

    def _far(self, query: Tensor, rows: Tensor) -> Tensor:
        """Queries `[H, n, D]` of positions `rows` as they see bare keys: `local` tokens away."""
        return self.rope.shift(query, self.method.layout[1] - rows)

    def _receive(self, state: Memory, weights: Tensor, at: Tensor, start: int) -> None:
        """Books what queries `start, start + 1, ...` gave the positions `at` in their windows;
        `weights` is `[H_q, n, len(at)]`."""
        assert state.received is not None
        at = at.to(weights.device)
        rows = torch.arange(start, start + weights.shape[1], device=weights.device)
        inside = rows[:, None] - at < self.method.layout[1]
        state.received[:, at] += (weights * inside).sum(1)

    def _attended(self, state: Memory, query: Tensor, start: int, stop: int) -> Tensor:
        """Bool `[stop]` of what the queries `[H_q, n, D]` of positions `start` to `stop` attend,
        causality aside. Blocks are formed from what the first of them no longer has in its window.
        """
        init, local, block = self.method.layout
        self._form(state, (start - local + 1 - init) // block)
        mask = torch.ones(stop, dtype=torch.bool, device=query.device)
        mask[init : init + state.blocks * block] = False
        before, state.chosen = state.chosen, None
        if not state.blocks:
            return mask
        rows = torch.arange(start, stop, device=query.device)
        lookup = self._far(query, rows).mean(1, keepdim=True)
        scores = at_least_float32(lookup @ state.block_keys.view.transpose(1, 2)).sum((0, 1))
        chosen = scores.topk(min(self.method.blocks, state.blocks)).indices.sort().values
        known = 0 if before is None else int(torch.isin(chosen, before).sum())
        state.chosen, state.fetched = chosen, len(chosen) - known
        tokens = chosen[:, None] * block + torch.arange(block, device=query.device) + init
        mask[tokens.flatten()] = True
        return mask

    def _form(self, state: Memory, count: int) -> None:
        """Forms blocks until there are `count`."""
        init, _, block = self.method.layout
        if count <= state.blocks:
            return
        assert state.received is not None
        span = slice(init + state.blocks * block, init + count * block)
        received = state.received[:, span].unflatten(1, (-1, block))
        best = received.topk(self.method.representatives, -1).indices[..., None]
        bare = state.bare.view[:, span].unflatten(1, (-1, block))
        bare = bare.repeat_interleave(len(received) // len(bare), 0)
        state.block_keys.append(bare.gather(2, best.expand(-1, -1, -1, bare.shape[-1])).mean(2))

    def select(self, step: Step, state: Memory) -> Tensor:
        assert state.received is not None
        now = step.length - 1
        state.fetched = 0
        state.bare.append(self.rope.shift(step.keys[:, now:], -now))
        state.received = F.pad(state.received, (0, step.length - state.received.shape[1]))
        mask = self._attended(state, step.query[:, None], now, step.length)
        past = mask[: max(now - self.method.layout[1] + 1, 0)].nonzero()[:, 0]
        if len(past):
            # Their keys, turned to where the query sees them from; the query stays as it is.
            moved = self.rope.shift(state.bare.view[:, past], now - self.method.layout[1])
            step.keys = step.keys.index_copy(1, past, moved)
        return mask.expand(step.keys.shape[0], -1)

    def after(self, step: Step, state: Memory, weights: Tensor) -> None:
        everything = torch.arange(step.length, device=weights.device)
        self._receive(state, weights[:, None], everything, step.length - 1)

    def footprint(self, step: Step, state: Memory, mask: Tensor) -> Footprint:
        window = min(step.length, self.method.layout[1])
        return Footprint(
            resident=mask[0].sum(),
            moved=state.fetched * self.method.layout[2],
            metadata=step.groups * (state.blocks * step.keys.shape[-1] + window),
        )
