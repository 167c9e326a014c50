"""What the checks of `check_gpu.py` share: sizes, models, caches, clocks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache, HeadProfile
from flexicache_hf.models.versions import cache_argument
from flexicache_hf.profiles.default_rule import default_unstable_heads

Facts = dict[str, Any]


class CheckFailed(Exception):
    """A check found something else than expected; `facts` say what."""

    def __init__(self, message: str, facts: Facts) -> None:
        super().__init__(message)
        self.facts = facts


def expect(condition: bool, message: str, facts: Facts) -> None:
    if not condition:
        raise CheckFailed(message, facts)


@dataclass(frozen=True)
class Sizes:
    """How large the measured model and its contexts are."""

    layers: int = 32  # Llama-3.1-8B's
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128_256
    budget: int = 1024
    long_prompt: int = 32_768
    contexts: tuple[int, ...] = (8192, 32_768)
    batches: tuple[int, ...] = (1, 4)
    blocks: int = 4
    steps: int = 16  # decode steps per block: every layer ranks once
    copy_bytes: int = 256 * 2**20
    small_layers: int = 4  # of the model whose results are compared
    small_hidden: int = 512

    @classmethod
    def tiny(cls) -> Sizes:
        """To test the checks themselves, on a CPU."""
        model = {"layers": 4, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
        cost = {"long_prompt": 1600, "contexts": (300,), "batches": (1, 2), "copy_bytes": 2**20}
        small = {"small_layers": 2, "small_hidden": 64}
        return cls(**model, **cost, **small, vocabulary=97, budget=128, blocks=1, steps=4)


@dataclass
class Bench:
    """The device under test and its models; `large` is built when first asked for."""

    device: torch.device
    sizes: Sizes

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def small(self, dtype: torch.dtype, device: torch.device | None = None) -> LlamaForCausalLM:
        """A model whose attention differs between tokens, the same on every device."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=self.sizes.small_hidden,
            intermediate_size=256,
            num_hidden_layers=self.sizes.small_layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            initializer_range=0.1 if self.sizes.small_hidden > 64 else 0.3,
        )
        return LlamaForCausalLM(config).to(device or self.device, dtype).eval()

    @cached_property
    def large(self) -> LlamaForCausalLM:
        """Llama-3.1-8B's shapes, random weights, bfloat16; made on the device."""
        sizes = self.sizes
        config = LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            max_position_embeddings=131_072,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        return model.eval()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def collect(self) -> None:
        """Free what nobody holds."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Device bytes in live tensors; 0 on a CPU, which does not count them."""
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def requested(self) -> int:
        """The same without the allocator's rounding."""
        if not self.cuda:
            return 0
        return torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]

    def peak_while(self, work: Callable[[], Any]) -> int:
        """The most device bytes that `work` held above what was there before; 0 on a CPU."""
        self.collect()
        before = self.allocated()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        held = work()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before if self.cuda else 0
        del held
        return peak

    def milliseconds(self, work: Callable[[], Any]) -> float:
        """Time until the device has done `work`, by CUDA events or the clock."""
        if not self.cuda:
            begin = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - begin)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


def profile_of(model: Any) -> HeadProfile:
    """A quarter of all heads, by the package's rule for models without a profile."""
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    pairs = default_unstable_heads(range(layers), layers, heads)
    return HeadProfile.from_unstable_heads(config, pairs)


def tiered(model: Any, config: FlexiCacheConfig, **kwargs: Any) -> FlexiCacheDynamicCache:
    return FlexiCacheDynamicCache(model, profile_of(model), config=config, **kwargs)


def dense(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def random_ids(rows: int, length: int, vocabulary: int, seed: int = 1) -> Tensor:
    """On the CPU, so that every device gets the same."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (rows, length), generator=made)


@torch.no_grad()
def forward(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits `[B, V]` of the last position; `mask` `[B, C]` covers all columns fed so far."""
    kwargs: Facts = {cache_argument(model): cache, "logits_to_keep": 1}
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        kwargs |= {
            "attention_mask": mask.to(model.device),
            "position_ids": positions.to(model.device),
        }
    return model(ids.to(model.device), **kwargs).logits[:, -1]


def decode(
    model: Any, cache: Any, ids: Tensor, tokens: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Logits `[steps + 1, B, V]` of a prompt and of the given next tokens `[B, steps]`."""
    logits = [forward(model, cache, ids, mask)]
    for step in range(tokens.shape[1]):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits.append(forward(model, cache, tokens[:, step : step + 1], mask))
    return torch.stack(logits)


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [float("nan")])
