"""Random sequences of everything the Cache contract allows, against a plain dense cache.

Layers are driven directly with keys and values that belong to token ids, so a cache is a list of
ids per row (None for padding), and its whole content and every attention output are known.
"""

from __future__ import annotations

import copy

import pytest
import torch
from delaying_queue import DelayingQueue
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import check_content, check_integrity
from reference import Reference
from transformers import LlamaConfig

from flexicache_hf import FlexiCacheConfig, FlexiCacheDynamicCache, HeadProfile, InterruptedForward

LAYERS, HEADS, GROUP, DIM, IDS = 2, 3, 2, 4, 16384
EVERY_HEAD = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
MOST_ROWS, MOST_COLUMNS = 6, 150
TABLE = torch.randn(
    3, LAYERS, HEADS * GROUP, IDS, DIM, dtype=torch.float64, generator=torch.Generator()
)
KEYS, VALUES, QUERIES = TABLE[0][:, :HEADS], TABLE[1][:, :HEADS], TABLE[2]


class Stopped(BaseException):
    """An interruption between two layers."""


class World:
    """A cache, and the dense truth about it.

    Attributes:
        rows: per row the id of every column, None for padding.
        prompts: per row, tokens at the end of its last dense forward.
    """

    def __init__(self, cache: FlexiCacheDynamicCache) -> None:
        self.cache = cache
        self.rows: list[list[int | None]] = []
        self.prompts: list[int] = []
        self.most_pages = 0

    def tokens(self, row: int) -> list[int]:
        return [token for token in self.rows[row] if token is not None]

    def feed(self, new: list[list[int | None]], *, decode: bool, stop: bool = False) -> None:
        """A forward through every layer; every output is checked. `stop` after the first layer."""
        self.cache._shared.prefilling = not decode
        columns = len(self.rows[0]) if self.rows else 0
        rows = [[*old, *more] for old, more in zip(self.rows or [[]] * len(new), new, strict=True)]
        before = [len(self.tokens(row)) for row in range(len(self.rows))] or [0] * len(new)
        width = columns + len(new[0])
        seen = torch.tensor([[token is not None for token in row] for row in rows])
        causal = torch.ones(len(new[0]), width, dtype=torch.bool).tril(columns)
        mask = (seen[:, None, None] & causal) if not seen.all() else None
        ids = torch.tensor([[token or 0 for token in row] for row in new])
        for index, layer in enumerate(self.cache.layers):
            keys, values = (
                table[index][:, ids].transpose(0, 1).contiguous() for table in (KEYS, VALUES)
            )
            query = QUERIES[index][:, ids].transpose(0, 1).contiguous()
            layer.update(keys, values)
            expected = Expected(self, index, layer, rows, before, decode)
            out, _ = layer.attend(None, query, mask, expected.base, scaling=0.5)
            expected.check(query, out)
            self._count_pages()
            if not decode:
                self.prompts = list(map(len, expected.tokens))
            if stop:
                raise Stopped
        self.rows = rows

    def crop(self, removed: int) -> None:
        self.cache.crop(-removed)
        left = max(len(self.rows[0]) - removed, 0) if self.rows else 0
        self.rows = [row[:left] for row in self.rows]
        self.prompts = [
            min(prompt, len(self.tokens(row))) for row, prompt in enumerate(self.prompts)
        ]

    def select(self, rows: list[int]) -> None:
        self.rows = [list(self.rows[row]) for row in rows]
        self.prompts = [self.prompts[row] for row in rows]
        self._count_pages()

    def copied(self) -> World:
        twin = World(copy.deepcopy(self.cache))
        twin.rows, twin.prompts = [list(row) for row in self.rows], list(self.prompts)
        twin.most_pages = self.most_pages
        return twin

    def check(self) -> None:
        table = self.cache._table
        check_integrity(self.cache)
        assert self.cache.get_seq_length() == (len(self.rows[0]) if self.rows else 0)
        if not self.rows:
            assert table.capacity == 0
            return
        assert list(table.prompts) == self.prompts
        tokens = [self.tokens(row) for row in range(len(self.rows))]
        everything = [
            [[table[layer][:, row] for row in tokens] for layer in range(LAYERS)]
            for table in (KEYS, VALUES)
        ]
        check_content(self.cache, *everything)
        # a page id is used again before the pools grow; a crop may cut shared pages row by row
        assert table.capacity <= self.most_pages + len(self.rows)

    def _count_pages(self) -> None:
        used = len({page for pages in self.cache._table.pages for page in pages})
        self.most_pages = max(self.most_pages, used)


