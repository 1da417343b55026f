"""The run's reward: a weighted sum of the configured components.

Training takes four steps, of which only the third is collective:

    scored = reward.measure(samples)                        # this rank's samples
    tally = reward.tally(scored)                            # its part of the statistics
    metrics = reward.absorb(gather_objects(tally))          # running statistics of all ranks' samples; metrics
    scored.scores, reward.rewards(scored), scored.dropped   # raw sums, sums to train on, samples not to train on
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megappo.errors import UserError
from megappo.rewards.base import RewardSample, check_scores
from megappo.rewards.build import RewardSettings, build_component, unique_name
from megappo.rewards.component import Column, Component
from megappo.rewards.running import Moments


@dataclass(frozen=True)
class Scored:
    """What one rank's n samples got.

    Attributes:
        samples: the samples, in the order of all arrays.
        columns: by component.
        scores: float64 `[n]`: `Σ weight · component` over the components that cover the sample, clipped but not
            standardised; 0 where dropped.
        dropped: bool `[n]`: a component failed on the sample and says that it is not to be trained on.
    """

    samples: Sequence[RewardSample]
    columns: dict[str, Column]
    scores: np.ndarray
    dropped: np.ndarray


@dataclass(frozen=True)
class Tally:
    """One rank's part of the statistics of a batch; small, to be gathered from all ranks."""

    moments: dict[str, Moments]
    means: dict[str, tuple[float, float]]  # metric -> (sum, count)
    sums: dict[str, float]


