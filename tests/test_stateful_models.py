"""Random sequences of everything a cache can do, on whole models with layers of several kinds.

Every forward's logits are checked against a dense twin that is changed alike (mirror.py).
test_stateful.py does this layer by layer, against content that is known.
"""

from __future__ import annotations

import copy

import torch
from families import build, tiered_heads
from helpers import forward, generate, profile_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import check_integrity
from mirror import Mirrored, MirroredCache

PLAIN = ("llama", "smollm3")
RECORDING = ("gemma3", "gemma4", "llama4", "lfm2")  # they go back no further than one forward
MOST_ROWS, MOST_COLUMNS = 4, 120


class Models(RuleBasedStateMachine):
    """`text` and `mask` `[B, C]` are what `cache` was fed; `last` is how much came last."""

    @initialize(
        family=st.sampled_from(PLAIN + RECORDING),
        every=st.sampled_from([0, 1, 2]),
        page=st.sampled_from([2, 4]),
        pages=st.integers(2, 6),
        interval=st.sampled_from([1, 3, 8]),
    )
    def begin(self, family, every, page, pages, interval) -> None:
        self.model = copy.deepcopy(build(family, torch.float64))
        self.records = family in RECORDING
        heads = tiered_heads(self.model)[::every] if every else []
        sizes = {"page_size": page, "token_budget": page * pages, "rerank_interval": interval}
        self.cache = MirroredCache(self.model, profile_of(self.model, *heads), **sizes)
        if self.records:
            self.cache.activate_past_recording()
        self.random = torch.Generator().manual_seed(1)
        self.copies: list[tuple] = []
        self.text = self.mask = torch.zeros(0, 0, dtype=torch.long)
        self.last = 0
        self.mirror = Mirrored(self.model, 1e-6).__enter__()

    def ids(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randint(1, 97, (rows, columns), generator=self.random)

    def feed(self, ids, mask=None) -> None:
        mask = torch.ones_like(ids) if mask is None else mask
        if not self.text.numel():
            self.text = self.mask = ids.new_zeros(len(ids), 0)
        if self.records and self.last:
            self.cache.crop(0)  # forget what is recorded, or transformers 5.17 loses count
        self.text, self.mask = torch.cat([self.text, ids], 1), torch.cat([self.mask, mask], 1)
        forward(self.model, self.cache, ids, self.mask)
        self.last = ids.shape[1]

    def rows(self, chosen: list[int]) -> None:
        self.text, self.mask = self.text[chosen], self.mask[chosen]

    @property
    def columns(self) -> int:
        return self.text.shape[1]

    def room(self) -> bool:
        return 0 < self.columns < MOST_COLUMNS

    # -- forwards --------------------------------------------------------------------------------

    @precondition(lambda self: not self.columns)
    @rule(data=st.data(), rows=st.integers(1, 3), columns=st.integers(1, 50))
    def prompt(self, data, rows, columns) -> None:
        ids = self.ids(rows, columns)
        mask = torch.ones_like(ids)
        for row in mask:
            row[: data.draw(st.integers(0, columns - 1) | st.just(0), label="pads")] = 0
        self.feed(ids, mask)

    @precondition(room)
    @rule(columns=st.integers(2, 12))
    def turn(self, columns) -> None:
        self.feed(self.ids(len(self.text), columns))

    @precondition(room)
    @rule(steps=st.integers(1, 8))
    def decode(self, steps) -> None:
        for _ in range(steps):
            self.feed(self.ids(len(self.text), 1))

    @precondition(lambda self: self.room() and not self.records)
    @rule(columns=st.integers(1, 6), new=st.integers(1, 6))
    def generate(self, columns, new) -> None:
        """A recorded past would be cropped between the two."""
        ids = self.ids(len(self.text), columns)
        whole = torch.cat([self.text, ids], 1)
        mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        text = generate(self.model, self.cache, whole, new, attention_mask=mask).sequences
        self.text = text[:, :-1]
        added = self.text.shape[1] - self.mask.shape[1]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), added)], 1)

    # -- changes ---------------------------------------------------------------------------------

    @precondition(lambda self: self.columns)
    @rule(data=st.data())
    def crop(self, data) -> None:
        most = self.columns - 1 - int((self.mask == 0).sum(1).max())
        most = min(most, self.last) if self.records else most
        removed = data.draw(st.integers(0, most), label="removed")
        self.take_back(removed)

    def take_back(self, removed: int) -> None:
        self.cache.crop(-removed)
        left = self.columns - removed
        self.text, self.mask, self.last = self.text[:, :left], self.mask[:, :left], 0

    @precondition(lambda self: self.columns)
    @rule(data=st.data())
    def reorder_cache(self, data) -> None:
        count = len(self.text)
        beams = data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
        self.cache.reorder_cache(torch.tensor(beams))
        self.rows(beams)

    @precondition(lambda self: 0 < len(self.text) <= MOST_ROWS // 2 and self.columns)
    @rule()
    def batch_repeat_interleave(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.rows([row for row in range(len(self.text)) for _ in range(2)])

    @precondition(lambda self: self.columns)
    @rule(data=st.data())
    def batch_select_indices(self, data) -> None:
        rows = data.draw(st.lists(st.integers(0, len(self.text) - 1), min_size=1, max_size=3))
        self.cache.batch_select_indices(torch.tensor(rows))
        self.rows(rows)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.text = self.mask = self.text.new_zeros(0, 0)
        self.last = 0

    @precondition(lambda self: len(self.copies) < 2)
    @rule()
    def deepcopy(self) -> None:
        self.copies.append((copy.deepcopy(self.cache), self.text, self.mask, self.last))

    @precondition(lambda self: self.copies)
    @rule()
    def go_to_a_copy(self) -> None:
        here = self.cache, self.text, self.mask, self.last
        self.cache, self.text, self.mask, self.last = self.copies.pop(0)
        self.copies.append(here)

    @invariant()
    def holds_what_it_was_fed(self) -> None:
        if hasattr(self, "cache"):
            check_integrity(self.cache)
            assert self.cache.get_seq_length() == self.columns
            if self.columns:
                assert self.cache.lengths == tuple(self.mask.sum(1).tolist())

    def teardown(self) -> None:
        if hasattr(self, "mirror"):
            self.mirror.__exit__()


Models.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=15,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestModels = Models.TestCase
