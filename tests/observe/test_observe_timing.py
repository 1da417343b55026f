"""Phases of an iteration, on a clock that the test turns."""

import pytest

from megappo.observe.timing import Timer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_phases_add_up_nest_and_start_afresh():
    clock = Clock()
    timer = Timer(clock=clock)
    with timer("step"):
        clock.now += 1
        for _ in range(2):
            with timer("gen"):
                clock.now += 2
    assert timer.seconds("gen") == 4.0 and timer.seconds("absent") == 0.0
    assert timer.take() == {"timing_s/gen": 4.0, "timing_s/step": 5.0}
    assert timer.take() == {}


def test_a_phase_that_fails_is_counted_and_its_error_passes():
    clock = Clock()
    timer = Timer(clock=clock)
    with pytest.raises(ValueError, match="boom"), timer("gen"):
        clock.now += 3
        raise ValueError("boom")
    assert timer.take() == {"timing_s/gen": 3.0}


def test_device_work_is_waited_for_inside_the_phase():
    clock = Clock()

    def synchronize():
        clock.now += 5  # queued work of an earlier phase at the start, of this one at the end

    timer = Timer(synchronize, clock)
    with timer("update"):
        clock.now += 1
    assert timer.take() == {"timing_s/update": 6.0}
