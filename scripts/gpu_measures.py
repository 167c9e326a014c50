"""Checks of `check_gpu.py` that measure: bytes, peaks, speed, bandwidth, overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_setup import Bench, Facts, dense, expect, forward, median, random_ids, tiered
from torch import Tensor

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache
from flexicache_hf.tiers.transfer import BlockCopy, PageCopy, default_queue

PEAK_LIMIT = 0.45  # of the dense cache, for 32 layers
PAGE_BYTES = 4096  # of one page of one head, keys: 16 tokens, 128 dimensions, 2 bytes


def config(bench: Bench, **changes: Any) -> FlexiCacheConfig:
    return FlexiCacheConfig(token_budget=bench.sizes.budget, **changes)


def feed(bench: Bench, cache: FlexiCacheDynamicCache, length: int) -> None:
    """A forward of random keys and values through every layer, without a model around them."""
    sizes = bench.sizes
    dim = sizes.hidden // sizes.heads

    def new(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, dim, dtype=torch.bfloat16, device=bench.device)

    for layer in cache.layers:
        layer.update(new(sizes.kv_heads, length), new(sizes.kv_heads, length))
        query = new(sizes.heads, 1)
        layer.attend(None, query, None, lambda module, q, *_, **__: (q.transpose(1, 2), None))


def pinned_bytes(bench: Bench) -> int:
    """Bytes of pinned memory in use, as the allocator rounds them."""
    if not bench.cuda or not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))


@torch.no_grad()
def reported_bytes(bench: Bench) -> Facts:
    """memory_usage() against what the allocators count."""
    model = bench.large
    bench.collect()
    asked, held, pinned = bench.requested(), bench.allocated(), pinned_bytes(bench)
    cache = tiered(model, config(bench))
    feed(bench, cache, bench.sizes.long_prompt - 20)
    for _ in range(20):
        feed(bench, cache, 1)
    bench.collect()
    usage = cache.memory_usage()
    facts: Facts = {
        "reported": usage.device,
        "requested": bench.requested() - asked,
        "allocated": bench.allocated() - held,
        "device_fraction": usage.device_fraction,
        "host_reported": usage.host,
        "host_pinned": pinned_bytes(bench) - pinned,
    }
    if bench.cuda:
        over = facts["requested"] / usage.device
        expect(0.99 < over < 1.02, "the report and the allocator disagree", facts)
    return facts


@torch.no_grad()
def prefill_peak(bench: Bench) -> Facts:
    """What a long prompt holds at most: the cache alone, and beside a model's activations."""
    length, model = bench.sizes.long_prompt, bench.large
    ids = random_ids(1, length, bench.sizes.vocabulary)

    def prompt(cache: Any) -> Any:
        forward(model, cache, ids)
        return cache

    def alone() -> Any:
        cache = tiered(model, config(bench))
        feed(bench, cache, length)
        return cache

    forward(model, tiered(model, config(bench)), ids[:, :64])  # libraries take their workspaces
    kv = dense_bytes(bench, length)
    facts: Facts = {"tokens": length, "dense_bytes": kv}
    peaks = {
        "alone": bench.peak_while(alone),
        "no_cache": bench.peak_while(
            lambda: model(ids.to(bench.device), use_cache=False, logits_to_keep=1)
        ),
        "dense": bench.peak_while(lambda: prompt(dense(model))),
        "flexicache": bench.peak_while(lambda: prompt(tiered(model, config(bench)))),
    }
    facts["peaks"] = peaks
    facts["fraction_alone"] = peaks["alone"] / kv
    facts["fraction_in_model"] = (peaks["flexicache"] - peaks["no_cache"]) / kv
    if bench.cuda:
        for name in ("fraction_alone", "fraction_in_model"):
            expect(0 < facts[name] < PEAK_LIMIT, f"{name} is not below {PEAK_LIMIT}", facts)
    return facts


