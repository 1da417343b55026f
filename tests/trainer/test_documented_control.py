"""Schedules and controllers of the users' documents, from YAML, over 50 simulated iterations: their closed forms."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import yaml

from megappo.algorithms.kl_coefficient import KlCoefficient
from megappo.config.check_changes import check_changes
from megappo.config.schema import ExperimentConfig
from megappo.config.schema.schedules import SCHEDULABLE
from megappo.trainer.effective import effective_config, value_of

TOTAL = 50


def config_from(text: str) -> ExperimentConfig:
    config = ExperimentConfig.model_validate({"model": {"path": "m"}, **yaml.safe_load(text)}).resolved()
    assert not [problem for problem in check_changes(config) if not problem.note]
    return config


def followed(config: ExperimentConfig, key: str) -> list[float]:
    return [value_of(effective_config(config, i, TOTAL), key) for i in range(TOTAL)]


def ramp(start: float, end: float, delay: int, steps: int) -> Callable[[int], float]:
    return lambda i: start + (end - start) * min(1.0, max(0.0, (i - delay) / steps))


#: key, YAML, closed form of iteration i (from 0)
DOCUMENTED = {
    "KL warm-up in the reward: nothing for 5 %, then a ramp to 0.001": (
        "algorithm.kl_ctrl.kl_coef",
        "algorithm: {use_kl_in_reward: true}\n"
        "schedules: {algorithm.kl_ctrl.kl_coef: {start: 0.0, delay_fraction: 0.06, fraction: 0.1}}",
        ramp(0.0, 0.001, 3, 5),
    ),
    "KL warm-up in the loss": (
        "actor.kl_loss_coef",
        "actor: {use_kl_loss: true}\n"
        "schedules: {actor.kl_loss_coef: {start: 0.0, delay_fraction: 0.06, fraction: 0.1}}",
        ramp(0.0, 0.001, 3, 5),
    ),
    "annealing of the coefficient: loose 0.01, tight 0.1": (
        "algorithm.kl_ctrl.kl_coef",
        "algorithm: {use_kl_in_reward: true}\n"
        "schedules: {algorithm.kl_ctrl.kl_coef: {start: 0.01, end: 0.1, shape: exponential}}",
        lambda i: 0.01 * 10 ** (i / 49),
    ),
    "staged targets": (
        "algorithm.kl_ctrl.target_kl",
        "algorithm: {use_kl_in_reward: true, kl_ctrl: {type: adaptive}}\n"
        "schedules: {algorithm.kl_ctrl.target_kl: "
        "{shape: stages, stages: [[0.2, 0.008], [0.8, 0.012], [1.0, 0.015]]}}",
        lambda i: 0.008 if i < 10 else 0.012 if i < 40 else 0.015,
    ),
    "batch from 128 to 256, in whole mini-batches": (
        "data.train_batch_size",
        "data: {train_batch_size: 256}\nactor: {ppo_mini_batch_size: 64}\n"
        "schedules: {data.train_batch_size: {start: 128, end: 256, fraction: 0.5}}",
        lambda i: 64 * round(min(128 + 128 * i / 25, 256) / 64),
    ),
    "learning rate": (
        "actor.optim.lr",
        "schedules: {actor.optim.lr: {start: 1.0e-6, end: 1.0e-7, shape: cosine}}",
        lambda i: 1e-7 + 9e-7 * (1 + math.cos(math.pi * i / 49)) / 2,
    ),
    "entropy coefficient": (
        "actor.entropy_coeff",
        "schedules: {actor.entropy_coeff: {start: 0.01, end: 0.0, steps: 20}}",
        ramp(0.01, 0.0, 0, 20),
    ),
    "temperature": (
        "rollout.temperature",
        "schedules: {rollout.temperature: {start: 1.0, end: 0.8, delay: 10, steps: 30}}",
        ramp(1.0, 0.8, 10, 30),
    ),
    "clip range, both sides": (
        "actor.clip_ratio_high",
        "schedules: {actor.clip_ratio: {start: 0.3, end: 0.2, shape: constant, delay: 25}}",
        lambda i: 0.3 if i < 25 else 0.2,
    ),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_schedules_follow_their_closed_form(name):
    key, text, closed = DOCUMENTED[name]
    for i, value in enumerate(followed(config_from(text), key)):
        assert value == pytest.approx(closed(i), rel=1e-9, abs=1e-15), (name, i)


@pytest.mark.parametrize("key", [key for key in SCHEDULABLE if key != "data.train_batch_size"])
@pytest.mark.parametrize("shape", ["linear", "cosine", "exponential"])
def test_every_key_that_may_have_a_schedule_follows_every_shape(key, shape):
    """In force is what the closed form says, and no other key moves (but those that inherit it)."""
    start, end = (1.5, 3.0) if key.endswith("clip_ratio_c") else (0.1, 0.4)
    section = {"start": start, "end": end, "shape": shape, "delay": 5, "steps": 40}
    config = ExperimentConfig.model_validate({"model": {"path": "m"}, "schedules": {key: section}}).resolved()
    closed = {
        "linear": lambda p: start + (end - start) * p,
        "cosine": lambda p: start + (end - start) * (1 - math.cos(math.pi * p)) / 2,
        "exponential": lambda p: start * (end / start) ** p,
    }[shape]
    for i, value in enumerate(followed(config, key)):
        assert value == pytest.approx(closed(min(1.0, max(0.0, (i - 5) / 40))), rel=1e-9), i


#: controller as YAML, the factor that one iteration with KL k and n samples multiplies by
CONTROLLERS = {
    "fixed 0.001": ("{type: fixed, kl_coef: 0.001}", lambda k, n: 1.0),
    "adaptive, target 0.01, horizon 10": (
        "{type: adaptive, kl_coef: 0.001, target_kl: 0.01, horizon: 10}",
        lambda k, n: 1 + max(-0.2, min(0.2, k / 0.01 - 1)) * min(1, n / 10),
    ),
    "adaptive, target 0.1, horizon 10000": (
        "{type: adaptive, kl_coef: 0.001, target_kl: 0.1, horizon: 10000}",
        lambda k, n: 1 + max(-0.2, min(0.2, k / 0.1 - 1)) * n / 10000,
    ),
    "power 1.5": (
        "{type: power, kl_coef: 0.001, target_kl: 0.01, power: 1.5}",
        lambda k, n: max(0.1, min(10.0, k / 0.01)) ** 1.5,
    ),
}


@pytest.mark.parametrize("name", CONTROLLERS)
def test_documented_controllers_follow_their_closed_form(name):
    """A KL that swings around its target; the coefficient rises above it and falls below it."""
    text, step = CONTROLLERS[name]
    ctrl = config_from(f"algorithm: {{use_kl_in_reward: true, kl_ctrl: {text}}}").algorithm.kl_ctrl
    ours = KlCoefficient(ctrl.type, target_kl=ctrl.target_kl, horizon=ctrl.horizon, power=ctrl.power)
    rng, value = random.Random(7), 0.001
    for _ in range(TOTAL):
        kl, samples = ctrl.target_kl * rng.uniform(0.5, 1.9), 64
        before = ours.value(ctrl.kl_coef)
        assert before == pytest.approx(value, rel=1e-9)
        ours.update(ctrl.kl_coef, kl, samples, ctrl.target_kl)
        value *= step(kl, samples)
        if ctrl.type != "fixed":
            assert (ours.value(ctrl.kl_coef) > before) == (kl > ctrl.target_kl)


@pytest.mark.parametrize("type", ["adaptive", "power"])
def test_a_controller_brings_a_simulated_policy_to_each_staged_target(type):
    """A policy whose KL falls as the coefficient rises: 50 iterations, three targets, reached one after the other."""
    config = config_from(
        f"algorithm: {{use_kl_in_reward: true, kl_ctrl: {{type: {type}, kl_coef: 0.001, horizon: 64, power: 0.5}}}}\n"
        "schedules: {algorithm.kl_ctrl.target_kl: "
        "{shape: stages, stages: [[0.2, 0.008], [0.8, 0.012], [1.0, 0.015]]}}"
    )
    ctrl = config.algorithm.kl_ctrl
    ours = KlCoefficient(ctrl.type, target_kl=ctrl.target_kl, horizon=ctrl.horizon, power=ctrl.power)
    targets = followed(config, "algorithm.kl_ctrl.target_kl")
    seen = []
    for target in targets:
        seen.append(1.2e-5 / ours.value(ctrl.kl_coef))
        ours.update(ctrl.kl_coef, seen[-1], 64, target)
    for last in (9, 39, 49):
        assert seen[last] == pytest.approx(targets[last], rel=0.05)
