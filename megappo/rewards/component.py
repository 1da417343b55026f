"""One entry of the `rewards` list: which samples it scores, what it does with the scores and when there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from megappo.errors import UserError
from megappo.rewards.base import Outcome, Reward, RewardSample, check_scores

OnError = Literal["fail", "drop", "neutral"]


@dataclass(frozen=True)
class Column:
    """One component's scores of n samples, in their order.

    Attributes:
        values: float64 `[n]`, clipped; 0 where there is no score.
        covered: the component applies to the sample (bool).
        measured: the score comes from the reward: covered, and neither failed nor set to the neutral score (bool).
        failed: there was no score and the policy was applied (bool).
        late: the sample's time was over (bool).
        clipped: the score was outside the clip range (bool).
        extras: other numbers returned, one mapping a sample.
        counters: what the reward itself counted.
    """

    values: np.ndarray
    covered: np.ndarray
    measured: np.ndarray
    failed: np.ndarray
    late: np.ndarray
    clipped: np.ndarray
    extras: list[dict[str, float]]
    counters: dict[str, float]


@dataclass
class Component:
    """A reward with its place in the sum.

    Attributes:
        name: unique within a run.
        reward: scores the samples; None: the caller supplies the scores (`CombinedReward.measure(…, given=…)`).
        recorded: the scores stand in the data set beside the responses; it applies to no other responses.
        sources: glob patterns of the data sources it applies to; None: all.
        clip: range that scores are clipped to, before anything else.
        standardize: subtract the mean of all scores so far and divide by their standard deviation (training only).
        on_error: fail: the run ends; drop: the sample is not trained on; neutral: it gets `neutral_score`.
    """

    name: str
    reward: Reward | None
    weight: float = 1.0
    sources: Sequence[str] | None = None
    clip: tuple[float, float] | None = None
    standardize: bool = False
    on_error: OnError = "fail"
    neutral_score: float = 0.0
    recorded: bool = False
    _covers: dict[str, bool] = field(default_factory=dict, repr=False)

    def covers(self, source: str) -> bool:
        """Does it apply to this data source?"""
        if self.sources is None:
            return True
        if source not in self._covers:
            self._covers[source] = any(fnmatchcase(source, pattern) for pattern in self.sources)
        return self._covers[source]

    def measure(self, samples: Sequence[RewardSample], given: Sequence[float] | None = None) -> Column:
        """Score the samples that it applies to.

        Args:
            given: scores of all samples, for a component without a reward of its own (those not covered are ignored).

        Raises:
            UserError: a sample cannot be scored and `on_error` is "fail", or no single sample is at fault.
        """
        covered = np.array([self.covers(sample.data_source) for sample in samples], dtype=bool)
        if self.recorded and given is None:
            covered[:] = False
        mine = [sample for sample, on in zip(samples, covered, strict=True) if on]
        if self.reward is None:
            outcomes = self._given(samples, covered, given)
        else:
            outcomes = outcomes_of(self.reward, mine, fail_fast=self.on_error == "fail") if mine else []
        return self._column(covered, outcomes)

    def _given(
        self, samples: Sequence[RewardSample], covered: np.ndarray, given: Sequence[float] | None
    ) -> list[Outcome]:
        if given is None or len(given) != len(samples):
            raise ValueError(f"component {self.name}: needs a given score for each of {len(samples)} samples")
        mine = [(sample, score) for sample, score, on in zip(samples, given, covered, strict=True) if on]
        return _one_by_one(lambda pair: check_scores(self.name, [pair[0]], [pair[1]])[0], mine, self.on_error == "fail")

    def _column(self, covered: np.ndarray, outcomes: Sequence[Outcome]) -> Column:
        count = len(covered)
        failed, late, values = (np.zeros(count, dtype) for dtype in (bool, bool, np.float64))
        failed[covered] = [outcome.error is not None for outcome in outcomes]
        late[covered] = [outcome.timed_out for outcome in outcomes]
        values[covered] = [outcome.score for outcome in outcomes]
        values[failed] = self.neutral_score if self.on_error == "neutral" else 0.0
        clipped = np.zeros(count, bool)
        if self.clip is not None:
            scored = covered & ~failed if self.on_error == "drop" else covered
            clipped = scored & ((values < self.clip[0]) | (values > self.clip[1]))
            values[clipped] = np.clip(values[clipped], *self.clip)
        extras: list[dict[str, float]] = [{} for _ in range(count)]
        for index, outcome in zip(np.flatnonzero(covered), outcomes, strict=True):
            extras[index] = outcome.extras
        counters = self.reward.counters() if hasattr(self.reward, "counters") else {}
        return Column(values, covered, covered & ~failed, failed, late, clipped, extras, counters)


def outcomes_of(reward: Reward, samples: Sequence[RewardSample], fail_fast: bool) -> list[Outcome]:
    """One outcome a sample, also from a reward that can only score all or raise. UserError with `fail_fast`."""
    if hasattr(reward, "outcomes"):
        return reward.outcomes(samples, fail_fast)
    try:
        return [Outcome(score) for score in check_scores(reward.name, samples, reward.score(samples))]
    except UserError:
        if fail_fast:
            raise
    return _one_by_one(lambda sample: check_scores(reward.name, [sample], reward.score([sample]))[0], samples, False)


def _one_by_one(score, samples: Sequence, fail_fast: bool) -> list[Outcome]:
    outcomes = []
    for sample in samples:
        try:
            outcomes.append(Outcome(score(sample)))
        except UserError as error:
            if fail_fast:
                raise
            outcomes.append(Outcome(error=str(error)))
    return outcomes