def dense_bytes(bench: Bench, length: int) -> int:
    """Bytes of DynamicCache for one row."""
    sizes = bench.sizes
    return 2 * 2 * sizes.layers * sizes.kv_heads * (sizes.hidden // sizes.heads) * length


def decode_speed(bench: Bench, context: int, batch: int) -> Facts:
    """Blocks of decode steps of both caches in turn; the ratio is taken block by block."""
    sizes, model = bench.sizes, bench.large
    prompt = random_ids(batch, context, sizes.vocabulary)
    tokens = random_ids(batch, sizes.steps, sizes.vocabulary, seed=2).to(bench.device)
    caches = {"dense": dense(model), "flexicache": tiered(model, config(bench))}
    times: dict[str, list[float]] = {name: [] for name in caches}
    prefill = {
        name: bench.milliseconds(lambda cache=cache: forward(model, cache, prompt))
        for name, cache in caches.items()
    }

    def block(cache: Any) -> None:
        for step in range(sizes.steps):
            forward(model, cache, tokens[:, step : step + 1])

    for number in range(sizes.blocks + 1):
        for name, cache in caches.items():
            taken = bench.milliseconds(lambda cache=cache: block(cache))
            if number:  # the first block warms up
                times[name].append(taken / sizes.steps)
    ratios = [d / f for d, f in zip(times["dense"], times["flexicache"], strict=True)]
    return {
        "context": context,
        "batch": batch,
        "dense_ms": median(times["dense"]),
        "flexicache_ms": median(times["flexicache"]),
        "speedup": median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "prefill_ms": prefill,
        "device_fraction": caches["flexicache"].memory_usage().device_fraction,
    }


def ranking_cost(bench: Bench) -> Facts:
    """Steps in which all stable heads rank and promote, against those in which none does."""
    sizes, model = bench.sizes, bench.large
    cache = tiered(model, config(bench, stagger=False))
    forward(model, cache, random_ids(1, max(sizes.contexts), sizes.vocabulary))
    tokens = random_ids(1, 48, sizes.vocabulary, seed=2).to(bench.device)
    ranked: list[float] = []
    plain: list[float] = []
    for step in range(tokens.shape[1]):
        at = slice(step, step + 1)
        taken = bench.milliseconds(lambda at=at: forward(model, cache, tokens[:, at]))
        (ranked if cache.stats().current.stable_ranked else plain).append(taken)
    facts: Facts = {
        "ranking_ms": median(ranked[1:]),
        "plain_ms": median(plain[1:]),
        "rankings": len(ranked),
        "promoted": cache.stats().total.promoted,
    }
    expect(len(ranked) > 1 and len(plain) > 1, "steps of both kinds were expected", facts)
    return facts


def bandwidth(bench: Bench) -> Facts:
    """The transfer queue alone: blocks in both directions, and single pages to the device."""
    count = bench.sizes.copy_bytes // PAGE_BYTES
    shape = (count, PAGE_BYTES // 2)
    on_device = torch.ones(shape, dtype=torch.bfloat16, device=bench.device)
    on_host = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=bench.cuda)
    queue = default_queue(bench.device)
    some = min(count, 4096)
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:some]
    slots = torch.arange(some, device=bench.device)
    jobs = {
        "to_host": (BlockCopy(on_host, on_device), bench.sizes.copy_bytes),
        "to_device": (BlockCopy(on_device, on_host), bench.sizes.copy_bytes),
        "pages": (PageCopy(on_device, slots, on_host, pages), some * PAGE_BYTES),
    }
    facts: Facts = {"page_copies": some}
    for name, (job, size) in jobs.items():

        def copy(job: Any = job) -> None:
            queue.wait(queue.submit(job))

        copy()
        bench.synchronize()
        facts[f"{name}_gb_per_s"] = size / 1e6 / median(bench.milliseconds(copy) for _ in range(5))
    bench.synchronize()
    expect(bool((on_host == 1).all()), "the copy to the host is incomplete", facts)
    return facts


def overlap(bench: Bench) -> Facts:
    """A copy on the side stream and as much compute beside it take less than one after another."""
    queue = default_queue(bench.device)
    side = 4096 if bench.cuda else 64
    matrix = torch.randn(side, side, device=bench.device).to(torch.bfloat16)
    elements = bench.sizes.copy_bytes // 2
    on_host = torch.ones(elements, dtype=torch.bfloat16, pin_memory=bench.cuda)
    on_device = torch.zeros(elements, dtype=torch.bfloat16, device=bench.device)
    job = BlockCopy(on_device, on_host)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def timed(work: Callable[[], Any]) -> float:
        work()
        bench.synchronize()
        return median(bench.milliseconds(work) for _ in range(5))

    copy_ms = timed(lambda: queue.wait(queue.submit(job)))
    times = max(round(20 * copy_ms / timed(lambda: compute(20))), 1)  # about as long as the copy

    def both() -> None:
        ticket = queue.submit(job)
        compute(times)
        queue.wait(ticket)

    facts: Facts = {"copy_ms": copy_ms, "compute_ms": timed(lambda: compute(times))}
    facts["both_ms"] = timed(both)
    facts["of_the_sum"] = facts["both_ms"] / (facts["copy_ms"] + facts["compute_ms"])
    if bench.cuda:
        expect(facts["of_the_sum"] < 0.8, "copies do not overlap with compute", facts)
    return facts
