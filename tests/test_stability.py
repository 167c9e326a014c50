"""RCO, windows, vote and overlaps: hand-computed cases, a slow reference, and invariants."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexicache_hf.profiles.stability import (
    StabilityVote,
    offset_curves,
    overlap,
    rank_heads,
    rco,
    split_half,
    task_overlap,
    vote,
    window_rco,
    window_stability,
)


def one_head(sets):
    """[steps, 1, 1, K] of a list of page lists."""
    return torch.tensor(sets)[:, None, None, :]


@pytest.mark.parametrize(
    ("shared", "top_k", "pages", "expected"),
    [
        (4, 4, 8, 1.0),  # the same set
        (3, 4, 8, 0.5),  # (3/4 - 1/2) / (1/2)
        (2, 4, 8, 0.0),  # exactly chance
        (0, 4, 8, 0.0),  # below chance is clamped
        (3, 4, 16, 2 / 3),  # (3/4 - 1/4) / (3/4)
        (1, 1, 2, 1.0),
        (4, 4, 5, 1.0),  # K = N - 1: equal sets still score 1 ...
        (3, 4, 5, 0.0),  # ... and any change at all scores 0: (3/4 - 4/5) < 0
    ],
)
def test_rco_by_hand(shared, top_k, pages, expected):
    assert rco(torch.tensor(shared), top_k, torch.tensor(pages)).item() == pytest.approx(expected)


@pytest.mark.parametrize("pages", [4, 3])
def test_rco_is_undefined_when_every_page_is_selected(pages):
    with pytest.raises(ValueError, match=f"num_pages goes down to {pages}, top_k is 4"):
        rco(torch.tensor(3), 4, torch.tensor(pages))


def test_window_by_hand_with_growing_pages():
    # Reference {0,1}; N grows 4, 4, 8: shares 1 of 2 at N=4 (chance), then 2 of 2, then 1 at N=8.
    sets = one_head([[0, 1], [1, 2], [1, 0], [0, 7]])
    result = window_rco(sets, torch.tensor([4, 4, 4, 8]), window=4)
    assert result.shape == (1, 3, 1, 1)
    assert result.flatten().tolist() == pytest.approx([0.0, 1.0, (0.5 - 0.25) / 0.75])
    assert window_stability(result).item() == pytest.approx((0 + 1 + 1 / 3) / 3)


def test_offset_curve_is_the_mean_over_windows():
    sets = one_head([[0, 1], [0, 1], [2, 3], [0, 1], [0, 1], [2, 3]])
    windows = window_rco(sets, torch.full((6,), 4), window=3)
    assert windows.flatten(1).tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert offset_curves(windows).flatten().tolist() == [1.0, 0.0]


def test_windows_are_consecutive_and_the_incomplete_one_is_dropped():
    sets = one_head([[0], [0], [5], [5], [1]])
    assert window_rco(sets, torch.full((5,), 6), window=2).flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("totals", "windows"),
    [
        ([2, 2, 2, 2], 0),  # N <= K everywhere
        ([2, 3, 3, 3], 1),  # one step of the first window has N = K
        ([3, 3, 3, 3], 2),  # N = K + 1 counts
        ([1, 2, 3, 4], 1),
    ],
)
def test_only_windows_with_more_pages_than_k_count(totals, windows):
    sets = one_head([[0, 1]] * 4)
    assert len(window_rco(sets, torch.tensor(totals), window=2)) == windows


def test_too_few_steps_give_no_window_and_the_vote_says_why():
    ballot = StabilityVote(1, 1, 1)
    assert ballot.add_pages(one_head([[0]] * 3), torch.full((3,), 9), window=4) == 0
    assert math.isnan(ballot.stability.item())
    with pytest.raises(ValueError, match="no window counted"):
        ballot.unstable_heads()


@pytest.mark.parametrize(
    ("sets", "totals", "message"),
    [
        ([[0, 0], [0, 1]], [5, 5], "same id twice"),
        ([[0, 1], [0, 5]], [5, 5], "outside"),
        ([[0, 1], [-1, 0]], [5, 5], "outside"),
        ([[0, 1], [0, 1]], [5], r"expected pages \[steps"),
    ],
)
def test_bad_page_sets_are_refused(sets, totals, message):
    with pytest.raises(ValueError, match=message):
        window_rco(one_head(sets), torch.tensor(totals), window=2)


def test_a_window_of_one_step_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        window_rco(one_head([[0, 1]]), torch.tensor([5]), window=1)


def test_vote_by_hand():
    # Heads (0,0) (0,1) (1,0) (1,1); M = 2. The two least stable of each window:
    stability = torch.tensor(
        [
            [[0.9, 0.1], [0.2, 0.8]],  # (0,1) (1,0)
            [[0.3, 0.1], [0.9, 0.2]],  # (0,1) (1,1)
            [[0.9, 0.4], [0.1, 0.9]],  # (1,0) (0,1)
        ]
    )
    ballot = StabilityVote(2, 2, 2)
    ballot.add(stability)
    assert ballot.votes.tolist() == [[0, 3], [2, 1]]
    assert vote(stability, 2) == ((0, 1), (1, 0))


def test_vote_ties():
    # In a window: the lower position wins.
    assert vote(torch.full((1, 2, 2), 0.5), 2) == ((0, 0), (0, 1))
    # In the count: one vote each, so the lower mean stability wins, against the position.
    stability = torch.tensor([[[0.3, 0.9]], [[0.4, 0.1]], [[0.2, 0.9]], [[0.9, 0.0]]])
    assert vote(stability, 1) == ((0, 0),)  # 2 votes each, means 0.45 and 0.475
    assert vote(stability + torch.tensor([0.0, -0.1]), 1) == ((0, 1),)  # means 0.45 and 0.375
    assert vote(torch.tensor([[[0.1, 0.7]], [[0.7, 0.1]]]), 1) == ((0, 0),)  # equal: the position


def test_heads_that_were_not_measured_are_never_named():
    stability = torch.tensor([[[math.nan, math.nan], [0.9, 0.8]]])
    assert vote(stability, 1) == ((1, 1),)
    assert rank_heads(torch.zeros(2, 2), stability[0]) == ((1, 1), (1, 0))
    with pytest.raises(ValueError, match="only 2 heads were measured"):
        vote(stability, 3)


def test_overlap_matrix_by_hand():
    result = task_overlap(
        {"a": ((0, 0), (0, 1)), "b": ((0, 1), (1, 0)), "c": ((0, 0), (0, 1))}, num_heads=8
    )
    assert result.matrix == ((1.0, 0.5, 1.0), (0.5, 1.0, 0.5), (1.0, 0.5, 1.0))
    assert result.mean == pytest.approx(4 / 6)  # the diagonal stays out
    assert result.chance == 0.25
    with pytest.raises(ValueError, match="found 1 and 2 heads"):
        overlap(((0, 0),), ((0, 0), (0, 1)))


def test_split_half_of_constant_and_of_random_stability():
    torch.manual_seed(0)
    constant = torch.rand(10, 10).expand(40, 10, 10)
    result = split_half(constant, 25)
    assert (result.recall, result.agreement, result.chance) == (1.0, 1.0, 0.25)
    noise = split_half(torch.rand(40, 10, 10), 25)
    assert abs(noise.recall - 0.25) < 0.06


def test_split_half_by_document_keeps_documents_whole():
    # Two documents that contradict each other: split by document, nothing is predicted.
    stability = torch.tensor([[[0.0, 1.0]]] * 4 + [[[1.0, 0.0]]] * 4)
    result = split_half(stability, 1, groups=[0] * 4 + [1] * 4)
    assert (result.recall, result.agreement) == (0.0, 0.0)
    with pytest.raises(ValueError, match="found 1"):
        split_half(stability, 1, groups=[0] * 8)


def slow_rco(first, later, total):
    chance = len(first) / total
    return max(0.0, (len(set(first) & set(later)) / len(first) - chance) / (1 - chance))


@st.composite
def page_sets(draw):
    top_k, layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    window, steps = draw(st.integers(2, 5)), draw(st.integers(1, 14))
    start = draw(st.integers(1, 8))
    totals = [start + step // draw(st.just(3)) for step in range(steps)]
    rng = draw(st.randoms(use_true_random=False))
    sets = [
        [
            [
                rng.sample(range(total), top_k) if total >= top_k else [-1] * top_k
                for _ in range(heads)
            ]
            for _ in range(layers)
        ]
        for total in totals
    ]
    return torch.tensor(sets).reshape(steps, layers, heads, top_k), torch.tensor(totals), window


@settings(max_examples=60, deadline=None)
@given(page_sets())
def test_windows_equal_a_slow_reference(case):
    pages, totals, window = case
    expected = []
    for start in range(0, len(pages) - window + 1, window):
        if min(totals[start : start + window]) <= pages.shape[-1]:
            continue
        expected.append(
            [
                [
                    [
                        slow_rco(
                            pages[start, layer, head].tolist(),
                            pages[start + offset, layer, head].tolist(),
                            int(totals[start + offset]),
                        )
                        for head in range(pages.shape[2])
                    ]
                    for layer in range(pages.shape[1])
                ]
                for offset in range(1, window)
            ]
        )
    found = window_rco(pages, totals, window)
    assert found.shape == (len(expected), window - 1, *pages.shape[1:3])
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).view_as(found))
    assert bool(((found >= 0) & (found <= 1)).all())


@settings(max_examples=40, deadline=None)
@given(page_sets(), st.randoms(use_true_random=False))
def test_order_within_a_set_and_names_of_pages_do_not_matter(case, rng):
    pages, totals, window = case
    found = window_rco(pages, totals, window)
    order = list(range(pages.shape[-1]))
    rng.shuffle(order)
    assert torch.equal(window_rco(pages[..., order], totals, window), found)
    mirrored = torch.where(pages >= 0, int(totals.min()) - 1 - pages, pages)
    if bool((pages < totals.min()).all()):
        assert torch.equal(window_rco(mirrored, totals, window), found)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_window_by_window_equals_all_at_once_in_any_order(data):
    windows, layers, heads = (data.draw(st.integers(1, 6)) for _ in range(3))
    # Eighths: sums are exact, so the order of windows cannot change even the last bit.
    levels = data.draw(st.lists(st.integers(0, 8), min_size=windows * layers * heads))
    values = torch.tensor(levels[: windows * layers * heads]) / 8
    stability = values.view(windows, layers, heads)
    count = data.draw(st.integers(0, layers * heads))
    ballot = StabilityVote(layers, heads, count)
    for index in data.draw(st.permutations(range(windows))):
        ballot.add(stability[index : index + 1])
    assert tuple(sorted(ballot.unstable_heads())) == vote(stability, count)
    assert len(vote(stability, count)) == count
    assert int(ballot.votes.sum()) == windows * count
