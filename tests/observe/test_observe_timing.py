"""Phases of an iteration, on a clock that the test turns."""

import gc

import pytest

from megappo.observe.memory import PeakMemory, peak_memory
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


class Tank:
    """Memory whose peak is set by hand."""

    def __init__(self):
        self.now = self.peak = 0

    def use(self, size: int) -> None:
        self.now = size
        self.peak = max(self.peak, size)

    def reset(self) -> None:
        self.peak = self.now

    def read(self) -> int:
        return self.peak


def test_a_peak_counts_for_its_phase_and_those_around_it():
    tank = Tank()
    timer = Timer(memory=tank)
    tank.use(100)  # before any phase
    tank.use(1)
    with timer("step"):
        tank.use(5)
        with timer("gen"):
            tank.use(9)
            tank.use(2)
        with timer("update"):
            tank.use(7)
            tank.use(2)
    assert timer.peaks() == {"step": 9, "gen": 9, "update": 7}
    with timer("gen"):
        pass
    assert timer.peaks() == {"gen": 2}


def test_the_peak_of_a_process_rises_with_what_it_holds_and_can_begin_anew():
    gc.collect()  # what other tests left behind must not be freed in between
    memory = PeakMemory()
    memory.reset()
    before = memory.read()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])  # touched, so that it is resident
    assert memory.read() >= before + (50 << 20)
    del block
    memory.reset()
    assert memory.read() < before + (50 << 20)


def test_peaks_are_reported_by_phase_and_as_a_whole():
    assert peak_memory({"gen": 3 << 30, "step": 1 << 30}) == {
        "perf/peak_memory_gb/gen": 3.0,
        "perf/peak_memory_gb/step": 1.0,
        "perf/max_memory_allocated_gb": 3.0,
    }
    assert peak_memory({}) == {}