class CombinedReward:
    """Weighted sum of rewards, weights as they are (not normalised).

    A component applies to the samples whose data source it covers. A score is clipped, then (for training)
    standardised, then weighted.
    """

    name = "combined"

    def __init__(self, components: Sequence[Component]) -> None:
        self.components = {component.name: component for component in components}
        if len(self.components) != len(components):
            raise ValueError("two reward components have the same name")
        self.running = {c.name: Moments() for c in components if c.standardize}

    def start(self) -> None:
        """Load user code and reach servers now: mistakes show before models are loaded."""
        for component in self.components.values():
            if hasattr(component.reward, "start"):
                component.reward.start()

    def check_sources(self, sources: Iterable[str], *, recorded: bool = False) -> None:
        """UserError naming the first data source that no component covers.

        Args:
            recorded: the responses come from a data set, with the scores of components that are `recorded`.
        """
        for source in sorted(set(sources)):
            self._check_covered(source, "", self._active(recorded))

    def measure(self, samples: Sequence[RewardSample], given: Mapping[str, Sequence[float]] | None = None) -> Scored:
        """Score samples. Changes no statistics, so it serves for validation as well.

        Args:
            given: scores of the components that have no reward of their own, one a sample.

        Raises:
            UserError: a sample has no component, or cannot be scored and its component says that this is fatal, or
                its sum is not finite. The message names component and sample.
        """
        active = self._active(any(c.recorded for name, c in self.components.items() if name in (given or {})))
        for sample in samples:
            self._check_covered(sample.data_source, f"{sample}: ", active)
        columns = {name: c.measure(samples, (given or {}).get(name)) for name, c in self.components.items()}
        dropped = np.zeros(len(samples), bool)
        for name, column in columns.items():
            if self.components[name].on_error == "drop":
                dropped |= column.failed
        scores = self._sum(samples, {name: column.values for name, column in columns.items()}, columns, dropped)
        return Scored(samples, columns, scores, dropped)

    def rewards(self, scored: Scored) -> np.ndarray:
        """float64 `[n]`: like `scored.scores`, from scores standardised with the statistics so far; for training."""
        values = {
            name: self.running[name].standardize(column.values) if name in self.running else column.values
            for name, column in scored.columns.items()
        }
        return self._sum(scored.samples, values, scored.columns, scored.dropped)

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """`measure(samples).scores`: one finite raw score a sample, 0 for those that are dropped."""
        return self.measure(samples).scores.tolist()

    def tally(self, scored: Scored, counted: Sequence[bool] | np.ndarray | None = None) -> Tally:
        """This rank's part of the batch's statistics.

        Args:
            counted: bool `[n]`, False for samples that are no finished responses (aborted); None: all count.
        """
        keep = np.ones(len(scored.samples), bool) if counted is None else np.asarray(counted, bool)
        moments: dict[str, Moments] = {}
        means: dict[str, tuple[float, float]] = {}
        sums: dict[str, float] = {}
        for name, column in scored.columns.items():
            if name in self.running:
                moments[name] = Moments.of(column.values[column.measured & keep])
            means |= _means(name, column, keep, self.components[name].clip is not None)
            sums |= _counts(name, column, keep, self.components[name].on_error)
        sums["reward/dropped"] = float((scored.dropped & keep).sum())
        return Tally(moments, means, sums)

    def absorb(self, tallies: Sequence[Tally]) -> dict[str, float]:
        """Take all ranks' tallies of a batch, in rank order, into the running statistics; the batch's metrics.

        The result is the same on every rank that is given the same tallies.
        """
        for name in self.running:
            batch = Moments()
            for tally in tallies:
                batch = batch.merge(tally.moments[name])
            self.running[name] = self.running[name].merge(batch)
        means: dict[str, tuple[float, float]] = {}
        metrics: dict[str, float] = {}
        for tally in tallies:
            for name, (total, count) in tally.means.items():
                before = means.get(name, (0.0, 0.0))
                means[name] = (before[0] + total, before[1] + count)
            for name, value in tally.sums.items():
                metrics[name] = metrics.get(name, 0.0) + value
        metrics |= {name: total / count for name, (total, count) in means.items() if count}
        for name, moments in self.running.items():
            metrics |= {f"reward/{name}/running_mean": moments.mean, f"reward/{name}/running_std": moments.std}
        return metrics

    def state_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """The running statistics, as JSON."""
        return {"running": {name: moments.state_dict() for name, moments in self.running.items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
        """Continue from saved statistics; a component that was not standardised then starts anew.

        Raises UserError when the state is damaged.
        """
        for name in self.running:
            if name in state["running"]:
                try:
                    self.running[name] = Moments.from_state(state["running"][name])
                except ValueError as error:
                    raise UserError(f"the checkpoint's statistics of reward '{name}' are damaged: {error}") from None

    def close(self) -> None:
        """End the processes and connections of the components."""
        for component in self.components.values():
            if hasattr(component.reward, "close"):
                component.reward.close()

    def __enter__(self) -> CombinedReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _active(self, recorded: bool) -> list[Component]:
        return [component for component in self.components.values() if recorded or not component.recorded]

    def _check_covered(self, source: str, where: str, active: Sequence[Component]) -> None:
        if not any(component.covers(source) for component in active):
            raise UserError(
                f"rewards: {where}no reward covers data_source {source!r}: "
                "add one, or add the source to rewards[i].sources"
            )

    def _sum(
        self,
        samples: Sequence[RewardSample],
        values: Mapping[str, np.ndarray],
        columns: Mapping[str, Column],
        dropped: np.ndarray,
    ) -> np.ndarray:
        totals = np.zeros(len(samples))
        with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the sample's name
            for name, component in self.components.items():
                covered = columns[name].covered
                totals[covered] += component.weight * values[name][covered]
        totals[dropped] = 0.0
        check_scores(self.name, samples, totals)
        return totals


def _means(name: str, column: Column, keep: np.ndarray, clips: bool) -> dict[str, tuple[float, float]]:
    """Sums and counts behind the component's mean metrics."""
    measured = column.measured & keep
    total, covered = float(column.values[measured].sum()), float((column.covered & keep).sum())
    out = {
        f"reward/{name}/mean": (total, float(measured.sum())),
        f"reward/{name}/failed_share": (float((column.failed & keep).sum()), covered),
    }
    if clips:
        out[f"reward/{name}/clip_share"] = (float((column.clipped & keep).sum()), covered)
    for extras, on in zip(column.extras, measured, strict=True):
        for extra, value in extras.items() if on else ():
            key = f"reward/{name}/{extra}/mean"
            before = out.get(key, (0.0, 0.0))
            out[key] = (before[0] + value, before[1] + 1.0)
    return out


def _counts(name: str, column: Column, keep: np.ndarray, on_error: str) -> dict[str, float]:
    failed = column.failed & keep
    return {
        f"reward/{name}/timeouts": float((column.late & keep).sum()),
        f"reward/{name}/errors": float((failed & ~column.late).sum()),
        f"reward/{name}/dropped": float(failed.sum()) if on_error == "drop" else 0.0,
        **{f"reward/{name}/{counter}": value for counter, value in column.counters.items()},
    }


def build_reward(rewards_cfg: Sequence[RewardSettings]) -> CombinedReward:
    """The reward that the `rewards` list describes. No process starts: `start` or `measure` load user code.

    Raises UserError naming the entry (`rewards[i]`) for an empty list, an unknown type, a missing or bad path or URL,
    unknown kwargs, numbers out of range, or a package that is not installed.
    """
    if not rewards_cfg:
        raise UserError("rewards: the list is empty: name at least one reward, for example {type: gsm8k}")
    components: list[Component] = []
    names: set[str] = set()
    for index, settings in enumerate(rewards_cfg):
        component = build_component(settings, f"rewards[{index}]")
        component.name = unique_name(component.name, names)
        if component.reward is not None:
            component.reward.name = component.name
        components.append(component)
    return CombinedReward(components)
