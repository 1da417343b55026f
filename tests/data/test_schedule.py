"""Properties of the global micro-batch schedule."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.schedule import Budget, lower_bound, mini_batches, plan, plan_forward

lengths_st = st.lists(st.integers(1, 40), min_size=0, max_size=60)
layouts = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3]))
budgets = st.one_of(st.builds(Budget, samples=st.integers(1, 7)), st.builds(Budget, tokens=st.integers(40, 120)))


def lognormal(n: int, seed: int, median: float = 1500, sigma: float = 1.0) -> np.ndarray:
    draws = np.random.RandomState(seed).normal(np.log(median), sigma, n)
    return np.clip(np.exp(draws), 1, 16384).astype(np.int64)


def loads(schedule, lengths, mini=0, power=1) -> np.ndarray:
    """[dp, K] sums of length**power."""
    return np.array([[(lengths[m] ** power).sum() for m in r] for r in schedule.micro_batches[mini]])


def check_rank_lists(ranks, expected, lengths, dp, budget, multiple_of) -> None:
    assert len(ranks) == dp
    counts = {len(micros) for micros in ranks}
    assert len(counts) == 1 and counts.pop() % multiple_of == 0
    assert sorted(i for micros in ranks for m in micros for i in m) == sorted(expected)
    for micros in ranks:
        for m in micros:
            assert m == sorted(m)
            assert budget.samples is None or len(m) <= budget.samples
            assert budget.tokens is None or sum(lengths[i] for i in m) <= budget.tokens


# --- mini-batches ---


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 99), st.booleans())
def test_mini_batches_partition_the_samples(n, size, seed, shuffle):
    batches = mini_batches(n, size, seed, shuffle)
    assert sorted(np.concatenate([*batches, []]).tolist()) == list(range(n))
    assert all(len(b) == size for b in batches[:-1]) and all(0 < len(b) <= size for b in batches)
    assert all((np.diff(b) > 0).all() for b in batches)


def test_mini_batches_depend_on_the_seed_only():
    again = mini_batches(20, 8, (1, 2, 3))
    assert all((a == b).all() for a, b in zip(mini_batches(20, 8, (1, 2, 3)), again, strict=True))
    assert any((a != b).any() for a, b in zip(mini_batches(20, 8, (1, 2, 4)), again, strict=True))
    assert mini_batches(6, 3, 5)[0].tolist() == [2, 4, 5]  # a frozen stream


def test_mini_batches_without_shuffling_keep_the_order():
    assert [b.tolist() for b in mini_batches(5, 2, 0, shuffle=False)] == [[0, 1], [2, 3], [4]]


# --- invariants of a plan ---


@settings(max_examples=150, deadline=None)
@given(lengths_st, layouts, budgets, st.integers(1, 30), st.integers(0, 9))
def test_every_sample_is_planned_once_within_the_budget(lengths, layout, budget, size, seed):
    dp, multiple_of = layout
    batches = mini_batches(len(lengths), size, seed)
    schedule = plan(lengths, batches, dp, budget, multiple_of=multiple_of)
    assert len(schedule.micro_batches) == len(batches)
    for mini, (ranks, batch) in enumerate(zip(schedule.micro_batches, batches, strict=True)):
        check_rank_lists(ranks, batch.tolist(), lengths, dp, budget, multiple_of)
        assert schedule.num_micro_batches(mini) == len(ranks[0])
        for rank, micros in enumerate(ranks):
            assert all(schedule.owner[i] == rank for m in micros for i in m)


@settings(max_examples=100, deadline=None)
@given(lengths_st, layouts, budgets)
def test_micro_batches_are_empty_only_when_samples_are_too_few(lengths, layout, budget):
    dp, multiple_of = layout
    ranks = plan(lengths, [range(len(lengths))], dp, budget, multiple_of=multiple_of).micro_batches[0]
    filled = sum(1 for micros in ranks for m in micros if m)
    assert filled == min(len(lengths), dp * len(ranks[0]))


@settings(max_examples=100, deadline=None)
@given(lengths_st, layouts, st.integers(1, 7))
def test_sample_budget_gives_the_smallest_even_count(lengths, layout, samples):
    dp, multiple_of = layout
    schedule = plan(lengths, [range(len(lengths))], dp, Budget(samples=samples), multiple_of=multiple_of)
    per_rank = -(-len(lengths) // dp)
    needed = max(1, -(-(-(-per_rank // samples)) // multiple_of)) * multiple_of  # noqa: B002
    assert schedule.num_micro_batches(0) == needed
    sizes = [len(m) for micros in schedule.micro_batches[0] for m in micros]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(lengths_st, layouts, budgets, budgets)
def test_forward_plan_keeps_every_sample_on_its_owner(lengths, layout, budget, forward_budget):
    dp, multiple_of = layout
    owner = plan(lengths, [range(len(lengths))], dp, budget).owner
    ranks = plan_forward(lengths, owner, dp, forward_budget, multiple_of)
    check_rank_lists(ranks, range(len(lengths)), lengths, dp, forward_budget, multiple_of)
    for rank, micros in enumerate(ranks):
        mine = sorted(i for m in micros for i in m)
        assert mine == np.flatnonzero(owner == rank).tolist()
        assert sum(1 for m in micros if m) == min(len(mine), len(micros))


def test_a_later_epoch_keeps_owners_with_other_mini_batches():
    lengths = lognormal(64, 0)
    first = plan(lengths, mini_batches(64, 16, 1), 4, Budget(tokens=16384))
    batches = mini_batches(64, 16, 2)
    second = plan(lengths, batches, 4, Budget(tokens=16384), owner=first.owner)
    assert (second.owner == first.owner).all()
    for ranks, batch in zip(second.micro_batches, batches, strict=True):
        check_rank_lists(ranks, batch.tolist(), lengths, 4, Budget(tokens=16384), 1)


def test_samples_in_no_mini_batch_have_no_owner_and_no_forward_pass():
    schedule = plan([3, 4, 5], [[0, 2]], 2, Budget(samples=1))
    assert schedule.owner[1] == -1
    assert plan_forward([3, 4, 5], schedule.owner, 2, Budget(samples=4)) in ([[[0]], [[2]]], [[[2]], [[0]]])


def test_plan_is_deterministic_and_ignores_the_order_inside_a_mini_batch():
    lengths = lognormal(200, 3)
    batch = mini_batches(200, 200, 0)[0]
    a = plan(lengths, [batch], 4, Budget(tokens=20000))
    b = plan(lengths.tolist(), [batch[::-1].tolist()], 4, Budget(tokens=20000))
    assert a.micro_batches == b.micro_batches


def test_costliest_micro_batch_comes_first_on_every_rank():
    lengths = lognormal(300, 5)
    work = loads(plan(lengths, [range(300)], 3, Budget(tokens=16384)), lengths, power=2)
    assert (np.diff(work, axis=1) <= 0).all()


# --- errors ---


def test_sample_longer_than_the_budget_is_named():
    with pytest.raises(ValueError, match=r"sample 2 has 50 tokens, more than the budget of 49"):
        plan([3, 4, 50], [[0, 1, 2]], 1, Budget(tokens=49))


@pytest.mark.parametrize("args", [{}, {"samples": 1, "tokens": 1}, {"samples": 0}, {"tokens": -1}])
def test_budget_refuses_none_both_or_nonpositive(args):
    with pytest.raises(ValueError, match="Budget"):
        Budget(**args)


@pytest.mark.parametrize(
    ("lengths", "batches", "kwargs", "message"),
    [
        ([3, 4], [[0], [0, 1]], {}, "sample 0 is in more than one"),
        ([3, 4], [[0, 2]], {}, "outside 0..1"),
        ([3, 0], [[0, 1]], {}, "sample 1 has length 0"),
        ([3, 4], [[0, 1]], {"owner": np.array([0, 7])}, "owners must be"),
        ([3, 4], [[0, 1]], {"owner": np.array([0])}, "owner names 1 samples"),
    ],
)
def test_bad_input_is_refused(lengths, batches, kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan(lengths, batches, 2, Budget(samples=1), **kwargs)


# --- quality ---


def brute_force(lengths: list[int], bins: int) -> int:
    """The smallest possible maximum load."""
    best = sum(lengths)
    for where in product(range(bins), repeat=len(lengths) - 1):
        load = [0] * bins
        load[0] = lengths[-1]  # bins are interchangeable
        for size, b in zip(lengths, where, strict=False):
            load[b] += size
        best = min(best, max(load))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=3, max_size=7), st.integers(30, 60))
def test_number_of_micro_batches_is_optimal_on_tiny_inputs(lengths, tokens):
    schedule = plan(lengths, [range(len(lengths))], 1, Budget(tokens=tokens))
    fewest = next(k for k in range(1, 8) if brute_force(lengths, k) <= tokens)
    assert schedule.num_micro_batches(0) == fewest >= lower_bound(np.array(lengths), tokens)


def test_packing_is_found_where_greedy_rules_fail():
    lengths = [6, 5, 4, 3, 3, 3]  # 12 + 12 as 6+3+3 and 5+4+3; first-fit and longest-first both need luck
    assert plan(lengths, [range(6)], 1, Budget(tokens=12)).num_micro_batches(0) == 2
    lengths = [44, 24, 24, 22, 21, 17, 8, 8, 6, 6]  # two full bins of 90; first-fit decreasing needs three
    assert plan(lengths, [range(10)], 2, Budget(tokens=90)).num_micro_batches(0) == 1


def test_balance_is_near_optimal_on_tiny_inputs():
    rng, ratios = np.random.RandomState(0), []
    for _ in range(40):
        lengths = rng.randint(1, 50, size=7)
        worst = loads(plan(lengths, [range(7)], 1, Budget(samples=3)), lengths).max()  # three bins of 2 or 3
        free = loads(plan(lengths, [range(7)], 3, Budget(tokens=1000)), lengths).max()
        best = brute_force(lengths.tolist(), 3)
        assert best <= free <= worst * 4 / 3 and free <= best * 4 / 3
        ratios.append(free / best)
    assert np.mean(ratios) < 1.02


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("median", "sigma"), [(1500, 1.0), (1560, 1.0), (1800, 0.8), (1000, 1.3)])
def test_long_tailed_batch_meets_the_bar(median, sigma, seed):
    lengths = lognormal(4096, seed, median, sigma)
    schedule = plan(lengths, [range(4096)], 64, Budget(tokens=16384))
    assert schedule.num_micro_batches(0) == -(-lower_bound(lengths, 16384) // 64)
    tokens = loads(schedule, lengths).sum(1)
    work = loads(schedule, lengths, power=2).sum(1)
    assert tokens.max() <= 1.01 * tokens.mean()
    assert work.max() <= 1.05 * work.mean()


def test_nearly_full_bins_are_still_packed_at_the_lower_bound():
    lengths = np.clip(lognormal(2048, 7), 1, 8192)
    tokens = int(lengths.sum() / (16 * 10 * 0.999))
    schedule = plan(lengths, [range(2048)], 16, Budget(tokens=tokens))
    assert schedule.num_micro_batches(0) == 10
    per_bin = loads(schedule, lengths)
    assert per_bin.max() <= 1.001 * per_bin.mean() + 1


@pytest.mark.parametrize("samples", [1, 4, 16])
def test_sample_budget_balances_ranks_too(samples):
    lengths = lognormal(4096, 1)
    schedule = plan(lengths, [range(4096)], 64, Budget(samples=samples))
    tokens, work = loads(schedule, lengths).sum(1), loads(schedule, lengths, power=2).sum(1)
    assert tokens.max() <= 1.02 * tokens.mean()
    assert work.max() <= 1.05 * work.mean()


def test_lower_bound_counts_large_samples_that_cannot_share():
    assert lower_bound(np.array([6, 6, 6]), 10) == 3  # the sum alone says two
    assert lower_bound(np.array([6, 5, 5, 5]), 10) == 3  # nothing fits beside the 6
    assert lower_bound(np.array([], dtype=np.int64), 10) == 0
