"""One of two processes that hold half of a model each; run by test_placement.py through torchrun.

Arguments: directory of the model, directory for what this rank saw.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import decode, left_padding, random_ids
from transformers import AutoModelForCausalLM, DynamicCache

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache, HeadProfile, HostMemoryError

PAIRS = [(0, 0), (1, 1), (1, 3), (2, 2), (2, 3)]  # ranks hold different numbers of unstable heads
SPARSE = {"token_budget": 56, "page_size": 8, "rerank_interval": 4}
COVERED = {"token_budget": 256}


def results(model) -> dict[str, object]:
    """Logits `[steps + 1, B, V]` of three caches, and what the sparse one did."""
    profile = HeadProfile.from_unstable_heads(model.config, PAIRS)
    ids, mask, tokens = random_ids(2, 90), left_padding(90, 0, 23), random_ids(2, 40, seed=5)
    dense = decode(model, DynamicCache(config=model.config), ids, 40, mask, tokens)
    covered = FlexiCacheDynamicCache(model, profile, **COVERED)
    sparse = FlexiCacheDynamicCache(model, profile, **SPARSE)
    return {
        "dense": dense,
        "covered": decode(model, covered, ids, 40, mask, tokens),
        "sparse": decode(model, sparse, ids, 40, mask, tokens),
        "unstable": [
            layer.groups[1].heads.tolist()
            for layer in sparse.layers  # numbers within the rank
        ],
        "promoted": sparse.stats().total.promoted,
    }


def _message(model, cache) -> str:
    try:
        decode(model, cache, random_ids(1, 90), 0)
    except (ValueError, HostMemoryError) as error:
        return str(error)
    return ""


def main(directory: str, out: str) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto").eval()
    profile = HeadProfile.from_unstable_heads(model.config, PAIRS)
    found = results(model)
    alone = FlexiCacheDynamicCache(model.config, profile, **SPARSE)
    found["configuration alone"] = _message(model, alone)
    found["cached after the refusal"] = alone.get_seq_length()
    found["auto"] = _message(model, FlexiCacheDynamicCache(model, "auto", **SPARSE))
    limited = FlexiCacheConfig(token_budget=32, host_memory_limit=1)
    found["host limit"] = _message(model, FlexiCacheDynamicCache(model, profile, config=limited))
    torch.save(found, Path(out) / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
