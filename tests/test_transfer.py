"""Pages may travel as late as their tickets allow without changing a result."""

from __future__ import annotations

import copy

import pytest
import torch
from delaying_queue import DelayingQueue
from helpers import decode, flexicache, forward, left_padding, random_ids, tiny_llama

from flexicache_hf import FlexiCacheConfig
from flexicache_hf.tiers.host_pages import HostPages
from flexicache_hf.tiers.transfer import BlockCopy, PageCopy, SyncQueue

SMALL = {"token_budget": 32, "page_size": 4, "rerank_interval": 3}
CONFIGS = {
    "default": FlexiCacheConfig(**SMALL),
    "paper": FlexiCacheConfig.paper(**SMALL),
    "tail longer than planned": FlexiCacheConfig(**SMALL).replace(rerank_interval=None),
}


def pair(model, config, **kwargs):
    """The same cache with synchronous and with delayed copies, and the latter's queues."""
    queues = []

    def delaying(device):
        queues.append(DelayingQueue(device))
        return queues[-1]

    plain = flexicache(model, (0, 1), config=config)
    late = flexicache(model, (0, 1), config=config, queue_factory=delaying)
    return plain, late, queues


@pytest.mark.parametrize("name", CONFIGS)
def test_delayed_copies_change_nothing(name):
    model = tiny_llama()
    plain, late, queues = pair(model, CONFIGS[name])
    ids, mask = random_ids(2, 90), left_padding(90, 0, 41)
    tokens = random_ids(2, 60, seed=3)
    expected = decode(model, plain, ids, 60, mask, tokens)
    assert torch.equal(decode(model, late, ids, 60, mask, tokens), expected)
    assert sum(queue.ran_late for queue in queues) > 0
    assert expected.isfinite().all()


def test_delayed_copies_through_every_change_of_the_cache():
    model = tiny_llama()
    plain, late, _ = pair(model, CONFIGS["default"])
    results = []
    for cache in (plain, late):
        logits = [decode(model, cache, random_ids(2, 90), 13)]
        cache.reorder_cache(torch.tensor([1, 0]))
        logits.append(decode(model, cache, random_ids(2, 9, seed=4), 7))  # the next turn
        cache.crop(-3)
        logits.append(forward(model, cache, random_ids(2, 1, seed=6)))
        cache.crop(-40)
        logits.append(decode(model, cache, random_ids(2, 1, seed=7), 20))
        cache.batch_repeat_interleave(2)
        logits.append(decode(model, cache, random_ids(4, 1, seed=8), 20))
        cache.batch_select_indices(torch.tensor([3, 0]))
        logits.append(decode(model, cache, random_ids(2, 1, seed=9), 9))
        results.append(logits)
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)


def test_the_double_catches_a_missing_wait():
    """The negative control: without waiting, the poison reaches the logits."""
    model = tiny_llama()
    _, late, queues = pair(model, CONFIGS["default"])
    decode(model, late, random_ids(1, 90), 3)
    for queue in queues:
        queue.wait = lambda ticket: None
    assert not decode(model, late, random_ids(1, 1), 12).isfinite().all()


def test_page_copy_moves_only_its_rows():
    source, target = torch.arange(12.0).view(6, 2), torch.zeros(5, 2)
    job = PageCopy(target, torch.tensor([4, 1]), source, torch.tensor([0, 5]))
    job.poison()
    assert target.isnan().any(-1).tolist() == [False, True, False, False, True]
    SyncQueue().submit(job)
    assert target.tolist() == [[0, 0], [10, 11], [0, 0], [0, 0], [0, 1]]


def test_block_copy_takes_any_layout():
    source = torch.arange(24.0).view(2, 3, 4).transpose(0, 1)
    target = torch.zeros(3, 2, 4)
    SyncQueue().submit(BlockCopy(target, source))
    assert torch.equal(target, source)


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_host_pages_are_on_the_host_whatever_the_default_device(default):
    """`torch.set_default_device("cuda")` must not move the second tier; "meta" stands in for it."""
    pages = HostPages(2, 4, 3, 3, torch.float32, pinned=False, allowance=None)
    keys = torch.arange(3 * 2 * 4 * 3.0).view(3, 2, 4, 3)
    slots = torch.zeros(2, 4 * 3)
    ids, heads, rows = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([0, 1])
    with torch.device(default):
        pages.reserve(40)
        pages.reserve(60)
        pages = copy.deepcopy(pages)
        for job in pages.write_blocks([39, 40, 41], keys, keys):
            job.run()
        for job in pages.read_pages(39 + ids, heads, rows, slots, slots.clone()):
            job.run()
    assert torch.equal(slots, torch.stack([keys[2, 1].flatten(), keys[0, 0].flatten()]))
