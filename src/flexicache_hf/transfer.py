"""Moving pages between the device and host memory, behind one small interface.

Contract. A transfer queue runs its jobs in order. `submit` returns at once with a ticket; the job
may run at any time from then until `wait(ticket)`, which also completes every earlier job of the
queue. Until it has waited, the caller must neither read a job's target nor write its source or
target. Layers on one device share a queue: because jobs run in order, waiting for a ticket never
waits for what other layers submitted later.

`SyncQueue` copies at once (CPU). `StreamQueue` copies on a side stream (CUDA): jobs begin when the
work already queued on the compute stream is done, and `wait` makes the compute stream, not the
host, wait. The tests add a queue that delays every job to the latest moment and poisons what has
not arrived, so that a missing wait fails on a machine without a GPU.
"""

from __future__ import annotations

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
        picked = self.source.index_select(0, self.source_rows)
        if self.source.device != self.target.device:
            if self.target.is_cuda:  # the staging buffer must be pinned for an asynchronous copy
                picked = picked.pin_memory()
            picked = picked.to(self.target.device, non_blocking=True)
        self.target.index_copy_(0, self.target_rows, picked)

    def poison(self) -> None:
        self.target.index_fill_(0, self.target_rows, torch.nan)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.target, self.target_rows, self.source, self.source_rows


Job = BlockCopy | PageCopy


class TransferQueue(Protocol):
    """See the contract above."""

    def submit(self, job: Job) -> Any: ...

    def wait(self, ticket: Any) -> None: ...


class SyncQueue:
    """Copies at once, in the caller's thread."""

    def submit(self, job: Job) -> None:
        job.run()

    def wait(self, ticket: None) -> None:
        pass


class StreamQueue:
    """Copies on a side stream of one CUDA device.

    The stream has the lowest priority, so that copies yield to compute that is ready to run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=0)

    def submit(self, job: Job) -> torch.cuda.Event:
        compute = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            job.run()
        for tensor in job.tensors():
            if tensor.is_cuda:  # keep the allocator from reusing it before the copy has run
                tensor.record_stream(self.stream)
        return self.stream.record_event()

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamQueue:
        return StreamQueue(self.device)


QueueFactory = Callable[[torch.device], TransferQueue]


def default_queue(device: torch.device) -> TransferQueue:
    """The queue for pages of a layer on `device`."""
    return StreamQueue(device) if device.type == "cuda" else SyncQueue()
