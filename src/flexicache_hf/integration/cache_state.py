"""What the layers of one cache share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..config import FlexiCacheConfig
from ..errors import FlexiCacheWarning
from ..pages.page_table import PageTable
from ..profiles.learning import HeadLearner
from ..profiles.profile import HeadProfile
from ..stats import CacheStats
from ..tiers.host_pages import HostBudget, HostMemoryError
from ..tiers.transfer import QueueFactory


@dataclass
class Shared:
    """What the layers of one cache share.

    Attributes:
        implementation: name of the attention implementation the model uses right now.
        profile: which heads are unstable; layers follow when it changes.
        rank: see `heads.tensor_parallel_rank`.
        prefilling: whether generate() is about to feed a prompt; None when nobody told. The forward
            that follows consumes it.
        verifying: assisted decoding has begun: short multi-token forwards are decode steps.
        guarded: generate() tells; a forward that it did not announce verifies nothing.
        learner: learns the profile, with `profile="auto"`.
    """

    config: FlexiCacheConfig
    table: PageTable
    stats: CacheStats
    budget: HostBudget
    make_queue: QueueFactory
    implementation: Callable[[], str | None]
    profile: HeadProfile
    rank: int | None = None
    prefilling: bool | None = None
    verifying: bool = False
    guarded: bool = False
    learner: HeadLearner | None = None
    page_bytes: int = 0  # of one page of one head, keys and values
    warned: bool = False  # that decode steps are dense

    def assign_learned(self) -> None:
        """Take the learned profile, unless the host has no room for the stable heads' pages."""
        assert self.learner is not None
        learned = self.learner.profile()
        layers = [
            (heads, learned.unstable_in(index))
            for (heads, _), index in zip(self.budget.layers, self.learner.layers, strict=True)
        ]
        self.learner = None
        try:
            budget = replace(self.budget, layers=layers)
            budget.check(self.table.capacity, self.page_bytes)
        except HostMemoryError as error:
            warnings.warn(
                f"the heads were learned, but all stay on the device: {error}",
                FlexiCacheWarning,
                stacklevel=2,
            )
            return
        self.profile, self.budget = learned, budget

    def warn_dense(self) -> None:
        """Once, that a mask makes decode steps slow."""
        if self.warned:
            return
        self.warned = True
        warnings.warn(
            "attention_mask is not the padding this cache was fed with: it hides cached tokens (as "
            "after rows that ended early), has a bias, or differs between heads. Decode steps "
            "under it are right, but attend to everything and fetch it from the host",
            FlexiCacheWarning,
            stacklevel=2,
        )

    def is_decode(self, new: int) -> bool:
        """Whether a forward of `new` tokens is a decode step; asked once per forward."""
        prefilling, self.prefilling = self.prefilling, None
        if prefilling:
            return False
        verifies = self.verifying and (prefilling is False or not self.guarded)
        return new == 1 or (verifies and new <= self.config.verify_tokens)
