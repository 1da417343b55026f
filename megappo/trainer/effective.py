"""The configuration in force in one iteration: as written, then schedules, then the guard's adjustments. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megappo.algorithms.schedules import Schedule, value_at
from megappo.config.schema import ExperimentConfig, ScheduleConfig
from megappo.data.ramp import iterations_for_epochs

BATCH = "data.train_batch_size"


@dataclass(frozen=True)
class Adjustment:
    """What the guard did to a key: `value · factor`, where `value` None is what the schedule (or file) says."""

    value: float | None = None
    factor: float = 1.0

    def apply(self, base: float) -> float:
        return (base if self.value is None else self.value) * self.factor


Adjustments = Mapping[str, Adjustment]


def effective_config(
    config: ExperimentConfig,
    iteration: int,
    total_iterations: int,
    adjustments: Adjustments | None = None,
) -> ExperimentConfig:
    """`config` (resolved) as it is in force in iteration `iteration` (0-based) of `total_iterations`.

    A copy that shares the sections in which nothing differs; `config` itself is never changed.
    """
    out = config
    for key in changing_keys(config, adjustments):
        value = value_in_force(config, key, iteration, total_iterations, adjustments)
        out = _replace(out, key, value)
    return out


def changing_keys(config: ExperimentConfig, adjustments: Adjustments | None = None) -> list[str]:
    """Keys with a schedule or an adjustment."""
    return list(dict.fromkeys([*config.schedules, *(adjustments or {})]))


def changing_metrics(
    base: ExperimentConfig, effective: ExperimentConfig, adjustments: Adjustments | None = None
) -> dict[str, float]:
    """`schedule/<key>`: the values in force, for the logs."""
    values = {key: value_of(effective, key) for key in changing_keys(base, adjustments)}
    return {f"schedule/{key}": float(value) for key, value in values.items() if value is not None}


def value_in_force(
    config: ExperimentConfig, key: str, iteration: int, total_iterations: int, adjustments: Adjustments | None = None
) -> Any:
    """The value of one key; None only where it is null and neither scheduled nor set."""
    value = value_of(config, key)
    section = config.schedules.get(key)
    if section is not None:
        value = value_at(as_schedule(section, value), iteration, total_iterations)
        if key == BATCH:
            value = _whole_batches(value, batch_multiple(config))
    adjustment = (adjustments or {}).get(key)
    if adjustment is None:
        return value
    return adjustment.apply(value) if value is not None else adjustment.value


def as_schedule(section: ScheduleConfig, own_value: float | None) -> Schedule:
    """The configured schedule; `start` and `end` default to the key's own value."""
    given = section.model_dump()
    for name in ("start", "end"):
        if given[name] is None:
            given[name] = own_value if own_value is not None else math.nan
    return Schedule(**given | {"stages": tuple(section.stages)})


def value_of(config: Any, dotted: str) -> Any:
    """The value of a dotted key."""
    for part in dotted.split("."):
        config = getattr(config, part)
    return config


def _replace(section: Any, dotted: str, value: Any) -> Any:
    """A copy of a section with one value replaced; only the sections on the way to it are copied."""
    name, _, rest = dotted.partition(".")
    if rest:
        value = _replace(getattr(section, name), rest, value)
    return section.model_copy(update={name: value})


# --- batch sizes ---------------------------------------------------------------------------------------


def batch_multiple(config: ExperimentConfig) -> int:
    """Prompts that a batch must be a multiple of: whole mini-batches of actor and critic."""
    critic = config.critic.ppo_mini_batch_size if config.needs_critic else None
    return math.lcm(config.actor.ppo_mini_batch_size, critic or 1)


def _whole_batches(value: float, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple


def batch_sizes(config: ExperimentConfig, total_iterations: int) -> list[int]:
    """Prompts of every iteration of a run of `total_iterations`."""
    if BATCH not in config.schedules:
        return [config.data.train_batch_size] * total_iterations
    return [value_in_force(config, BATCH, i, total_iterations) for i in range(total_iterations)]


def largest_batch(config: ExperimentConfig) -> int:
    """The most prompts that an iteration of this run can have."""
    section = config.schedules.get(BATCH)
    if section is None:
        return config.data.train_batch_size
    schedule = as_schedule(section, config.data.train_batch_size)
    values = [value for _, value in schedule.stages] or [schedule.start, schedule.end]
    return max(_whole_batches(value, batch_multiple(config)) for value in values)


def count_iterations(config: ExperimentConfig, prompts: int) -> int:
    """Iterations of the run: as configured, or what fits into `trainer.total_epochs` over so many prompts."""
    trainer = config.trainer
    if trainer.total_iterations is not None:
        return trainer.total_iterations
    return iterations_for_epochs(lambda total: batch_sizes(config, total), prompts, trainer.total_epochs)


def optimizer_steps(sizes: list[int], mini_batch_size: int, epochs: int) -> int:
    """Optimizer steps of a role in iterations of these sizes (prompts); at least 1."""
    return max(1, sum(-(-size // mini_batch_size) * epochs for size in sizes))
