"""Curves: one metric over the iterations, thinned and smoothed for drawing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

BUCKETS = 400  # a longer curve is drawn as the minimum and the maximum of this many pieces
SMOOTH_FROM = 150  # points; shorter curves are drawn as they are
_PIECES = 50  # a smoothed curve averages over 1/50 of its length
_OUTLIER = 30  # times the usual distance from the median around


@dataclass(frozen=True)
class Curve:
    """`values[i]` (float64, may be NaN or infinite) at iteration `steps[i]` (int64, ascending)."""

    steps: np.ndarray
    values: np.ndarray

    def finite(self) -> np.ndarray:
        """The values that are numbers."""
        return self.values[np.isfinite(self.values)]

    def broken(self) -> np.ndarray:
        """The steps whose value is NaN or infinite."""
        return self.steps[~np.isfinite(self.values)]


def curves_of(rows: Iterable[Mapping[str, float]]) -> dict[str, Curve]:
    """A curve for each metric of `rows`, which have a `step` and ascend by it."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                steps, values = found.setdefault(name, ([], []))
                steps.append(int(row["step"]))
                values.append(value)
    return {name: Curve(np.array(s, dtype=np.int64), np.array(v, dtype=np.float64)) for name, (s, v) in found.items()}


def thin(curve: Curve, buckets: int = BUCKETS) -> Curve:
    """At most about three points of each bucket: its lowest, its highest, and a non-finite one.

    Spikes and gaps stay visible, which an average would hide.
    """
    size = len(curve.steps)
    if size <= 2 * buckets:
        return curve
    keep: list[int] = []
    for low, high in pairwise(np.linspace(0, size, buckets + 1).astype(int)):
        part = curve.values[low:high]
        good = np.isfinite(part)
        picks = set()
        if good.any():
            picks |= {
                low + int(np.where(good, part, np.inf).argmin()),
                low + int(np.where(good, part, -np.inf).argmax()),
            }
        if not good.all():
            picks.add(low + int(good.argmin()))
        keep += sorted(picks)
    return Curve(curve.steps[keep], curve.values[keep])


def smooth(curve: Curve) -> Curve:
    """Mean over a centred window without outliers and what is not finite; NaN where the window has nothing else.

    A convolution, not a difference of running sums: one value of 1e12 would take the digits of all later ones.
    """
    width = max(5, len(curve.steps) // _PIECES) | 1
    good = np.isfinite(curve.values)
    good &= ~_outliers(np.where(good, curve.values, np.nan), width)
    window = np.ones(width)
    total = np.convolve(np.where(good, curve.values, 0.0), window, "same")
    count = np.convolve(good.astype(float), window, "same").round()
    return Curve(curve.steps, np.where(count > 0, total / np.maximum(count, 1), np.nan))


def _outliers(values: np.ndarray, width: int) -> np.ndarray:
    """True where a value is far from the median around it: a single spike would make a plateau of the mean.

    The median is taken at some points and interpolated. An explosion that lasts is none: the median goes with it.
    """
    finite = np.flatnonzero(~np.isnan(values))
    if not len(finite):
        return np.zeros(len(values), bool)
    known, half = values[finite], width // 2
    at = np.unique(np.linspace(0, len(known) - 1, BUCKETS).astype(int))
    medians = [np.median(known[max(0, i - half) : i + half + 1]) for i in at]
    away = np.full(len(values), 0.0)
    away[finite] = np.abs(known - np.interp(np.arange(len(known)), at, medians))
    return away > _OUTLIER * np.median(away[finite]) if np.median(away[finite]) > 0 else np.zeros(len(values), bool)
