"""The book-keeping of StreamQueue, on simulated CUDA streams that run nothing until they must.

Whether real copies arrive is checked on a GPU by `scripts/check_gpu.py`. Here: who waits for what,
how long tensors are held, and what a copy of a cache may rely on.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers import decode, flexicache, random_ids, tiny_llama

from flexicache_hf import FlexiCacheConfig
from flexicache_hf.tiers.transfer import BlockCopy, PageCopy, StreamQueue


class Event:
    """Done when its stream has run everything that was queued before it."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, len(stream.work)

    def query(self) -> bool:
        return self.stream.ran >= self.at

    def synchronize(self) -> None:
        self.stream.run(self.at)

    def __deepcopy__(self, memo: dict) -> Event:
        raise TypeError("cannot pickle 'Event' object")  # as the real ones


class Stream:
    """Work of one stream; the compute stream runs at once, as CPU tensors do."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.work: list[Callable[[], object]] = []
        self.ran = 0

    def run(self, until: int) -> None:
        while self.ran < until:
            self.work[self.ran]()
            self.ran += 1

    def synchronize(self) -> None:
        self.run(len(self.work))

    def record_event(self) -> Event:
        return Event(self)

    def wait_stream(self, other: Stream) -> None:
        pass  # the compute stream is never behind

    def wait_event(self, event: Event) -> None:
        event.synchronize()


@pytest.fixture
def cuda(monkeypatch):
    """Jobs that StreamQueue runs inside `torch.cuda.stream(side)` are kept for that stream."""
    inside: list[Stream] = []
    compute = Stream()

    @contextmanager
    def stream(side):
        inside.append(side)
        yield
        inside.pop()

    def block(self: BlockCopy) -> None:
        queued(partial(copy_block, self))

    def pages(self: PageCopy) -> None:  # the CPU picks the pages at once, the rest is queued
        picked = self.source.index_select(0, self.source_rows)
        queued(partial(self.target.index_copy_, 0, self.target_rows, picked))

    def queued(work: Callable[[], object]) -> None:
        inside[-1].work.append(work) if inside else work()

    copy_block = BlockCopy.run
    monkeypatch.setattr(BlockCopy, "run", block)
    monkeypatch.setattr(BlockCopy, "cpu_reads", lambda self: False)  # one side is on the device
    monkeypatch.setattr(PageCopy, "run", pages)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute)


def copies(count: int) -> list[BlockCopy]:
    return [BlockCopy(torch.zeros(3), torch.full((3,), float(n + 1))) for n in range(count)]


@pytest.mark.usefixtures("cuda")
def test_waiting_completes_all_earlier_jobs_and_no_later_ones():
    queue, jobs = StreamQueue(torch.device("cpu")), copies(4)
    tickets = [queue.submit(job) for job in jobs]
    queue.wait(tickets[1])
    assert [float(job.target[0]) for job in jobs] == [1, 2, 0, 0]
    queue.wait(tickets[0])  # again, late: nothing more to do
    assert [float(job.target[0]) for job in jobs] == [1, 2, 0, 0]
    queue.settle()
    assert [float(job.target[0]) for job in jobs] == [1, 2, 3, 4]


@pytest.mark.usefixtures("cuda")
def test_tensors_are_held_until_waited_for_and_no_longer():
    queue, jobs = StreamQueue(torch.device("cpu")), copies(2)
    sources = [weakref.ref(job.source) for job in jobs]
    tickets = [queue.submit(job) for job in jobs]
    del jobs
    assert all(source() is not None for source in sources)
    queue.wait(tickets[0])
    queue.stream.work[0] = None  # the simulated stream's own reference
    assert sources[0]() is None and sources[1]() is not None


@pytest.mark.usefixtures("cuda")
def test_jobs_that_nobody_waits_for_do_not_pile_up():
    queue = StreamQueue(torch.device("cpu"))
    for job in copies(50):
        queue.submit(job)
        queue.stream.synchronize()  # the device is quick
    assert len(queue.flying) == 1


@pytest.mark.usefixtures("cuda")
def test_pages_are_picked_only_once_they_are_on_the_host():
    """The CPU picks pages when a job is submitted, so the offload before it must have arrived."""
    queue = StreamQueue(torch.device("cpu"))
    host, slots = torch.zeros(4, 3), torch.zeros(2, 3)
    queue.submit(BlockCopy(host, torch.arange(12.0).view(4, 3)))
    rows = torch.tensor([0, 1]), torch.tensor([3, 1])
    queue.wait(queue.submit(PageCopy(slots, rows[0], host, rows[1])))
    assert slots.tolist() == [[9, 10, 11], [3, 4, 5]]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("preset", [FlexiCacheConfig, FlexiCacheConfig.paper])
@pytest.mark.parametrize("steps", range(1, 14, 3))
def test_a_cache_can_be_copied_with_copies_in_flight(preset, steps):
    model, tokens = tiny_llama(), random_ids(2, 30, seed=3)
    config = preset(token_budget=32, page_size=4, rerank_interval=3)
    prompt, plain = random_ids(2, 90), flexicache(model, (0, 1), config=config)
    expected = decode(model, plain, prompt, 30, None, tokens)
    queue = StreamQueue(torch.device("cpu"))
    cache = flexicache(model, (0, 1), config=config, queue_factory=lambda device: queue)
    decode(model, cache, prompt, steps, None, tokens[:, :steps])
    again = copy.deepcopy(cache)
    assert again.layers[0].stable.queue is again.layers[1].stable.queue is not queue
    for held in (again, cache):
        rest = tokens[:, steps:]
        found = decode(model, held, rest[:, :1], rest.shape[1] - 1, None, rest[:, 1:])
        assert torch.equal(found, expected[steps + 1 :])
