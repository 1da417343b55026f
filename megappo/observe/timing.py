"""Seconds spent in each phase of an iteration, as the metrics `timing_s/<phase>`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """`with timer("gen"): …` adds to `timing_s/gen`; phases may nest, repeat, and end by an exception.

    Args:
        synchronize: called at both ends of a phase to wait for queued device work; None where there is none.
        clock: seconds, monotonic.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._synchronize()
        start = self._clock()
        try:
            yield
            self._synchronize()  # not after an error, which the device may repeat here
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    def seconds(self, phase: str) -> float:
        """Seconds so far in a phase since the last `take`; 0 for one that was not entered."""
        return self._seconds.get(phase, 0.0)

    def take(self) -> dict[str, float]:
        """`{"timing_s/<phase>": seconds}` since the last call, in the order in which phases ended first."""
        out = {f"timing_s/{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds = {}
        return out
