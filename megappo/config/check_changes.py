"""Checks of `schedules` and `guard`: the values that keys will take during the run, and rules that can work."""

import difflib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Le, Lt

from megappo.config.problems import Problem
from megappo.config.schema.base import section_type
from megappo.config.schema.experiment import ExperimentConfig
from megappo.config.schema.guard import CONDITIONS, GuardRuleConfig
from megappo.config.schema.guard_presets import preset_rules
from megappo.config.schema.schedules import ADJUSTABLE, ScheduleConfig, not_in

_BATCH = "data.train_batch_size"


def check_changes(config: ExperimentConfig) -> Iterator[Problem]:
    """Problems of the sections `schedules` and `guard` of a resolved configuration."""
    for name, schedule in config.schedules.items():
        yield from _check_schedule(config, name, schedule)
    yield from _check_rules(config)
    yield from _check_checkpoints(config)
    band = config.guard.kl_band
    if band is not None and band.low >= band.high:
        yield Problem("guard.kl_band.low", f"must be below guard.kl_band.high ({band.high:g})", band.low)


# --- schedules -----------------------------------------------------------------------------------------


def _check_schedule(config: ExperimentConfig, name: str, schedule: ScheduleConfig) -> Iterator[Problem]:
    where = f"schedules.{name}"
    own: Any = config
    for part in name.split("."):
        own = getattr(own, part)
    values = {f"{where}.stages.{i}": value for i, (_, value) in enumerate(schedule.stages)}
    if not schedule.stages:
        for end in ("start", "end"):
            value = getattr(schedule, end)
            values[f"{where}.{end}"] = own if value is None else value
    for key, value in values.items():
        wrong = "the key itself is null; give start and end" if value is None else value_problem(name, value)
        if not wrong and value <= 0 and (schedule.shape == "exponential" or name == "rollout.temperature"):
            wrong = "must be > 0; choose another shape" if schedule.shape == "exponential" else "must be > 0"
        if wrong:
            yield Problem(key, wrong, value)
            return
    unused = unused_key(config, name)
    if unused:
        yield Problem(where, f"has no effect: {unused}", note=True)
    yield from _check_length(config, where, schedule)


def _check_length(config: ExperimentConfig, where: str, schedule: ScheduleConfig) -> Iterator[Problem]:
    total = config.trainer.total_iterations
    if total is None or schedule.shape == "stages":
        return
    delay = schedule.delay
    if schedule.delay_fraction is not None:
        delay = round(schedule.delay_fraction * total)
    if delay + (schedule.steps or 0) >= total:
        text = f"does not reach its end within trainer.total_iterations ({total})"
        yield Problem(where, text, note=True)


def value_problem(name: str, value: float) -> str | None:
    """Why a key cannot have this value, or None: the limits that the schema gives it."""
    section: Any = ExperimentConfig
    *parents, leaf = name.split(".")
    for part in parents:
        section, _ = section_type(section.model_fields[part])
    info = section.model_fields[leaf]
    for item in info.metadata:
        if isinstance(item, Gt) and not value > item.gt:
            return f"must be > {item.gt}"
        if isinstance(item, Ge) and not value >= item.ge:
            return f"must be >= {item.ge}"
        if isinstance(item, Lt) and not value < item.lt:
            return f"must be < {item.lt}"
        if isinstance(item, Le) and not value <= item.le:
            return f"must be <= {item.le}"
    return None


def unused_key(config: ExperimentConfig, name: str) -> str | None:
    """Why a key is not read in this run, or None."""
    algorithm = config.algorithm
    if name.startswith("critic.") and not config.needs_critic:
        return f"adv_estimator {algorithm.adv_estimator} has no critic"
    if name == "actor.kl_loss_coef" and not config.actor.use_kl_loss:
        return "actor.use_kl_loss is false"
    if name == "actor.sft_mix.coef" and not config.actor.sft_mix.files:
        return "actor.sft_mix.files is empty"
    if name.startswith("algorithm.kl_ctrl.") and not algorithm.use_kl_in_reward:
        return "algorithm.use_kl_in_reward is false"
    if name == "algorithm.kl_ctrl.target_kl" and algorithm.kl_ctrl.type == "fixed":
        return "algorithm.kl_ctrl.type is fixed"
    if name.startswith("algorithm.reward_shaping.overlong.") and not algorithm.reward_shaping.overlong.enabled:
        return "algorithm.reward_shaping.overlong.enabled is false"
    if name.startswith("algorithm.correction.") and algorithm.correction.mode == "none":
        return "algorithm.correction.mode is none"
    return None


