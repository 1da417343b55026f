"""The run's reward: a weighted sum of the configured components."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megappo.errors import UserError
from megappo.rewards import function
from megappo.rewards.base import Reward, RewardSample, check_scores
from megappo.rewards.gsm8k import Gsm8kReward
from megappo.rewards.worker import WorkerReward

TYPES = ("gsm8k", "reasoning_gym", "function")


class RewardSettings(Protocol):
    """One entry of the configuration's `rewards` list."""

    type: str
    path: str | None
    weight: float
    timeout_s: float
    kwargs: Mapping[str, Any]


class CombinedReward:
    """Weighted sum of rewards: `score = Σ weight · component`, weights as they are (not normalised).

    After `score`, `components[name]` holds each component's unweighted scores in sample order and
    `extras[name]` the extra numbers that a function returned beside its score (one mapping a sample).
    """

    name = "combined"

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float]) -> None:
        self.rewards, self.weights = list(rewards), [float(weight) for weight in weights]
        self.components: dict[str, list[float]] = {}
        self.extras: dict[str, list[dict[str, float]]] = {}

    def start(self) -> None:
        """Load user code now rather than at the first score: its mistakes show before models are loaded."""
        for reward in self.rewards:
            if isinstance(reward, WorkerReward):
                reward.start()

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """One finite score a sample. UserError names the component and the sample at fault."""
        self.components, self.extras = {}, {}
        totals = [0.0] * len(samples)
        for reward, weight in zip(self.rewards, self.weights, strict=True):
            scores = check_scores(reward.name, samples, reward.score(samples))
            self.components[reward.name] = scores
            self.extras[reward.name] = list(getattr(reward, "extras", []))
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        return check_scores(self.name, samples, totals)

    def metrics(self) -> dict[str, float]:
        """Means of the last call's samples: `reward/<component>/mean`, `reward/<component>/<extra>/mean`."""
        result: dict[str, float] = {}
        for name, scores in self.components.items():
            columns: dict[str, list[float]] = {f"reward/{name}/mean": scores}
            for extras in self.extras[name]:
                for extra, value in extras.items():
                    columns.setdefault(f"reward/{name}/{extra}/mean", []).append(value)
            result.update({key: sum(values) / len(values) for key, values in columns.items() if values})
        return result

    def close(self) -> None:
        """End the processes of the components."""
        for reward in self.rewards:
            if isinstance(reward, WorkerReward):
                reward.close()

    def __enter__(self) -> CombinedReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_reward(rewards_cfg: Sequence[RewardSettings]) -> CombinedReward:
    """The reward that the `rewards` list describes. No process starts: `start` or `score` load user code.

    Raises UserError naming the entry (`rewards[i]`) for an empty list, an unknown type, a missing or bad
    path, unknown kwargs, a weight that is not finite or a timeout that is not positive.
    """
    if not rewards_cfg:
        raise UserError("rewards: the list is empty: name at least one reward, for example {type: gsm8k}")
    rewards: list[Reward] = []
    names: set[str] = set()
    for index, settings in enumerate(rewards_cfg):
        where = f"rewards[{index}]"
        if not math.isfinite(settings.weight):
            raise UserError(f"{where}.weight is {settings.weight}: give a finite number")
        if not settings.timeout_s > 0:
            raise UserError(f"{where}.timeout_s is {settings.timeout_s}: give a positive number of seconds")
        reward = _build_one(settings, where)
        reward.name = _unique(reward.name, names)
        rewards.append(reward)
    return CombinedReward(rewards, [settings.weight for settings in rewards_cfg])


def _build_one(settings: RewardSettings, where: str) -> Gsm8kReward | WorkerReward:
    kwargs = dict(settings.kwargs or {})
    if settings.type == "function":
        if not settings.path:
            raise UserError(f"{where}.path is missing: type 'function' needs module:function or file.py:function")
        _, name = function.split_path(settings.path)
        function.check_kwargs(settings.path, kwargs)
        return WorkerReward(name, "function", path=settings.path, kwargs=kwargs, timeout_s=settings.timeout_s)
    if settings.type not in TYPES:
        raise UserError(f"{where}.type is '{settings.type}': use one of {', '.join(TYPES)}")
    if settings.path:
        raise UserError(f"{where}.path is only for type 'function': remove it")
    allowed = {"method"} if settings.type == "gsm8k" else set()
    if unknown := sorted(set(kwargs) - allowed):
        known = ", ".join(sorted(allowed)) or "none"
        raise UserError(f"{where}.kwargs.{unknown[0]} is unknown to '{settings.type}' (known: {known})")
    if settings.type == "gsm8k":
        return Gsm8kReward(**kwargs)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            f"{where}: type 'reasoning_gym' needs its package: install the extra: pip install 'megappo[reasoning]'"
        )
    return WorkerReward("reasoning_gym", "reasoning_gym", timeout_s=settings.timeout_s)


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}#{number}"
    taken.add(candidate)
    return candidate
