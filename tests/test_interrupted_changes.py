"""Changes of rows and lengths, interrupted at any line: afterwards the cache is as before, or
changed, or refuses until it is reset."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter

import pytest
import torch
from families import build, tiered_heads
from helpers import cache_argument, flexicache, forward, left_padding, random_ids, tiny_llama
from integrity import check_integrity
from test_faults import AtLine, times_of_lines
from transformers import DynamicCache

from flexicache_hf import InterruptedChange
from flexicache_hf.pages import page_pool as pools
from flexicache_hf.tiers import host_pages as host

SIZES = {"token_budget": 16, "page_size": 4, "rerank_interval": 3}
CHANGES = {
    "crop within a page": lambda cache, other: cache.crop(-1),
    "crop into shared pages": lambda cache, other: cache.crop(-14),
    "reorder_cache": lambda cache, other: cache.reorder_cache(torch.tensor([1, 1, 3, 0])),
    "batch_repeat_interleave": lambda cache, other: cache.batch_repeat_interleave(2),
    "batch_select_indices": lambda cache, other: cache.batch_select_indices(torch.tensor([2, 0])),
    "join": lambda cache, other: cache.join(other),
    "reset": lambda cache, other: cache.reset(),
}
POINTS = 90


def goes_on(model, cache) -> list[torch.Tensor]:
    """Logits of a decode step and of a dense turn."""
    found = []
    for count, seed in ((1, 5), (5, 6)):
        ids = random_ids(len(cache.lengths) or 2, count, seed)
        at = torch.tensor(cache.lengths or (0, 0))[:, None] + torch.arange(count)
        with torch.no_grad():
            kwargs = {cache_argument(model): cache, "position_ids": at}
            found.append(model(ids, **kwargs).logits[:, -1])
    return found


def same(found, expected) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def filled(model, padded: bool = True):
    """Four rows, two of which share their pages, after a padded prompt and eleven steps."""
    cache = flexicache(model, *tiered_heads(model)[::2], **SIZES)
    cache.activate_past_recording()
    mask = left_padding(40, 0, 9, 27) if padded else None
    forward(model, cache, random_ids(3, 40), mask)
    cache.batch_select_indices(torch.tensor([0, 0, 1, 2]))
    for step in range(11):
        at = torch.tensor(cache.lengths)[:, None]
        kwargs = {cache_argument(model): cache, "position_ids": at}
        with torch.no_grad():
            model(random_ids(4, 1, seed=20 + step), **kwargs)
    return cache


def joining(model):
    cache = flexicache(model, *tiered_heads(model)[::2], **SIZES)
    forward(model, cache, random_ids(2, 30, seed=9), left_padding(30, 0, 11))
    return cache


class Twins:
    """What the cache answers if nothing had happened, if all had, and after a reset."""

    def __init__(self, model, cache, other, change) -> None:
        self.model = model
        self.before = goes_on(model, copy.deepcopy(cache))
        changed, given = copy.deepcopy(cache), copy.deepcopy(other)
        change(changed, given)
        self.after = goes_on(model, changed)
        self.new = goes_on(model, flexicache(model, *tiered_heads(model)[::2], **SIZES))
        self.other = goes_on(model, copy.deepcopy(other)) if other is not None else None

    def check(self, cache, other) -> str:
        """Which of them it is; fails if none."""
        try:
            found = goes_on(self.model, copy.deepcopy(cache))
        except InterruptedChange as refused:
            assert "was interrupted" in str(refused) and "cache.reset()" in str(refused)  # noqa: PT017
            outcome = "refused"
            for again in (
                lambda: cache.crop(-1),
                lambda: cache.crop(0),
                lambda: cache.reorder_cache(torch.tensor([0, 0])),
                lambda: cache.batch_repeat_interleave(2),
                lambda: goes_on(self.model, copy.deepcopy(copy.deepcopy(cache))),
            ):
                with pytest.raises(InterruptedChange, match=r"start over with cache\.reset"):
                    again()
        else:
            check_integrity(cache)
            outcome = "before" if same(found, self.before) else "after"
            assert outcome == "before" or same(found, self.after), "silently wrong"
        if other is not None and outcome != "after":  # the rows that were to join are not lost
            assert same(goes_on(self.model, other), self.other)
        cache.reset()
        check_integrity(cache)
        assert same(goes_on(self.model, cache), self.new)
        return outcome


def interrupt(model, cache, name) -> Counter[str]:
    """At each place once: a line that runs for every row or page counts where it runs first."""
    change, other = CHANGES[name], joining(model) if name == "join" else None
    twins = Twins(model, cache, other, change)
    outcomes: Counter[str] = Counter()
    for point in places(change, copy.deepcopy(cache), copy.deepcopy(other)):
        broken, given = copy.deepcopy(cache), copy.deepcopy(other)
        with AtLine(point) as line, contextlib.suppress(KeyboardInterrupt):
            change(broken, given)
        assert line.where
        try:
            outcomes[twins.check(broken, given)] += 1
        except AssertionError as error:
            raise AssertionError(f"{name} interrupted at {line.where}") from error
    return outcomes


def places(change, cache, other) -> list[int]:
    """For every line of the package that `change` runs, which of all lines it is for the first
    time, and in the middle."""
    seen = times_of_lines(lambda: change(cache, other))
    found = sorted({at for ats in seen for at in (ats[0], ats[len(ats) // 2])})
    return found[:: -(-len(found) // POINTS)]


@pytest.mark.parametrize("name", CHANGES)
def test_interrupted_at_any_line(name):
    model = copy.deepcopy(tiny_llama())
    outcomes = interrupt(model, filled(model), name)
    assert outcomes["refused"] > 10
    assert outcomes["before"] > 0


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
@pytest.mark.parametrize("name", ["crop within a page", "reorder_cache", "reset"])
def test_interrupted_between_layers_of_several_kinds(family, name):
    """Sliding windows and convolutions, which are transformers' own."""
    model = copy.deepcopy(build(family))
    dense = DynamicCache(config=model.config)
    dense.activate_past_recording()
    forward(model, dense, random_ids(1, 40))
    try:
        forward(model, dense, random_ids(1, 1))
    except RuntimeError as error:  # sliding layers of 5.17
        pytest.skip(f"transformers' own layers that record their past cannot decode: {error}")
    assert interrupt(model, filled(model, padded=False), name)["refused"] > 5


OPERATIONS = {
    "pages grow": (pools, "with_slack"),
    "host memory": (host.HostPages, "reserve"),
    "copies of rows": (torch.Tensor, "index_select"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_failing_operation(name, operation, monkeypatch):
    """No memory, at the n-th call of an operation for every n."""
    model = copy.deepcopy(tiny_llama())
    cache, change = filled(model), CHANGES[name]
    other = joining(model) if name == "join" else None
    twins = Twins(model, cache, other, change)
    owner, attribute = OPERATIONS[operation]
    original = getattr(owner, attribute)
    for failing in range(200):
        broken, given = copy.deepcopy(cache), copy.deepcopy(other)
        calls = 0

        def fails(*args, failing=failing, **kwargs):
            nonlocal calls
            calls += 1
            if calls > failing:
                raise MemoryError("for the test")
            return original(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(owner, attribute, fails)
            try:
                change(broken, given)
                failed = False
            except MemoryError:
                failed = True
        outcome = twins.check(broken, given)
        assert outcome == "after" if not failed else outcome in ("before", "refused")
        if not failed:
            return
    raise AssertionError("the change never came to its end")