# --- guard ---------------------------------------------------------------------------------------------


def _check_rules(config: ExperimentConfig) -> Iterator[Problem]:
    presets = tuple(rule.name for rule in preset_rules(config.guard.preset))
    counts = Counter(rule.name for rule in config.guard.rules)
    for i, rule in enumerate(config.guard.rules):
        where = f"guard.rules.{i}"
        if counts[rule.name] > 1:
            counts[rule.name] = 0  # said once
            yield Problem(f"{where}.name", "names more than one rule; write one rule of that name", rule.name)
        if rule.enabled:
            yield from _check_rule(where, rule, presets)


def _check_rule(where: str, rule: GuardRuleConfig, presets: tuple[str, ...]) -> Iterator[Problem]:
    if not rule.metric:
        close = difflib.get_close_matches(rule.name, presets, n=1)
        guess = f"; or did you mean the preset's rule {close[0]}?" if close else ""
        yield Problem(f"{where}.metric", f"is required in a rule of one's own ({rule.name}){guess}")
        return
    given = rule.conditions()
    if len(given) != 1:
        found = f"has {' and '.join(given)}" if given else "has no condition"
        yield Problem(where, f"rule {rule.name} {found}; give exactly one of {', '.join(CONDITIONS)}")
    if not rule.actions:
        yield Problem(f"{where}.actions", f"rule {rule.name} does nothing; add an action, e.g. `- warn`", [])
    # Shares and counts can be compared only where both are of one kind.
    until = math.inf if rule.until is None else rule.until
    if (rule.after < 1) == (until < 1) and until <= rule.after and until > 0:
        yield Problem(f"{where}.until", f"must be above after ({rule.after:g}), or the rule is never active", until)
    for j, action in enumerate(rule.actions):
        there = f"{where}.actions.{j}"
        if action.scale is not None:
            yield from _check_scale(f"{there}.scale", action.scale.key, action.scale.min, action.scale.max)
        if action.set is not None:
            name, to = action.set.key, action.set.to
            wrong = not_in("the guard cannot change it", name, ADJUSTABLE)
            if wrong:
                yield Problem(f"{there}.set.key", wrong, name)
                continue
            limit = value_problem(name, to)
            if limit or (name == "rollout.temperature" and to <= 0):
                yield Problem(f"{there}.set.to", limit or "must be > 0", to)
        if action.check is not None and action.check.low > action.check.high:
            yield Problem(f"{there}.check.low", f"must not exceed high ({action.check.high:g})", action.check.low)


def _check_scale(where: str, name: str, low: float | None, high: float | None) -> Iterator[Problem]:
    wrong = not_in("the guard cannot change it", name, ADJUSTABLE)
    if wrong:
        yield Problem(f"{where}.key", wrong, name)
    if low is not None and high is not None and low > high:
        yield Problem(f"{where}.min", f"must not exceed max ({high:g})", low)


def _check_checkpoints(config: ExperimentConfig) -> Iterator[Problem]:
    """Rules that go back need checkpoints that are kept until they are known to be stable."""
    needing = [r.name for r in config.guard.rules if r.enabled and r.does("rollback", "restore_optimizer")]
    if not needing:
        return
    trainer, guard = config.trainer, config.guard
    if trainer.save_freq == -1:
        more = "" if len(needing) == 1 else f" and {len(needing) - 1} more"
        text = f"guard rule {needing[0]}{more} goes back to checkpoints; give a period"
        yield Problem("trainer.save_freq", text, trainer.save_freq)
        return
    needed = -(-guard.stable_after // trainer.save_freq)
    if trainer.max_ckpt_to_keep < needed:
        text = (
            f"checkpoints are deleted before they can be stable, after guard.stable_after ({guard.stable_after}) "
            f"iterations; keep {needed}, or save less often"
        )
        yield Problem("trainer.max_ckpt_to_keep", text, trainer.max_ckpt_to_keep)
