"""Running methods on tiny models, and looking at what they select."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import cache_argument, positions, tiny_llama
from torch import Tensor

from eval.methods import Method, Tokens, build, names
from eval.methods.base import Selector
from eval.methods.views import Prompt, Step

SPARSE = [name for name in names() if name != "dense"]
MASKED = [name for name in names() if name != "flexicache"]


@lru_cache
def gates_file(layers: int, heads: int) -> str:
    path = Path(tempfile.mkdtemp()) / "gates.tsv"
    np.savetxt(path, np.random.default_rng(0).random((layers, heads)), delimiter="\t")
    return str(path)


def make(name: str, budget: int, model: Any, **options: Any) -> Method:
    """A method that needs nothing but the model: random gates, random unstable heads."""
    if name in ("lserve", "duoattention"):
        config = model.config
        options.setdefault(
            "gates", gates_file(config.num_hidden_layers, config.num_key_value_heads)
        )
    if name.startswith("flexicache"):
        options.setdefault("unstable", "random")
    return build(name, budget, **options)


def small(name: str, budget: int, model: Any, **options: Any) -> Method:
    """The same with windows small enough that `budget` bites on short prompts."""
    scaled: dict[str, dict[str, Any]] = {
        "lserve": {"page": 16, "sub_page": 4, "sink": 8, "local": 16},
        "duoattention": {"sink": 4, "recent": 16},
        "quest": {"page": 8},
        "oracle": {"page": 8},
        "random": {"page": 8},
        "streaming-pages": {"page": 8},
        "flexicache": {"page_size": 8, "sink_pages": 1, "recent_pages": 1},
        "flexicache-mask": {"page_size": 8, "sink_pages": 1, "recent_pages": 1},
        "snapkv": {"window": 8},
        "infinigen": {"alpha": 1.0},
        "shadowkv": {"chunk": 4, "local_chunks": 1, "rank": 16},
        "infllm": {"init": 4, "local": 12, "block": 4, "execution": 24, "representatives": 2},
        "scissorhands": {"history": 20, "recent": 4},
    }
    return make(name, budget, model, **(scaled.get(name, {}) | options))


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits `[B, n, V]`; `mask` covers everything fed so far."""
    kwargs: dict[str, Any] = {cache_argument(model): cache}
    if mask is not None:
        kwargs |= {"attention_mask": mask, "position_ids": positions(mask)[:, -ids.shape[1] :]}
    return model(ids, **kwargs).logits


def steps(model: Any, cache: Any, ids: Tensor, prompt: int, mask: Tensor | None = None) -> Tensor:
    """Logits `[B, T - prompt + 1, V]` of the prompt's end and of one forward per later token."""
    seen = [None if mask is None else mask[:, :end] for end in range(ids.shape[1] + 1)]
    logits = [feed(model, cache, ids[:, :prompt], seen[prompt])[:, -1:]]
    for at in range(prompt, ids.shape[1]):
        logits.append(feed(model, cache, ids[:, at : at + 1], seen[at + 1]))
    return torch.cat(logits, 1)


def run(
    model: Any, method: Method, ids: Tensor, prompt: int, mask: Tensor | None = None
) -> tuple[Tensor, Tokens]:
    with method.session(model) as session:
        logits = steps(model, session.new_cache(), ids, prompt, mask)
        return logits, session.tokens()


def dense_logits(model: Any, ids: Tensor, prompt: int) -> Tensor:
    with torch.no_grad():
        return model(ids).logits[:, prompt - 1 :]


class Spy(Selector):
    """Passes everything on and keeps the masks: `masks[layer][s - 1]`, of row 0."""

    def __init__(self, inner: Selector) -> None:
        self.inner = inner
        self.masks: dict[int, list[Tensor]] = defaultdict(list)
        self.states: dict[int, Any] = {}

    def adjust_prompt(self, prompt: Prompt, output: Tensor) -> None:
        self.inner.adjust_prompt(prompt, output)

    def begin(self, prompt: Prompt) -> Any:
        self.states[prompt.layer] = self.inner.begin(prompt)
        return self.states[prompt.layer]

    def select(self, step: Step, state: Any) -> Tensor:
        mask = self.inner.select(step, state)
        if step.row == 0:
            self.masks[step.layer].append(mask.clone())
        return mask

    def after(self, step: Step, state: Any, weights: Tensor) -> None:
        self.inner.after(step, state, weights)

    def footprint(self, step: Step, state: Any, mask: Tensor) -> Any:
        return self.inner.footprint(step, state, mask)


def spied(model: Any, method: Method, ids: Tensor, prompt: int) -> Spy:
    """What `method` selects at every layer and step after a prompt of `prompt` tokens."""
    with method.session(model) as session:
        spy = session._selector = Spy(session._selector)
        steps(model, session.new_cache(), ids, prompt)
    return spy


def a_step(query: Tensor, keys: Tensor, layer: int = 0, index: int = 1) -> Step:
    """A step by hand: `[H_q, D]`, `[H_kv, T, D]`."""
    return Step(
        layer=layer,
        module=None,
        row=0,
        query=query,
        keys=keys,
        values=keys,
        scaling=1.0,
        softcap=None,
        sinks=None,
        index=index,
    )


def a_prompt(query: Tensor, keys: Tensor, layer: int = 0) -> Prompt:
    """A prompt by hand: `[H_q, T, D]`, `[H_kv, T, D]`."""
    return Prompt(
        layer=layer,
        module=None,
        row=0,
        query=query,
        keys=keys,
        values=keys,
        scaling=1.0,
        softcap=None,
        sinks=None,
    )


def model_of(layers: int = 4, kv_heads: int = 2, group: int = 3) -> Any:
    """In float64, so that two ways to the same selection differ by nothing but rounding."""
    return tiny_llama(layers=layers, kv_heads=kv_heads, group=group, dtype=torch.float64)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
