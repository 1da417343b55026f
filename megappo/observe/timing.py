"""Seconds and peak memory of each phase of an iteration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Memory(Protocol):
    """`memory.PeakMemory`, or a stand-in."""

    def reset(self) -> None: ...

    def read(self) -> int: ...


class Timer:
    """`with timer("gen"): …` adds to `timing_s/gen`; phases may nest, repeat, and end by an exception.

    Args:
        synchronize: called at both ends of a phase to wait for queued device work; None where there is none.
        clock: seconds, monotonic.
        memory: its peak in each phase is kept too, inner phases included.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        memory: Memory | None = None,
    ) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._clock = clock
        self._memory = memory
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._synchronize()
        self._note_peak()  # what was before belongs to the phases around
        self._open.append(phase)
        start = self._clock()
        try:
            yield
            self._synchronize()  # not after an error, which the device may repeat here
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start
            self._note_peak()
            self._open.remove(phase)

    def _note_peak(self) -> None:
        if self._memory is not None:
            peak = self._memory.read()
            for phase in self._open:
                self._peaks[phase] = max(peak, self._peaks.get(phase, 0))
            self._memory.reset()

    def seconds(self, phase: str) -> float:
        """Seconds so far in a phase since the last `take`; 0 for one that was not entered."""
        return self._seconds.get(phase, 0.0)

    def take(self) -> dict[str, float]:
        """`{"timing_s/<phase>": seconds}` since the last call, in the order in which phases ended first."""
        out = {f"timing_s/{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds = {}
        return out

    def peaks(self) -> dict[str, int]:
        """`{phase: bytes}` since the last call, this rank's; empty without `memory`."""
        out, self._peaks = self._peaks, {}
        return out
