"""Dynamic sampling: groups without signal, refilling in bounded rounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.errors import UserError
from megappo.rewards.dynamic import Groups, find_signal, metrics, plan_refill, samples_of


def groups_with(signal):
    signal = np.array(signal, bool)
    return Groups(np.arange(len(signal)), signal, ~signal, np.zeros(len(signal), bool))


def test_groups_of_equal_scores_carry_no_signal():
    scores = np.array([1, 1, 0, 0, 1, 0, 0.5, 0.5, 0.5, 0.5 + 1e-9])
    found = find_signal(scores, np.array([3, 3, 5, 5, 7, 7, 8, 8, 9, 9]))
    assert found.ids.tolist() == [3, 5, 7, 8, 9]
    assert found.signal.tolist() == [False, False, True, False, False]
    assert found.solved.tolist() == [True, False, False, False, False]
    assert found.failed.tolist() == [False, True, False, True, True]


def test_success_looks_at_the_threshold_only():
    scores, groups = np.array([0.8, 1.0, 0.1, 0.3, 0.79, 0.8]), np.array([0, 0, 1, 1, 2, 2])
    assert find_signal(scores, groups).signal.tolist() == [True, True, True]
    assert find_signal(scores, groups, signal="success").signal.tolist() == [False, False, True]


def test_samples_that_are_not_trained_on_give_no_signal():
    scores, groups = np.array([1.0, 0.0, 1.0, 0.0]), np.array([0, 0, 1, 1])
    found = find_signal(scores, groups, np.array([True, False, False, False]))
    assert found.signal.tolist() == [False, False] and found.solved.tolist() == [True, False]
    assert find_signal(np.empty(0), np.empty(0)).ids.tolist() == []


def test_enough_groups_end_the_rounds_and_the_earliest_are_kept():
    plan = plan_refill(groups_with([1, 0, 1, 1, 1]), wanted=3, rounds=1, max_rounds=3)
    assert (plan.keep.tolist(), plan.drop.tolist(), plan.draw, plan.finished) == ([0, 2, 3], [1, 4], 0, True)


def test_what_is_missing_is_drawn_by_the_share_with_signal():
    plan = plan_refill(groups_with([1] * 3 + [0] * 5), wanted=8, rounds=1, max_rounds=3)
    assert plan.keep.tolist() == [0, 1, 2] and not plan.finished
    assert plan.draw == 8  # 5 missing at a share of 4/9 would be 12: never more than a batch
    assert plan_refill(groups_with([1] * 7 + [0]), wanted=8, rounds=2, max_rounds=3).draw == 2


def test_the_last_round_fills_up_or_fails():
    seen = groups_with([1, 0, 0, 1, 0])
    plan = plan_refill(seen, wanted=4, rounds=2, max_rounds=2)
    assert plan.finished and plan.keep.tolist() == [0, 1, 2, 3] and plan.filled.tolist() == [1, 2]
    assert plan.drop.tolist() == [4] and plan.draw == 0
    with pytest.raises(UserError, match="only 2 of 4 prompts"):
        plan_refill(seen, wanted=4, rounds=2, max_rounds=2, shortfall="fail")


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_group_is_kept_or_dropped_and_the_rounds_end(signal, wanted, rounds, max_rounds):
    seen = groups_with(signal)
    plan = plan_refill(seen, wanted, rounds, max_rounds)
    assert sorted([*plan.keep, *plan.drop]) == list(range(len(signal)))
    assert len(plan.keep) <= wanted and set(plan.filled) <= set(plan.keep)
    assert plan.finished == (sum(signal) >= wanted or rounds >= max_rounds)
    assert (plan.draw == 0) == plan.finished and plan.draw <= wanted
    if plan.finished:
        assert len(plan.keep) == min(wanted, len(signal))


def test_metrics_count_prompts():
    seen = groups_with([1, 0, 1, 1, 0])
    numbers = metrics(seen, plan_refill(seen, 2, 2, 3), 2)
    assert numbers == {
        "dynamic_sampling/rounds": 2.0,
        "dynamic_sampling/drawn": 5.0,
        "dynamic_sampling/kept": 2.0,
        "dynamic_sampling/filled": 0.0,
        "dynamic_sampling/surplus": 1.0,
        "dynamic_sampling/no_signal_share": 0.4,
        "dynamic_sampling/all_success_share": 0.4,
        "dynamic_sampling/all_failure_share": 0.0,
    }


def test_samples_of_kept_groups():
    assert samples_of([1, 3], np.array([1, 1, 2, 3])).tolist() == [0, 1, 3]
