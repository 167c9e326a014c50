"""Decode speed of FlexiCache against transformers' DynamicCache, in one process, alternating.

Both caches hold the same prompts; blocks of decode steps are timed in turn, and the ratio is taken
block by block, so that a machine whose speed drifts cannot favour either. A third cache, of the
first few tokens alone, tells what the model costs without any context: no cache can be faster.

    python scripts/bench_decode.py --context 8000 --batch 1 4
    python scripts/bench_decode.py --dtype bfloat16 --batch 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache, FlexiCacheWarning
from flexicache_hf.models.embedded import load_model, reference_text
from flexicache_hf.models.versions import cache_argument

CPU = Path("/proc/cpuinfo")


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Tensor) -> Tensor:
    output = model(ids, logits_to_keep=1, **{cache_argument(model): cache})
    return output.logits[:, -1].argmax(-1, keepdim=True)


def prompts(tokenizer: Any, rows: int, length: int) -> Tensor:
    """`[rows, length]` different stretches of one real text."""
    ids = tokenizer(reference_text())["input_ids"]
    step = max((len(ids) - length) // max(rows, 1), 1)
    return torch.tensor([ids[row * step : row * step + length] for row in range(rows)])


@torch.no_grad()
def fill(model: Any, caches: dict[str, Any], ids: Tensor) -> dict[str, Tensor]:
    """Random keys and values instead of the prompt's, the same for all caches: its attention, which
    no decode step depends on, takes minutes on a CPU."""
    text, (rows, length) = model.config, ids.shape
    for index, layer in enumerate(model.model.layers):
        shape = rows, text.num_key_value_heads, length, text.head_dim
        keys, values = (torch.randn(shape, dtype=model.dtype) for _ in range(2))
        query = torch.randn(rows, text.num_attention_heads, 1, text.head_dim, dtype=model.dtype)
        for name, cache in caches.items():
            cache.update(keys, values, index)
            if name == "flexicache":
                whole = query.expand(-1, -1, length, -1)
                cache.layers[index].attend(layer.self_attn, whole, None, no_attention)
    return dict.fromkeys(caches, ids[:, -1:])


def no_attention(module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return query.transpose(1, 2), None


def compare(
    model: Any,
    ids: Tensor,
    config: FlexiCacheConfig,
    blocks: int,
    steps: int,
    synthetic: bool = False,
) -> dict[str, Any]:
    caches = {
        "dense": DynamicCache(config=model.config),
        "flexicache": FlexiCacheDynamicCache(model, config=config),
    }
    token = fill(model, caches, ids) if synthetic else {}
    caches["floor"] = DynamicCache(config=model.config)
    prefill, times = {}, {name: [] for name in caches}
    for name, cache in caches.items():
        if name in token:
            continue
        begin = time.perf_counter()
        token[name] = feed(model, cache, ids[:, :8] if name == "floor" else ids)
        prefill[name] = time.perf_counter() - begin
    for block in range(blocks + 1):
        for name, cache in caches.items():
            begin = time.perf_counter()
            for _ in range(steps):
                token[name] = feed(model, cache, token[name])
            if block:  # the first block warms up
                times[name].append((time.perf_counter() - begin) / steps)
    ratios = [d / f for d, f in zip(times["dense"], times["flexicache"], strict=True)]
    usage = caches["flexicache"].memory_usage()
    return {
        "batch": len(ids),
        "context": ids.shape[1],
        "dense_ms": 1e3 * statistics.median(times["dense"]),
        "flexicache_ms": 1e3 * statistics.median(times["flexicache"]),
        "floor_ms": 1e3 * statistics.median(times["floor"]),
        "speedup": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "prefill_dense_s": prefill.get("dense"),
        "prefill_flexicache_s": prefill.get("flexicache"),
        "device_fraction": usage.device_fraction,
        "steps": blocks * steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="decode steps per block")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--synthetic", action="store_true", help="random KV instead of a prompt")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    if CPU.exists() and "AuthenticAMD" in CPU.read_text():
        # Left alone, MKL multiplies a few rows by a matrix at half the speed on these processors.
        # It reads this at its first product; all caches run under the same setting.
        os.environ.setdefault("MKL_CBWR", "AVX2")
    warnings.simplefilter("ignore", FlexiCacheWarning)
    model, tokenizer = load_model(dtype=args.dtype)
    config = FlexiCacheConfig(token_budget=args.budget)
    for rows in args.batch:
        ids = prompts(tokenizer, rows, args.context)
        found = compare(model, ids, config, args.blocks, args.steps, args.synthetic)
        print(json.dumps(found) if args.json else shown(found), flush=True)


def shown(found: dict[str, Any]) -> str:
    line = (
        "batch {batch}, {context} tokens: dense {dense_ms:.1f} ms/step, FlexiCache "
        "{flexicache_ms:.1f} ms/step, {speedup:.2f}x ({speedup_min:.2f}-{speedup_max:.2f} over "
        "blocks), no context {floor_ms:.1f} ms/step; device bytes {device_fraction:.1%} of dense"
    )
    if found["prefill_dense_s"] is not None:
        line += "; prefill {prefill_dense_s:.1f} s and {prefill_flexicache_s:.1f} s"
    return line.format(**found)


if __name__ == "__main__":
    main()
