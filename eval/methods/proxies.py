"""Training-free stand-ins for DuoAttention's gates.

    python -m eval.methods.proxies [--model DIR] [--out DIR]

writes `<model>.proxy-decay.tsv` and `<model>.proxy-error.tsv`. They are proxies: a table trained as
the paper does it is the published method, and `gates` takes the path of one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexicache_hf.models.versions import cache_argument

from .base import MaskSession, Method, Selector
from .heads import TABLES, model_slug
from .rope import Rope
from .views import Prompt, at_least_float32

SPAN = 500  # positions over which proxy-decay places the mean key


@dataclass
class _Measure(Selector):
    """Collects `[H_kv]` scores per layer and prompt; nothing is ever decoded."""

    scores: dict[int, list[Tensor]] = field(default_factory=dict)

    def begin(self, prompt: Prompt) -> None:
        self.scores.setdefault(prompt.layer, []).append(self.measure(prompt))

    def measure(self, prompt: Prompt) -> Tensor:
        raise NotImplementedError

    def table(self) -> np.ndarray:
        rows = [torch.stack(self.scores[layer]).mean(0) for layer in sorted(self.scores)]
        return torch.stack(rows).double().numpy()


@dataclass
class Decay(_Measure):
    """How early the mass of a head lies when its mean key stands at every position.

    The mean key before RoPE at positions 0..499 and the mean query at 499: the area under the
    cumulative attention, 1 for all mass on the first position. It sees no content.
    """

    rope: Rope | None = None

    def measure(self, prompt: Prompt) -> Tensor:
        assert self.rope is not None
        back = -torch.arange(prompt.length, device=prompt.keys.device)
        keys = self.rope.shift(prompt.keys, back).mean(1, keepdim=True)
        query = self.rope.shift(prompt.query, back).mean(1, keepdim=True)
        placed = self.rope.shift(keys.expand(-1, SPAN, -1), torch.arange(SPAN, device=keys.device))
        logits = prompt.per_group(self.rope.shift(query, SPAN - 1))[:, :, 0] @ placed.mT
        area = torch.softmax(at_least_float32(logits) * prompt.scaling, -1).cumsum(-1).mean(-1)
        return area.mean(1)


@dataclass
class OutputError(_Measure):
    """Relative change of the layer's attention output, through W_o and over the prompt's last
    `answer` tokens, when one KV head attends only `sink` + `recent` tokens."""

    answer: int = 8
    sink: int = 128
    recent: int = 256

    def measure(self, prompt: Prompt) -> Tensor:
        start = prompt.length - self.answer
        at = torch.arange(prompt.length, device=prompt.keys.device)
        distance = at[start:, None] - at
        near = (at < self.sink) | (distance < self.recent)
        full, streamed = (
            prompt.per_group(prompt.weights(start, visible=v))
            @ at_least_float32(prompt.values)[:, None]
            for v in (None, near)
        )  # [H_kv, g, n, Dv]
        heads = full.shape[0]
        matrix = prompt.module.o_proj.weight.to(full.dtype).unflatten(1, (heads, full.shape[1], -1))
        change = torch.einsum("hgnd,ohgd->hno", full - streamed, matrix).norm(dim=-1)
        size = torch.einsum("hgnd,ohgd->no", full, matrix).norm(dim=-1)
        return (change / size).mean(-1)


def measure(model: Any, prompts: Iterable[Tensor], selector: _Measure) -> np.ndarray:
    """The table `[L, H_kv]` that `selector` measures over token ids `[1, T]`."""

    @dataclass(frozen=True)
    class Measuring(Method):
        def selector(self, model: Any) -> Selector:
            return selector

    argument = cache_argument(model)
    with MaskSession(Measuring(budget=1), model) as session, torch.inference_mode():
        for ids in prompts:
            model(ids.to(model.device), **{argument: session.new_cache()}, logits_to_keep=1)
    return selector.table()


def filler(tokenizer: Any) -> Tensor:
    """Token ids `[T]` of a long text that every Python carries: its language reference."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]


def passkey_prompts(tokenizer: Any, count: int, length: int, seed: int = 0) -> list[Tensor]:
    """`count` prompts of `length` tokens of filler with a pass key at a depth from 5 to 60 %, and
    the question and the answer at the end; the answer is the last 8 tokens or more."""
    text, rng, prompts = filler(tokenizer), random.Random(seed), []

    def encode(string: str) -> Tensor:
        return tokenizer(string, add_special_tokens=False, return_tensors="pt").input_ids[0]

    for index in range(count):
        key = "".join(rng.choices("123456789", k=8))
        needle = encode(f"\nThe pass key is {key}. Remember it: {key} is the pass key.\n")
        end = encode(f"\nWhat is the pass key? The pass key is {key}")
        room = length - len(needle) - len(end)
        start = rng.randrange(len(text) - room)
        hay, depth = text[start : start + room], 0.05 + 0.55 * index / max(1, count - 1)
        at = int(depth * room)
        prompts.append(torch.cat([hay[:at], needle, hay[at:], end])[None])
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="local directory; the embedded model by default")
    parser.add_argument("--out", type=Path, default=TABLES)
    parser.add_argument("--texts", type=int, default=50, help="texts of 1000 tokens (decay)")
    parser.add_argument("--prompts", type=int, default=16, help="pass-key prompts (error)")
    parser.add_argument("--length", type=int, default=1500, help="tokens of a pass-key prompt")
    args = parser.parse_args()
    if args.model:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        from flexicache_hf.models.embedded import load_model

        model, tokenizer = load_model()

    text = filler(tokenizer)
    step = (len(text) - 1000) // args.texts
    windows = [text[None, i * step : i * step + 1000] for i in range(args.texts)]
    prompts = passkey_prompts(tokenizer, args.prompts, args.length)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, inputs, selector in (
        ("proxy-decay", windows, Decay(rope=Rope(model))),
        ("proxy-error", prompts, OutputError()),
    ):
        path = args.out / f"{model_slug(model.config)}.{name}.tsv"
        np.savetxt(path, measure(model, inputs, selector), fmt="%.6f", delimiter="\t")
        print(path)


if __name__ == "__main__":
    main()
