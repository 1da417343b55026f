"""Running moments: the same as of all numbers at once, however they come."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.rewards.running import Moments


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-100, 100), max_size=7), max_size=6),
    st.sampled_from([0.0, 1e6, -1e9]),
)
def test_parts_merge_to_the_moments_of_the_whole(parts, offset):
    merged = Moments()
    for part in parts:
        merged = merged.merge(Moments.of(np.array(part) + offset))
    whole = np.concatenate([np.empty(0), *map(np.array, parts)]) + offset
    assert merged.count == len(whole)
    if len(whole):
        assert merged.mean == pytest.approx(whole.mean(), abs=1e-9 + 1e-15 * abs(offset))
    if len(whole) > 1:
        assert merged.std == pytest.approx(whole.std(ddof=1), rel=1e-6, abs=1e-6)


def test_small_spread_far_from_zero_is_not_lost():
    merged = Moments()
    for _ in range(100):
        merged = merged.merge(Moments.of(1e9 + np.array([-1.0, 1.0])))
    assert merged.std == pytest.approx(np.sqrt(200 / 199), rel=1e-9)


def test_equal_scores_standardise_to_zero_despite_rounding():
    moments = Moments.of(np.full(3, 0.1)).merge(Moments.of(np.full(4, 0.1)))
    assert moments.standardize(np.array([0.1, 0.1])).tolist() == [0.0, 0.0]