class Expected:
    """One layer's attention over one forward, from the truth and the slots before it."""

    def __init__(self, world, index, layer, rows, before, decode) -> None:
        self.config, self.rank = world.cache.config, Reference.like(world.cache.config, ())
        self.index, self.layer, self.rows, self.decode = index, layer, rows, decode
        self.before, self.prompts = before, list(world.prompts)
        self.tokens = [[token for token in row if token is not None] for row in rows]
        self.dense = False
        store = layer.stable
        if store is not None:
            self.unranked = set(store.unranked)
            slots = store.working_set
            self.slots = [
                [set(head[:used]) for head in heads]
                for heads, used in zip(slots.pages.tolist(), slots.used)
            ]

    def base(self, module, query, keys, values, mask, **kwargs):
        """In place of the model's attention: what it gets is laid out as a dense cache."""
        self.dense = True
        for found, table in ((keys, KEYS), (values, VALUES)):
            for row, columns in enumerate(self.rows):
                wanted = table[self.index][:, [token or 0 for token in columns]]
                past = columns[: len(columns) - query.shape[2]]
                wanted[:, [i for i, token in enumerate(past) if token is None]] = 0
                assert torch.equal(found[row], wanted)
        return query.transpose(1, 2), None

    def check(self, query, out) -> None:
        size, budget = self.config.page_size, self.config.pages
        pages = [-(-len(tokens) // size) for tokens in self.tokens]
        assert self.dense == (not self.decode or max(pages) <= budget)
        if not self.decode:
            return
        grouped = query.unflatten(1, (HEADS, GROUP))  # [B, H, G, q, D]
        found = out.transpose(1, 2).unflatten(1, (HEADS, GROUP))
        for row, tokens in enumerate(self.tokens):
            settled = self.before[row] // size
            newest = set(range(settled, pages[row]))
            steps = [n - self.prompts[row] for n in (self.before[row], len(tokens))]
            for head in range(HEADS):
                ranked = self._ranking(grouped[row, head], tokens, head, settled) | newest
                attended = ranked
                if head in self.layer.groups[0].heads.tolist():
                    place = self.layer.groups[0].heads.tolist().index(head)
                    attended = self.slots[row][place] | newest
                    after = attended
                    if settled >= budget and row in self.unranked:
                        attended = after = ranked
                    elif settled >= budget and self._due(*steps):
                        after = ranked
                    slots = self.layer.stable.working_set
                    held = slots.pages[row, place, : slots.used[row]].tolist()
                    assert set(held) == after, "another set than the ranking's"
                if not self.dense:
                    wanted = self._attention(grouped[row, head], tokens, head, attended, row)
                    torch.testing.assert_close(found[row, head], wanted, rtol=0, atol=1e-10)

    def _due(self, before: int, after: int) -> bool:
        return any(self.rank.due(step, self.index) for step in range(before + 1, after + 1))

    def _ranking(self, query, tokens, head, settled) -> set[int]:
        """Section 4 of the paper: sink, recent, then the best by score among full pages."""
        config, size = self.config, self.config.page_size
        if settled < config.pages:
            return set(range(settled))
        keys = KEYS[self.index, head, tokens]
        queries = query.flatten(0, 1)
        scores = [
            self.rank.page_score(queries, keys[page * size : (page + 1) * size])
            for page in range(settled)
        ]
        table = torch.tensor(scores, dtype=torch.float64)
        if config.group_reduction == "softmax_sum":
            table = (table * 0.5).softmax(0).sum(1)
        else:
            table = table.amax(1)
        recent = min(config.recent_pages, config.pages)
        forced = set(range(min(config.sink_pages, config.pages - recent)))
        forced |= set(range(settled - recent + 1, settled))
        best = sorted(set(range(settled)) - forced, key=lambda page: -table[page].item())
        return forced | set(best[: config.pages - 1 - len(forced)])

    def _attention(self, query, tokens, head, pages, row):
        size, last = self.config.page_size, len(tokens)
        kept = [i for page in pages for i in range(page * size, min((page + 1) * size, last))]
        ids = [tokens[i] for i in kept]
        keys, values = KEYS[self.index, head, ids], VALUES[self.index, head, ids]
        scores = query @ keys.T * 0.5  # [G, q, T]
        position = torch.arange(self.before[row], last)[:, None]
        scores = scores.masked_fill(torch.tensor(kept) > position, -torch.inf)
        return scores.softmax(-1) @ values


class Contract(RuleBasedStateMachine):
    queue_factory: type | None = None

    @initialize(
        page=st.sampled_from([1, 2, 3, 4]),
        pages=st.integers(1, 6),
        interval=st.sampled_from([1, 3, 8, None]),
        options=st.fixed_dictionaries(
            {
                "first_rank": st.sampled_from(["prefill", "decode"]),
                "sink_pages": st.integers(0, 2),
                "recent_pages": st.integers(1, 3),
                "stagger": st.booleans(),
                "group_reduction": st.sampled_from(["max", "softmax_sum"]),
            }
        ),
        unstable=st.sets(st.sampled_from(EVERY_HEAD)),
    )
    def begin(self, page, pages, interval, options, unstable) -> None:
        config = FlexiCacheConfig(
            page_size=page, token_budget=page * pages, rerank_interval=interval, **options
        )
        text = LlamaConfig(
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS * GROUP,
            num_key_value_heads=HEADS,
            hidden_size=HEADS * GROUP * DIM,
            head_dim=DIM,
        )
        text._attn_implementation = "sdpa"
        profile = HeadProfile.from_unstable_heads(text, sorted(unstable))
        cache = FlexiCacheDynamicCache(
            text, profile, config=config, queue_factory=self.queue_factory
        )
        cache._shared.guarded = True  # every forward says what it is
        cache.activate_past_recording()
        self.worlds = [World(cache)]
        self.at, self.next_id = 0, 1

    @property
    def world(self) -> World:
        return self.worlds[self.at]

    @property
    def columns(self) -> int:
        return len(self.world.rows[0]) if self.world.rows else 0

    def _new(self, rows: int, columns: int) -> list[list[int | None]]:
        """Ids that no row has yet: two pages must never score the same."""
        first, self.next_id = self.next_id, self.next_id + rows * columns
        assert self.next_id <= IDS
        return [list(range(at, at + columns)) for at in range(first, self.next_id, columns)]

    def _forward(self, new, *, decode: bool, stop: bool = False) -> None:
        self.world.feed(new, decode=decode, stop=stop)

    # -- forwards --------------------------------------------------------------------------------

    @precondition(lambda self: not self.columns)
    @rule(data=st.data(), columns=st.integers(1, 60))
    def prompt(self, data, columns) -> None:
        rows = len(self.world.rows) or data.draw(st.integers(1, 3), label="rows")
        new = self._new(rows, columns)
        for row in new:  # left padding, up to the whole row
            pads = data.draw(st.integers(0, columns) | st.just(0), label="pads")
            row[:pads] = [None] * pads
        self._forward(new, decode=False)

    @precondition(lambda self: 0 < self.columns < MOST_COLUMNS)
    @rule(data=st.data(), columns=st.integers(1, 24))
    def turn(self, data, columns) -> None:
        """A next turn, or a chunk of the prompt; either may be padded, on either side."""
        new = self._new(len(self.world.rows), columns)
        side = data.draw(st.sampled_from(["none", "left", "right"]), label="side")
        for row in new if side != "none" else ():
            pads = data.draw(st.integers(0, columns), label="pads")
            where = slice(0, pads) if side == "left" else slice(columns - pads, columns)
            row[where] = [None] * pads
        self._forward(new, decode=False)

    @precondition(lambda self: 0 < self.columns < MOST_COLUMNS)
    @rule(steps=st.integers(1, 9))
    def decode(self, steps) -> None:
        for _ in range(steps):
            self._forward(self._new(len(self.world.rows), 1), decode=True)

    @precondition(lambda self: 0 < self.columns < MOST_COLUMNS)
    @rule(data=st.data(), columns=st.integers(2, 12))
    def verify_and_crop(self, data, columns) -> None:
        """Assisted decoding: candidates are verified at once, and the wrong ones taken back."""
        self._forward(self._new(len(self.world.rows), columns), decode=True)
        self.world.check()
        self.world.crop(data.draw(st.integers(0, columns), label="rejected"))

    @precondition(lambda self: 0 < self.columns < MOST_COLUMNS)
    @rule(
        columns=st.integers(1, 9),
        decode=st.booleans(),
        more=st.integers(0, 9),
    )
    def interrupted_and_taken_back(self, columns, decode, more) -> None:
        new = self._new(len(self.world.rows), columns)
        with pytest.raises(Stopped):
            self._forward(new, decode=decode, stop=True)
        with pytest.raises(InterruptedForward):
            self._forward(new, decode=decode)
        self.world.cache.crop(-columns)
        self.world.crop(more)

    # -- changes ---------------------------------------------------------------------------------

    @rule(removed=st.integers(0, 12) | st.integers(0, MOST_COLUMNS))
    def crop(self, removed) -> None:
        self.world.crop(removed)

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data())
    def reorder_cache(self, data) -> None:
        count = len(self.world.rows)
        beams = data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
        self.world.cache.reorder_cache(torch.tensor(beams))
        self.world.select(beams)

    @precondition(lambda self: 0 < len(self.world.rows) <= MOST_ROWS // 2)
    @rule(repeats=st.integers(1, 3))
    def batch_repeat_interleave(self, repeats) -> None:
        count = len(self.world.rows)
        self.world.cache.batch_repeat_interleave(repeats)
        self.world.select([row for row in range(count) for _ in range(repeats)])

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data(), as_mask=st.booleans())
    def batch_select_indices(self, data, as_mask) -> None:
        count = len(self.world.rows)
        rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
        if as_mask:
            rows = sorted(set(rows))
            indices = torch.zeros(count, dtype=torch.bool)
            indices[rows] = True
        else:
            indices = torch.tensor(rows)
        self.world.cache.batch_select_indices(indices)
        self.world.select(rows)

    @rule()
    def reset(self) -> None:
        self.world.cache.reset()
        self.world.cache.activate_past_recording()
        self.world.rows, self.world.prompts, self.world.most_pages = [], [], 0

    @precondition(lambda self: len(self.worlds) < 3)
    @rule(stay=st.booleans())
    def deepcopy(self, stay) -> None:
        """Go on with the copy, or with the original while the copy waits."""
        self.worlds.append(self.world.copied())
        if not stay:
            self.at = len(self.worlds) - 1

    @precondition(lambda self: len(self.worlds) > 1)
    @rule(data=st.data())
    def go_to_another_copy(self, data) -> None:
        self.at = data.draw(st.integers(0, len(self.worlds) - 1))

    @invariant()
    def equals_the_dense_cache(self) -> None:
        if hasattr(self, "worlds"):
            self.world.check()

    def teardown(self) -> None:
        for world in getattr(self, "worlds", ()):
            world.check()


class DelayedContract(Contract):
    queue_factory = DelayingQueue


# Sequences that once failed, cut down.


def world(**sizes) -> World:
    machine = Contract()
    options = {"page": 2, "pages": 3, "interval": 3, "options": {}, "unstable": {(0, 0)}}
    machine.begin(**(options | sizes))
    return machine.world


def ids(rows: int, columns: int) -> list[list[int]]:
    return [list(range(1 + row * columns, 1 + (row + 1) * columns)) for row in range(rows)]


def test_a_row_of_nothing_but_padding_so_far():
    """The first chunks of a left-padded batch may be all padding in a short row."""
    one = world()
    for _ in range(2):
        one.feed([[None] * 5, *ids(1, 5)], decode=False)
    one.feed(ids(2, 4), decode=False)
    one.check()


def test_crop_into_full_pages_that_rows_share():
    """The cut page gets a new id, under which the host has never seen it."""
    one = world()
    one.feed(ids(1, 30), decode=False)
    one.cache.batch_repeat_interleave(2)
    one.select([0, 0])
    one.crop(11)
    one.check()
    one.feed([[5], [6]], decode=False)
    one.check()


def test_crop_twice_keeps_the_whole_budget_in_the_working_set():
    one = world(pages=4)
    one.feed(ids(1, 30), decode=False)
    for removed in (18, 2):  # six pages are left, then five
        one.crop(removed)
        one.check()


QUICK = settings(
    max_examples=100,
    stateful_step_count=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
Contract.TestCase.settings = DelayedContract.TestCase.settings = QUICK
TestContract = Contract.TestCase
TestDelayedContract = DelayedContract.TestCase
