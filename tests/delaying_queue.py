"""A transfer queue that makes every missing wait visible on a machine without a GPU."""

from __future__ import annotations

import torch

from flexicache_hf.tiers.transfer import Job


class DelayingQueue:
    """Runs each job at the latest moment its ticket allows, and poisons its target until then.

    A caller that reads before it waits reads NaN; one that overwrites the source before it waits
    sends the wrong page; one that overwrites the target loses its write.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.waiting: list[tuple[int, Job]] = []
        self.submitted = 0
        self.ran_late = 0

    def submit(self, job: Job) -> int:
        job.poison()
        self.submitted += 1
        self.waiting.append((self.submitted, job))
        return self.submitted

    def wait(self, ticket: int) -> None:
        while self.waiting and self.waiting[0][0] <= ticket:
            self.waiting.pop(0)[1].run()
            self.ran_late += 1

    def settle(self) -> None:
        self.wait(self.submitted)
