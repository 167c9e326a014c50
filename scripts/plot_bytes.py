"""Device bytes of the cache against context length, beside a dense cache: a table and a plot.

The keys and values are synthetic, the cache is real: every byte it allocates is counted, slack
included, after a prompt of that length and a few decode steps.

    python scripts/plot_bytes.py --out docs/bytes.png
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig

from flexicache_hf import FlexiCacheDynamicCache, HeadProfile, MemoryUsage

LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
GREY, BLUE, ORANGE, GREEN = "#7f7f7f", "#0072b2", "#e69f00", "#009e73"  # told apart by everyone


def smollm2_shapes() -> LlamaConfig:
    config = LlamaConfig(
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576
    )
    config._attn_implementation = "sdpa"
    return config


def usage_at(length: int, budget: int) -> MemoryUsage:
    """Bytes after `length` tokens, the last 8 of them decoded."""
    config = smollm2_shapes()
    profile = HeadProfile.for_model("HuggingFaceTB/SmolLM2-135M-Instruct", hub=False)
    assert profile is not None
    cache = FlexiCacheDynamicCache(config, profile, token_budget=budget)
    for new in (length - 8, *[1] * 8):
        for layer in cache.layers:
            keys = torch.ones(1, 3, new, 64, dtype=torch.float16)
            layer.update(keys, keys.clone())
            query = torch.ones(1, 9, 1, 64, dtype=torch.float16)
            layer.attend(torch.nn.Identity(), query, None, _no_attention)
    usage = cache.memory_usage()
    del cache
    gc.collect()
    return usage


def _no_attention(
    module: Any, query: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2), None


def plot(rows: list[tuple[int, MemoryUsage]], path: Path) -> None:
    lengths = [length for length, _ in rows]
    dense = [usage.dense_equivalent / 2**20 for _, usage in rows]
    parts = {
        "unstable heads: all pages": ([u.resident_pages for _, u in rows], BLUE),
        "stable heads: working set": ([u.working_set for _, u in rows], ORANGE),
        "digests and tables": ([u.metadata + u.tables for _, u in rows], GREEN),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    left.plot(lengths, dense, color=GREY, marker="o", label="dense (DynamicCache)")
    ours = [usage.device / 2**20 for _, usage in rows]
    left.plot(lengths, ours, color=BLUE, marker="o", label="FlexiCache")
    left.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="MiB on the device")
    left.legend(frameon=False)
    below = [0.0] * len(rows)
    for label, (values, colour) in parts.items():
        share = [100 * v / u.dense_equivalent for v, (_, u) in zip(values, rows, strict=True)]
        top = [a + b for a, b in zip(below, share, strict=True)]
        right.fill_between(lengths, below, top, color=colour, label=label, linewidth=0)
        below = top
    right.axhline(100, color=GREY, linestyle="--", linewidth=1)
    right.set(xscale="log", ylim=(0, 112), xlabel="context (tokens)", ylabel="% of dense")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("docs/bytes.png"))
    args = parser.parse_args()
    rows = []
    print(f"{'tokens':>8} {'dense MiB':>10} {'device MiB':>11} {'of dense':>9} {'host MiB':>9}")
    for length in LENGTHS:
        usage = usage_at(length, args.budget)
        rows.append((length, usage))
        dense, device, host = (
            each / 2**20 for each in (usage.dense_equivalent, usage.device, usage.host)
        )
        print(
            f"{length:>8} {dense:>10.1f} {device:>11.1f} {usage.device_fraction:>9.1%} {host:>9.1f}"
        )
    plot(rows, args.out)
    print(f"plot: {args.out}")


if __name__ == "__main__":
    main()
