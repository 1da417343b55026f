"""Is the reward in a healthy state? One yes or no for the logs, and for the guard."""

from __future__ import annotations

import numpy as np

STABLE_MEAN, STABLE_STD, STABLE_MEDIAN = 0.5, 0.3, 0.1


def stable_signal(scores: np.ndarray) -> dict[str, float]:
    """`reward/stable`: 1.0 where mean > 0.5, standard deviation < 0.3 and median > 0.1, otherwise 0.0.

    Args:
        scores: the batch's raw scores `[n]` (before standardising and shaping), of all ranks. Empty: no metric.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if not len(scores):
        return {}
    std = float(scores.std(ddof=1)) if len(scores) > 1 else 0.0
    stable = scores.mean() > STABLE_MEAN and std < STABLE_STD and np.median(scores) > STABLE_MEDIAN
    return {"reward/stable": float(stable)}
