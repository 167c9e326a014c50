"""Moving pages between the device and host memory, behind one small interface.

Contract. A transfer queue runs its jobs in order. `submit` returns at once with a ticket; the job
may run at any time from then until `wait(ticket)`, which also completes every earlier job of the
queue. Until it has waited, the caller must neither read a job's target nor write its source or
target. Layers on one device share a queue: because jobs run in order, waiting for a ticket never
waits for what other layers submitted later.

`SyncQueue` copies at once. `StreamQueue` copies on a side stream (CUDA): jobs begin when the work
already queued on the compute stream is done, and `wait` makes the compute stream, not the host,
wait. Whoever reads host pages on the CPU, outside a job, must `settle` the queue first. The tests
add a queue that delays every job to the latest moment and poisons what has not arrived, so that a
missing wait fails on a machine without a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockCopy:
    """`target.copy_(source)`: a block of whole pages, as one piece."""

    target: Tensor
    source: Tensor

    def run(self) -> None:
        self.target.copy_(self.source, non_blocking=True)

    def poison(self) -> None:
        self.target.fill_(torch.nan)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.target, self.source

    def cpu_reads(self) -> bool:
        """Whether the CPU itself reads the source, at the moment `run` is called."""
        return not self.target.is_cuda and not self.source.is_cuda


@dataclass(frozen=True)
class PageCopy:
    """`target[target_rows] = source[source_rows]`: single pages, wherever they lie.

    `source` and `target` are `[pages, page elements]`; the rows are int64 tensors of equal length,
    each on the device of the tensor it indexes.
    """

    target: Tensor
    target_rows: Tensor
    source: Tensor
    source_rows: Tensor

    def run(self) -> None:
        if self.source.is_cuda or not self.target.is_cuda:
            picked = self.source.index_select(0, self.source_rows)
        else:  # picked by the CPU into a pinned buffer, which an asynchronous copy needs
            shape = (len(self.source_rows), *self.source.shape[1:])
            picked = torch.empty(shape, dtype=self.source.dtype, device="cpu", pin_memory=True)
            torch.index_select(self.source, 0, self.source_rows, out=picked)
        picked = picked.to(self.target.device, non_blocking=self.target.is_cuda)
        self.target.index_copy_(0, self.target_rows, picked)

    def poison(self) -> None:
        self.target.index_fill_(0, self.target_rows, torch.nan)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.target, self.target_rows, self.source, self.source_rows

    def cpu_reads(self) -> bool:
        """Whether the CPU itself reads the source, at the moment `run` is called."""
        return not self.source.is_cuda


Job = BlockCopy | PageCopy


class TransferQueue(Protocol):
    """See the contract above."""

    def submit(self, job: Job) -> Any: ...

    def wait(self, ticket: Any) -> None: ...

    def settle(self) -> None:
        """Complete every job, so that the CPU may read and write host pages by itself."""


class SyncQueue:
    """Copies at once, in the caller's thread; on a GPU it waits for each copy (for comparisons)."""

    def submit(self, job: Job) -> None:
        job.run()
        for tensor in job.tensors():
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()

    def wait(self, ticket: None) -> None:
        pass

    def settle(self) -> None:
        pass


class StreamQueue:
    """Copies on a side stream of one CUDA device.

    The stream has the lowest priority, so that copies yield to compute that is ready to run. A
    ticket is the number of its job, so that copies of a cache need no copies of events.

    A job keeps its tensors until the compute stream waits for it, or it is seen to be done. From
    then on the allocator may give their memory to later work of the compute stream. `record_stream`
    would be safe as well, but then a prompt's keys stay allocated until the host sees the copy end,
    and the host runs many layers ahead: they would all be held at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.flying: deque[tuple[int, torch.cuda.Event, Job]] = deque()
        self.submitted = 0
        self.offloaded: torch.cuda.Event | None = None  # the last copy to the host
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=0)

    def submit(self, job: Job) -> int:
        while self.flying and self.flying[0][1].query():  # done, and nobody had to wait
            self.flying.popleft()
        if self.offloaded is not None and job.cpu_reads():
            self.offloaded.synchronize()  # the CPU does not wait in the stream for its source
            self.offloaded = None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            job.run()
        done = self.stream.record_event()
        if not job.target.is_cuda:
            self.offloaded = done
        self.submitted += 1
        self.flying.append((self.submitted, done, job))
        return self.submitted

    def wait(self, ticket: int) -> None:
        done = []  # freed after the compute stream was told to wait, not before
        while self.flying and self.flying[0][0] <= ticket:
            done.append(self.flying.popleft())
        if done:
            torch.cuda.current_stream(self.device).wait_event(done[-1][1])

    def settle(self) -> None:
        self.stream.synchronize()
        self.offloaded = None
        self.flying.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamQueue:
        self.settle()  # what is copied next, by the CPU or on the compute stream, has arrived
        copied = type(self)(self.device)
        copied.submitted = self.submitted
        return copied

    def __del__(self) -> None:
        for _, _, job in self.flying:  # nobody will wait for these: the allocator has to
            for tensor in job.tensors():
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)


QueueFactory = Callable[[torch.device], TransferQueue]


def default_queue(device: torch.device) -> TransferQueue:
    """The queue for pages of a layer on `device`."""
    return StreamQueue(device) if device.type == "cuda" else SyncQueue()


class QueuePerDevice:
    """Layers on one device share one queue."""

    def __init__(self) -> None:
        self.queues: dict[torch.device, TransferQueue] = {}

    def __call__(self, device: torch.device) -> TransferQueue:
        if device not in self.queues:
            self.queues[device] = default_queue(device)
        return self.queues[device]
