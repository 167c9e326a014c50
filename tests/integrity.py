"""What must hold of a cache between two forwards, stated once.

`check_integrity` needs the cache alone; `check_content` also what every row should contain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexicache_hf.integration.layer import FlexiCacheLayer
from flexicache_hf.kernels.reference import NO_PAGE
from flexicache_hf.pages.digest import page_digests
from flexicache_hf.pages.page_table import PageTable


def tiered(cache: Any) -> list[FlexiCacheLayer]:
    return [layer for layer in cache.layers if isinstance(layer, FlexiCacheLayer)]


def check_integrity(cache: Any) -> None:
    """Raises AssertionError if the parts of the cache disagree."""
    table = cache._table
    check_table(table)
    for layer in tiered(cache):
        assert not layer.torn and layer.pending is None and layer.unanswered is None
        if not layer.is_initialized:
            assert not table.columns
            continue
        assert (layer.columns, layer.rows) == (table.columns, table.rows)
        assert layer.stored == table.lengths
        if layer.unstable is not None:
            pools = layer.unstable
            assert len(pools.keys) == len(pools.values) == len(pools.digests) >= table.capacity
            _check_digests(pools.digests, pools.keys, table, cache.config)
        if layer.stable is not None:
            layer.stable._wait()
            _check_stable(layer.stable, table, cache.config)


def check_table(table: PageTable) -> None:
    size = table.page_size
    assert all(done == table.forwards for done in table.progress)
    assert len(table.lengths) == len(table.prompts) == len(table.padding) == table.rows
    holders = Counter(page for pages in table.pages for page in pages)
    assert table.references == [holders[page] for page in range(table.capacity)]
    free = [page for page in range(table.capacity) if not holders[page]]
    assert sorted(table._free) == free, "a page was lost, or is free twice"
    for row, pages in enumerate(table.pages):
        length, ranges = table.lengths[row], table.padding[row]
        assert len(set(pages)) == len(pages) == -(-length // size)
        assert not length % size or table.references[pages[-1]] == 1, "an open page is shared"
        assert 0 <= table.prompts[row] <= length
        ends = [0, *(edge for span in ranges for edge in span), table.columns]
        assert ends == sorted(ends)
        assert table.columns - sum(end - begin for begin, end in ranges) == length
    for device, ids in table._ids.items():
        for row, pages in zip(ids.tolist(), table.pages, strict=True):
            assert row[: len(pages)] == pages, f"stale ids on {device}"


def _check_stable(store: Any, table: PageTable, config: Any) -> None:
    slots, budget, size = store.working_set, config.pages, config.page_size
    assert store.host.capacity >= table.capacity <= len(store.digests)
    assert store.unranked <= set(range(table.rows))
    assert len(slots.used) == len(slots.tail) == len(slots.keys) == len(slots.pages) == table.rows
    assert slots.keys.shape[2] == slots.values.shape[2] == slots.slots * size
    host_keys, host_values = host_pages(store)
    _check_digests(store.digests, host_keys, table, config)
    maps = slots.pages.tolist()
    for row, pages in enumerate(table.pages):
        used, tail, count = slots.used[row], slots.tail[row], len(pages)
        assert min(budget, count) <= used <= slots.slots
        full = table.lengths[row] // size
        for head, held in enumerate(maps[row]):
            assert held[used:] == [NO_PAGE] * (slots.slots - used)
            held = held[:used]
            assert len(set(held)) == used and set(held) <= set(range(count))
            if not count:
                continue
            assert held[-1] == count - 1, "the newest page is not in the last slot"
            assert held[tail:] == list(range(count - used + tail, count)), "tail has gaps"
            if count <= budget:
                assert held == list(range(count))
            for slot, page in enumerate(held):
                if page >= full:
                    continue
                where = slice(slot * size, (slot + 1) * size)
                _same(slots.keys[row, head, where], host_keys[pages[page], head])
                _same(slots.values[row, head, where], host_values[pages[page], head])


def _check_digests(digests: Tensor, keys: Tensor, table: PageTable, config: Any) -> None:
    full = sorted(
        {
            page
            for pages, length in zip(table.pages, table.lengths, strict=True)
            for page in pages[: length // table.page_size]
        }
    )
    if full:
        _same(digests[full], page_digests(keys[full], config.digest, config.digests_per_page))


def host_pages(store: Any) -> tuple[Tensor, Tensor]:
    """Keys and values `[capacity, H_s, P, D]` of the host tier, by page id."""
    if not store.host.keys:
        empty = torch.empty(0, len(store.heads), store.config.page_size, 1)
        return empty, empty
    return torch.cat(store.host.keys), torch.cat(store.host.values)


def check_content(cache: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Every row of every layer holds exactly `keys[layer][row]`, `values[layer][row]`
    (`[H_kv, tokens, D]`), in both tiers."""
    size = cache.config.page_size
    for number, layer in enumerate(tiered(cache)):
        if not layer.is_initialized:
            assert not any(row.shape[1] for row in keys[number])
            continue
        for row, wanted in enumerate(zip(keys[number], values[number], strict=True)):
            tokens = wanted[0].shape[1]
            assert layer.stored[row] == tokens
            for group, store in zip(layer.groups, (layer.stable, layer.unstable), strict=True):
                if store is None:
                    continue
                mine = [whole[group.heads] for whole in wanted]
                for found, expected in zip(store.row(row, tokens)[:2], mine, strict=True):
                    _same(found, expected)
                if store is layer.unstable:
                    continue
                full = tokens // size
                ids = cache._table.pages[row][:full]
                for pool, expected in zip(host_pages(store), mine, strict=True):
                    if full:
                        _same(pool[ids].transpose(0, 1).flatten(1, 2), expected[:, : full * size])
                if tokens % size:  # the newest page is nowhere but in its slot
                    slots, begin = store.working_set, (store.working_set.used[row] - 1) * size
                    open_page = slice(begin, begin + tokens % size)
                    for pool, expected in zip((slots.keys, slots.values), mine, strict=True):
                        _same(pool[row, :, open_page], expected[:, full * size :])


def _same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected), "content differs"
