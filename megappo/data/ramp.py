"""Batches of changing size over one data set: where each begins, and how many make so many epochs.

A position counts prompts from the start of the run, epoch after epoch. A batch never crosses the end of an epoch:
what is too short for it is left out of that epoch (as `PromptSampler` does with batches of one size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def batch_start(position: int, size: int, n: int) -> int:
    """Position of the first prompt of a batch of `size` taken at `position` from `n` >= size prompts."""
    rest = n - position % n
    return position if size <= rest else position + rest


def epoch_of_last(sizes: Iterable[int], n: int) -> int:
    """Epoch (0-based) of the last batch; -1 if there is none."""
    position, epoch = 0, -1
    for size in sizes:
        start = batch_start(position, size, n)
        position, epoch = start + size, start // n
    return epoch


def iterations_for_epochs(sizes_of: Callable[[int], list[int]], n: int, epochs: int) -> int:
    """The most iterations that stay within `epochs` passes over `n` prompts, at least 1.

    `sizes_of(total)` is the size of every batch of a run of `total` iterations: it may depend on the total, for
    schedules count in shares of it.
    """
    low, high = 1, 2
    while epoch_of_last(sizes_of(high), n) < epochs:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epoch_of_last(sizes_of(middle), n) < epochs else (low, middle)
    return low
