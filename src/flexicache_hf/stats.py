"""What the cache did: counters per forward, and in total."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

KEPT_STEPS = 4096


@dataclass
class StepStats:
    """Counters of one forward, summed over layers, heads and rows.

    Attributes:
        tokens: new tokens per row, padding included.
        stable_ranked, unstable_ranked: heads that ranked.
        promoted: pages copied from the host into slots because a ranking selected them.
        host_to_device, device_to_host: bytes moved, for whatever reason.
        attended: pages attended to, summed over heads.
    """

    tokens: int = 0
    decode: bool = False
    stable_ranked: int = 0
    unstable_ranked: int = 0
    promoted: int = 0
    host_to_device: int = 0
    device_to_host: int = 0
    attended: int = 0


@dataclass
class CacheStats:
    """The latest steps one by one (oldest first), and totals over the life of the cache."""

    forwards: int = 0
    decode_steps: int = 0
    steps: deque[StepStats] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    current: StepStats = field(default_factory=StepStats)
    _closed: StepStats = field(default_factory=StepStats)  # sum of all steps but the current one

    def open(self, tokens: int, decode: bool) -> None:
        """A forward begins; counts go to `current` from now on."""
        _accumulate(self._closed, self.current)
        self.current = StepStats(tokens=tokens, decode=decode)
        self.steps.append(self.current)
        self.forwards += 1
        self.decode_steps += decode

    @property
    def total(self) -> StepStats:
        """Sum over all forwards."""
        total = StepStats()
        _accumulate(total, self._closed)
        _accumulate(total, self.current)
        return total

    def to_dict(self) -> dict[str, Any]:
        totals = asdict(self.total)
        del totals["decode"]
        return totals | {"forwards": self.forwards, "decode_steps": self.decode_steps}


def _accumulate(into: StepStats, step: StepStats) -> None:
    for name, count in vars(step).items():
        setattr(into, name, getattr(into, name) + count)
