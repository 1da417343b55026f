"""Mean and standard deviation of all scores so far, over batches that come in parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

#: Scores whose deviation is not above this are all the same: they standardise to 0, not to amplified rounding.
SMALLEST_STD = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations, in float64.

    `a.merge(b)` are the moments of both parts together (Chan, Golub, LeVeque 1979: Welford's update for batches):
    exact up to rounding in any order, also far from zero, where sums of squares lose all digits.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """Moments of finite numbers."""
        if not len(values):
            return cls()
        values = np.asarray(values, dtype=np.float64)
        mean = float(values.mean())
        return cls(float(len(values)), mean, float(np.square(values - mean).sum()))

    def merge(self, other: Moments) -> Moments:
        count = self.count + other.count
        if count == 0:
            return self
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * (other.count / count),
            self.squares + other.squares + step * step * (self.count * other.count / count),
        )

    @property
    def std(self) -> float:
        """Unbiased; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def standardize(self, values: np.ndarray) -> np.ndarray:
        """`(values - mean) / std`, float64; 0 where all scores so far are equal."""
        if self.std <= SMALLEST_STD:
            return np.zeros_like(values, dtype=np.float64)
        return (values - self.mean) / self.std

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Moments:
        """Raises ValueError when the state is not three finite numbers, count and squares not negative."""
        try:
            moments = cls(*(float(state[name]) for name in ("count", "mean", "squares")))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the moments of scores: {error}") from None
        if not all(map(math.isfinite, asdict(moments).values())) or moments.count < 0 or moments.squares < 0:
            raise ValueError(f"not the moments of scores: {dict(state)}")
        return moments
