"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): train on prompts whose responses differ in score.

A group whose responses all score the same has no advantage to learn from. Such groups are left out and further prompts
drawn in their place, in a bounded number of rounds. Everything here is a pure function of numbers that all ranks hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megappo.errors import UserError
from megappo.rewards.base import SUCCESS_SCORE

#: Scores that differ by no more than this are equal: it is what GRPO adds to the deviation that it divides by.
SMALLEST_SPREAD = 1e-6


@dataclass(frozen=True)
class Groups:
    """What is known of g groups, in ascending order of id.

    Attributes:
        ids: int64 `[g]`.
        signal: bool `[g]`: the responses differ.
        solved: bool `[g]`: no signal, and all succeeded (score >= 0.8).
        failed: bool `[g]`: no signal, and none succeeded.
    """

    ids: np.ndarray
    signal: np.ndarray
    solved: np.ndarray
    failed: np.ndarray


@dataclass(frozen=True)
class Refill:
    """What to do after a round of generation. Arrays of group ids, ascending.

    Attributes:
        keep: groups to train on, `wanted` of them once `finished` (fewer if there are no more).
        filled: those of `keep` that carry no signal.
        drop: groups not trained on: without signal, or more than were wanted.
        draw: prompts to draw for the next round; 0 when finished.
        finished: no further round.
    """

    keep: np.ndarray
    filled: np.ndarray
    drop: np.ndarray
    draw: int
    finished: bool


def find_signal(
    scores: np.ndarray,
    groups: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    signal: Literal["score", "success"] = "score",
) -> Groups:
    """Which groups carry signal: two valid samples with different scores.

    Args:
        scores: float64 `[n]`.
        groups: int64 `[n]`, the group of each sample.
        valid: bool `[n]`, False for samples that are not trained on (aborted, dropped); None: all are.
        signal: "success": what has to differ is whether the score is at least 0.8.
    """
    scores, groups = np.asarray(scores, np.float64), np.asarray(groups, np.int64)
    keep = np.ones(len(scores), bool) if valid is None else np.asarray(valid, bool)
    ids, place = np.unique(groups, return_inverse=True)
    place = place[keep]
    success = (scores[keep] >= SUCCESS_SCORE).astype(np.float64)
    compared = success if signal == "success" else scores[keep]
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, place, compared)
    np.maximum.at(high, place, compared)
    counts, successes = np.bincount(place, minlength=len(ids)), np.bincount(place, success, minlength=len(ids))
    differs = (counts > 0) & (high - low > SMALLEST_SPREAD)
    return Groups(ids, differs, ~differs & (counts > 0) & (successes == counts), ~differs & (successes == 0))


def plan_refill(
    groups: Groups,
    wanted: int,
    rounds: int,
    max_rounds: int,
    shortfall: Literal["fill", "fail"] = "fill",
) -> Refill:
    """What to keep of all groups that were generated for this iteration, and how many prompts to draw next.

    The earliest groups (lowest ids) are kept, so that ids have to ascend in the order of generation. The next draw is
    what is missing divided by the share of groups with signal so far, at most `wanted`.

    Args:
        groups: all groups of all rounds of this iteration.
        wanted: groups to train on (the prompts of a batch).
        rounds: rounds of generation so far.

    Raises:
        UserError: with `shortfall` "fail", when the last round did not bring enough groups with signal.
    """
    good, poor = groups.ids[groups.signal], groups.ids[~groups.signal]
    missing = wanted - len(good)
    nothing = np.empty(0, np.int64)
    if missing <= 0:
        return Refill(good[:wanted], nothing, np.sort(np.concatenate([poor, good[wanted:]])), 0, True)
    if rounds < max_rounds:
        share = (len(good) + 1) / (len(groups.ids) + 1)
        return Refill(good, nothing, poor, min(wanted, math.ceil(missing / share)), False)
    if shortfall == "fail":
        raise UserError(
            f"algorithm.dynamic_sampling: only {len(good)} of {wanted} prompts have responses of different scores "
            f"after {rounds} rounds: raise max_rounds or rollout.n, use other prompts, or set shortfall to fill"
        )
    filled = poor[:missing]
    return Refill(np.sort(np.concatenate([good, filled])), filled, poor[missing:], 0, True)


def metrics(groups: Groups, plan: Refill, rounds: int) -> dict[str, float]:
    """`dynamic_sampling/…` of an iteration whose last plan is `plan`; counts are prompts.

    `surplus`: with signal, but more than were wanted.
    """
    count = max(1, len(groups.ids))
    return {
        "dynamic_sampling/rounds": float(rounds),
        "dynamic_sampling/drawn": float(len(groups.ids)),
        "dynamic_sampling/kept": float(len(plan.keep) - len(plan.filled)),
        "dynamic_sampling/filled": float(len(plan.filled)),
        "dynamic_sampling/surplus": float(groups.signal.sum() - (len(plan.keep) - len(plan.filled))),
        "dynamic_sampling/no_signal_share": float((~groups.signal).sum()) / count,
        "dynamic_sampling/all_success_share": float(groups.solved.sum()) / count,
        "dynamic_sampling/all_failure_share": float(groups.failed.sum()) / count,
    }


def samples_of(keep: Sequence[int] | np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Ascending indices of the samples whose group is kept."""
    return np.flatnonzero(np.isin(np.asarray(groups), np.asarray(keep)))
