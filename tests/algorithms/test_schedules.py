"""Schedules against their closed forms."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algorithms.schedules import Schedule, value_at

VALUES = st.floats(1e-6, 1e3)
TOTALS = st.integers(1, 400)
QUICK = settings(max_examples=80, deadline=None, derandomize=True)


def curve(schedule: Schedule, total: int) -> list[float]:
    return [value_at(schedule, i, total) for i in range(total)]


CLOSED = {
    "linear": lambda s, e, p: s + (e - s) * p,
    "cosine": lambda s, e, p: e + (s - e) * (1 + math.cos(math.pi * p)) / 2,
    "exponential": lambda s, e, p: math.exp(math.log(s) * (1 - p) + math.log(e) * p),
}


@pytest.mark.parametrize("shape", CLOSED)
@pytest.mark.parametrize("timing", [{"steps": 20, "delay": 5}, {"fraction": 0.4, "delay_fraction": 0.1}])
def test_fifty_iterations_follow_the_closed_form(shape, timing):
    schedule = Schedule(start=0.3, end=0.002, shape=shape, **timing)
    for i, value in enumerate(curve(schedule, 50)):
        progress = min(1.0, max(0.0, (i - 5) / 20))
        assert value == pytest.approx(CLOSED[shape](0.3, 0.002, progress), rel=1e-12)


def test_constant_jumps_when_the_delay_is_over():
    assert curve(Schedule(start=1, end=2, shape="constant", delay=3), 6) == [1, 1, 1, 2, 2, 2]
    assert curve(Schedule(start=1, end=2, shape="constant"), 2) == [2, 2]


def test_stages_hold_each_value_until_their_share_of_the_run():
    schedule = Schedule(shape="stages", stages=((0.2, 0.008), (0.8, 0.012), (1.0, 0.015)))
    assert curve(schedule, 50) == [0.008] * 10 + [0.012] * 30 + [0.015] * 10
    assert curve(schedule, 1) == [0.008]
    assert value_at(schedule, 60, 50) == 0.015, "a run that was extended stays in the last stage"


def test_kl_warm_up_of_the_documents():
    """Coefficient 0 for the first 5 % of the iterations, then a ramp to 0.001."""
    schedule = Schedule(start=0.0, end=0.001, delay_fraction=0.05, fraction=0.1)
    got = curve(schedule, 100)
    assert got[:6] == [0.0] * 6 and got[10] == pytest.approx(0.0005) and got[15:] == [0.001] * 85


@QUICK
@given(VALUES, VALUES, TOTALS, st.sampled_from(sorted(CLOSED)))
def test_without_length_the_first_and_the_last_iteration_have_the_end_points(start, end, total, shape):
    got = curve(Schedule(start=start, end=end, shape=shape), total)
    assert got[-1] == end
    if total > 1:
        assert got[0] == pytest.approx(start, rel=1e-12)


@QUICK
@given(
    VALUES,
    VALUES,
    TOTALS,
    st.sampled_from([*sorted(CLOSED), "constant"]),
    st.integers(0, 50),
    st.one_of(st.none(), st.integers(1, 500)),
)
def test_values_stay_between_the_end_points_and_move_one_way(start, end, total, shape, delay, steps):
    got = curve(Schedule(start=start, end=end, shape=shape, delay=delay, steps=steps), total)
    low, high = sorted((start, end))
    slack = 1e-9 * high
    assert all(low - slack <= value <= high + slack for value in got)
    signs = {math.copysign(1, b - a) for a, b in pairwise(got) if abs(b - a) > slack}
    assert signs <= {math.copysign(1, end - start)}
    assert all(value == start for value in got[:delay])


@QUICK
@given(VALUES, VALUES, TOTALS, st.floats(0.01, 1.0), st.floats(0.0, 0.9), st.sampled_from(sorted(CLOSED)))
def test_shares_mean_the_same_as_counts(start, end, total, fraction, delay, shape):
    shares = Schedule(start=start, end=end, shape=shape, fraction=fraction, delay_fraction=delay)
    begin = round(delay * total)
    length = min(total - 1 - begin, round(fraction * total))
    if length > 0:
        assert curve(shares, total) == curve(
            Schedule(start=start, end=end, shape=shape, steps=length, delay=begin), total
        )
        assert value_at(shares, total - 1, total) == end or begin + length < total - 1


def test_impossible_schedules_are_refused():
    with pytest.raises(ValueError, match="must be > 0"):
        value_at(Schedule(start=0, end=1, shape="exponential"), 1, 5)
    with pytest.raises(ValueError, match="needs stages"):
        value_at(Schedule(shape="stages"), 0, 5)


def test_schedules_need_no_torch():
    code = (
        "import sys, megappo.algorithms.schedules, megappo.trainer.guard, megappo.trainer.effective;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
