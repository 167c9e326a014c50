"""Checks of `check_gpu.py` that compare results: exactness, page choices, the transfer layer."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_setup import Bench, Facts, decode, dense, expect, forward, random_ids, tiered
from torch import Tensor

from flexicache_hf import FlexiCacheConfig
from flexicache_hf.models import embedded
from flexicache_hf.models.versions import cache_argument
from flexicache_hf.tiers import stable, unstable
from flexicache_hf.tiers.transfer import Job, StreamQueue, SyncQueue, default_queue

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits over the largest logit, where kernels need not agree bitwise."""

SMALL = FlexiCacheConfig(token_budget=128, rerank_interval=3)
PAPER = FlexiCacheConfig.paper(token_budget=96, rerank_interval=3)
LATE_CYCLES = 20_000_000  # about ten milliseconds: longer than a step of the small model


def compare(found: Tensor, wanted: Tensor, facts: Facts, name: str, tolerance: float) -> None:
    """Notes under `name` how far apart two logits are; raises beyond the tolerance."""
    found, wanted = found.float().cpu(), wanted.float().cpu()
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    noted = {"bitwise": torch.equal(found, wanted), "worst": worst, "tolerance": tolerance}
    facts[name] = facts.get(name, {}) | noted
    expect(worst <= tolerance, f"{name}: logits differ by {worst:.2e} of the largest", facts)


# -- K covers everything ---------------------------------------------------------------------------


def exactness(bench: Bench, dtype: torch.dtype) -> Facts:
    """Budget above the context: DynamicCache's logits, also for a padded batch."""
    facts: Facts = {"dtype": str(dtype)}
    model = bench.small(dtype)
    ids, tokens = random_ids(3, 200, 97), random_ids(3, 20, 97, seed=2)
    padded = torch.ones_like(ids)
    padded[0, :37] = 0
    config = FlexiCacheConfig(token_budget=1024)
    for name, mask in (("plain", None), ("padded", padded)):
        wanted = decode(model, dense(model), ids, tokens, mask)
        found = decode(model, tiered(model, config), ids, tokens, mask)
        compare(found, wanted, facts, name, TOLERANCE[dtype])
    return facts


def real_model(bench: Bench) -> Facts:
    """The embedded SmolLM2, if it is there: exact, and sparse decoding that stays sane."""
    if not embedded.is_ready():
        return {"skipped": "the embedded model is not here"}
    model, _ = embedded.load_model()
    model.to(bench.device)
    ids, tokens = random_ids(1, 300, 1000), random_ids(1, 20, 1000, seed=2)
    facts: Facts = {}
    wanted = decode(model, dense(model), ids, tokens)
    found = decode(model, tiered(model, FlexiCacheConfig()), ids, tokens)
    compare(found, wanted, facts, "SmolLM2", TOLERANCE[torch.float32])
    sparse = decode(model, tiered(model, FlexiCacheConfig(token_budget=128)), ids, tokens)
    expect(bool(sparse.isfinite().all()), "sparse logits are not finite", facts)
    return facts


# -- sparse steps against the CPU ------------------------------------------------------------------


