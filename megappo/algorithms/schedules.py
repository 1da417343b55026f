"""A number that changes over a run: one type for coefficients, targets, learning rates, temperatures, batch sizes.

A pure function of the iteration, so resuming needs no state. Pure Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["linear", "cosine", "exponential", "constant", "stages"]

_SLACK = 1e-9  # 0.2 of 50 iterations is 10 of them, whatever binary fractions make of it


@dataclass(frozen=True)
class Schedule:
    """`start` while the delay lasts, then a ramp to `end`, which holds for the rest of the run.

    Attributes:
        start, end: values before and after the ramp; both > 0 for `exponential`.
        steps: iterations that the ramp takes; None: see `fraction`.
        fraction: the same as a share of all iterations, cut so that the last iteration has `end`; None: until
            the last iteration.
        delay, delay_fraction: iterations before the ramp begins, or their share of all iterations.
        shape: `linear`; `cosine` (half a wave, flat at both ends); `exponential` (equal ratios); `constant` (no
            ramp: `end` as soon as the delay is over); `stages` (piecewise constant, reads only `stages`).
        stages: (until, value) pairs, `until` a share of all iterations, ascending.
    """

    start: float = 0.0
    end: float = 0.0
    steps: int | None = None
    fraction: float | None = None
    delay: int = 0
    delay_fraction: float | None = None
    shape: Shape = "linear"
    stages: tuple[tuple[float, float], ...] = ()


def value_at(schedule: Schedule, iteration: int, total_iterations: int) -> float:
    """The value in force in iteration `iteration` (0-based) of `total_iterations`.

    Raises ValueError for a schedule that has no such value (no stages, an exponential from or to 0).
    """
    if schedule.shape == "stages":
        return _stage(schedule, iteration, total_iterations)
    delay = _iterations(schedule.delay, schedule.delay_fraction, total_iterations)
    if iteration < delay:
        return schedule.start
    if schedule.shape == "constant":
        return schedule.end
    length = _ramp_length(schedule, delay, total_iterations)
    progress = min(1.0, (iteration - delay) / length) if length > 0 else 1.0
    return _between(schedule, progress)


def _stage(schedule: Schedule, iteration: int, total: int) -> float:
    if not schedule.stages:
        raise ValueError("a schedule of shape stages needs stages")
    for until, value in schedule.stages:
        if iteration < until * total - _SLACK:
            return value
    return schedule.stages[-1][1]


def _ramp_length(schedule: Schedule, delay: int, total: int) -> int:
    """Iterations from `start` to `end`."""
    if schedule.steps is not None:
        return schedule.steps
    left = total - 1 - delay
    if schedule.fraction is None:
        return left
    return min(left, round(schedule.fraction * total))


def _iterations(count: int, fraction: float | None, total: int) -> int:
    return count if fraction is None else round(fraction * total)


def _between(schedule: Schedule, progress: float) -> float:
    start, end = schedule.start, schedule.end
    if progress >= 1.0:
        return end  # exactly, not within rounding
    if schedule.shape == "linear":
        return start + (end - start) * progress
    if schedule.shape == "cosine":
        return start + (end - start) * 0.5 * (1.0 - math.cos(math.pi * progress))
    if start <= 0 or end <= 0:
        raise ValueError(f"an exponential schedule from {start} to {end}: both must be > 0")
    return start * (end / start) ** progress