@contextmanager
def page_choices(take: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Every ranking goes through `take`, which may note what was chosen or choose otherwise."""
    held = [(module, module.select_pages) for module in (stable, unstable)]
    for module, select in held:
        module.select_pages = lambda *args, own=select: take(own(*args))
    try:
        yield
    finally:
        for module, select in held:
            module.select_pages = select


def sparse_against_cpu(bench: Bench) -> Facts:
    """Float32 on the device and on the CPU, with the page choices that the device made."""
    ids, tokens = random_ids(2, 300, 97), random_ids(2, 40, 97, seed=2)
    facts: Facts = {}
    for name, config in (("default", SMALL), ("paper", PAPER)):
        chosen: deque[Tensor] = deque()

        def note(pages: Tensor, chosen: deque[Tensor] = chosen) -> Tensor:
            chosen.append(pages.cpu())
            return pages

        model = bench.small(torch.float32)
        with page_choices(note):
            found = decode(model, tiered(model, config), ids, tokens)
        rankings, other = len(chosen), [0]

        def replay(
            pages: Tensor, chosen: deque[Tensor] = chosen, other: list[int] = other
        ) -> Tensor:
            wanted = chosen.popleft()
            other[0] += not torch.equal(pages.sort(-1).values, wanted.sort(-1).values)
            return wanted

        model = bench.small(torch.float32, torch.device("cpu"))
        with page_choices(replay):
            wanted = decode(model, tiered(model, config), ids, tokens)
        facts[name] = {"rankings": rankings, "cpu_would_choose_otherwise": other[0]}
        expect(not chosen and rankings > 0, "device and CPU did not rank equally often", facts)
        compare(found, wanted, facts, name, 1e-3)
    return facts


# -- the transfer layer ----------------------------------------------------------------------------


class LateStreamQueue(StreamQueue):
    """Poisons at once what a job will write on the device, and begins the job a step late."""

    def submit(self, job: Job) -> int:
        if job.target.is_cuda:
            job.poison()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(LATE_CYCLES)
        return super().submit(job)


def make_queue(bench: Bench, kind: type) -> Callable[[torch.device], Any]:
    """A queue factory; on a CPU all kinds are SyncQueue, which only tests this script."""
    queue = kind(bench.device) if bench.cuda and kind is not SyncQueue else SyncQueue()
    return lambda device: queue


def every_change(bench: Bench, model: Any, config: FlexiCacheConfig, kind: type) -> list[Tensor]:
    """Logits through many rankings and everything that changes a cache, copies in flight."""

    def ids(rows: int, length: int, seed: int) -> Tensor:
        return random_ids(rows, length, 97, seed)

    def new() -> Any:
        return tiered(model, config, queue_factory=make_queue(bench, kind))

    cache, logits = new(), []
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[1, :61] = 0
    logits.append(decode(model, cache, ids(2, 300, 1), ids(2, 61, 2), mask))  # rows of two lengths
    cache.reset()  # with copies in flight, over which the next prompt comes
    logits.append(decode(model, cache, ids(2, 260, 3), ids(2, 31, 4)))
    again = copy.deepcopy(cache)  # with copies in flight
    tokens = ids(2, 20, 5)
    logits.append(decode(model, cache, tokens[:, :1], tokens[:, 1:]))
    logits.append(decode(model, again, tokens[:, :1], tokens[:, 1:]))
    expect(torch.equal(logits[-1], logits[-2]), "a copied cache goes on differently", {})
    del again
    cache.reorder_cache(torch.tensor([1, 0], device=bench.device))
    logits.append(decode(model, cache, ids(2, 9, 6), ids(2, 7, 7)))  # the next turn
    cache.crop(-3)
    logits.append(decode(model, cache, ids(2, 1, 8), ids(2, 5, 9)))
    cache.crop(-70)
    logits.append(decode(model, cache, ids(2, 1, 10), ids(2, 20, 11)))
    cache.batch_repeat_interleave(2)
    logits.append(decode(model, cache, ids(4, 1, 12), ids(4, 20, 13)))
    cache.batch_select_indices(torch.tensor([3, 0], device=bench.device))
    logits.append(decode(model, cache, ids(2, 1, 14), ids(2, 17, 15)))
    other = new()
    decode(model, other, ids(1, 150, 16), ids(1, 4, 17))
    cache.join(other)
    at = torch.tensor([[n] for n in cache.lengths], device=bench.device)
    with torch.no_grad():
        named = {cache_argument(model): cache}
        joined = model(ids(3, 1, 18).to(bench.device), position_ids=at, **named).logits[:, -1]
    logits.append(joined[None])
    del cache, other  # with copies in flight, over whose memory the next cache comes
    logits.append(decode(model, new(), ids(2, 260, 19), ids(2, 20, 20)))
    return logits


def transfers(bench: Bench, dtype: torch.dtype) -> Facts:
    """The side stream, on time and late, gives what copies at once give, bit for bit."""
    facts: Facts = {"dtype": str(dtype), "compared": 0, "queue": "SyncQueue"}
    model = bench.small(dtype)
    if bench.cuda:
        facts["queue"] = type(default_queue(bench.device)).__name__
    configs = {"default": SMALL, "paper": PAPER} if bench.cuda else {"default": SMALL}
    for name, config in configs.items():
        wanted = every_change(bench, model, config, SyncQueue)
        for kind in (StreamQueue, LateStreamQueue) if bench.cuda else (SyncQueue,):
            found = every_change(bench, model, config, kind)
            for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
                facts |= {"config": name, "kind": kind.__name__, "place": place}
                expect(bool(one.isfinite().all()), "poison reached the logits", facts)
                expect(torch.equal(one, other), "late copies change the logits", facts)
                facts["compared"] += one.shape[0]
    return facts


def late_queue_catches(bench: Bench) -> Facts:
    """The negative control: without waiting, the poison does reach the logits."""
    if not bench.cuda:
        return {"skipped": "needs a GPU"}
    model, queue = bench.small(torch.float32), LateStreamQueue(bench.device)
    cache = tiered(model, SMALL, queue_factory=lambda device: queue)
    decode(model, cache, random_ids(1, 300, 97), random_ids(1, 3, 97))
    queue.wait = lambda ticket: None  # type: ignore[method-assign]
    ids = random_ids(1, 12, 97, seed=3)
    logits = [forward(model, cache, ids[:, at : at + 1]) for at in range(12)]
    bench.synchronize()
    facts = {"steps_with_poison": sum(not bool(each.isfinite().all()) for each in logits)}
    expect(facts["steps_with_poison"] > 0, "nothing was late: the transfer check is blind", facts)
    return facts


def pinned_pages(bench: Bench) -> Facts:
    """Host pages are pinned, those of a copied cache too."""
    model = bench.small(torch.float16)
    cache = tiered(model, SMALL)
    decode(model, cache, random_ids(1, 300, 97), random_ids(1, 20, 97))
    chunks = [
        chunk
        for held in (cache, copy.deepcopy(cache))
        for layer in held.layers
        if layer.stable is not None
        for chunk in (*layer.stable.host.keys, *layer.stable.host.values)
    ]
    facts = {
        "chunks": len(chunks),
        "pinned": sum(c.is_pinned() for c in chunks) if bench.cuda else 0,
    }
    expect(not bench.cuda or facts["pinned"] == len(chunks), "host pages are not pinned", facts)
    return facts
