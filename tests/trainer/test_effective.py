"""The configuration in force: file, then schedules, then the guard's adjustments."""

import pytest

from megappo.config.schema import ExperimentConfig
from megappo.trainer.effective import (
    Adjustment,
    batch_sizes,
    changing_metrics,
    count_iterations,
    effective_config,
    largest_batch,
    optimizer_steps,
)


def make(schedules=None, **sections) -> ExperimentConfig:
    tree = {"model": {"path": "m"}, "schedules": schedules or {}, **sections}
    return ExperimentConfig.model_validate(tree).resolved()


def test_nothing_changes_without_schedules_and_adjustments():
    config = make()
    assert effective_config(config, 3, 10) is config


def test_scheduled_keys_follow_their_schedule_and_the_base_is_left_alone():
    config = make(
        {
            "actor.optim.lr": {"end": 1e-7},
            "algorithm.kl_ctrl.kl_coef": {"start": 0.0, "delay_fraction": 0.1, "fraction": 0.1},
        }
    )
    before = config.model_dump()
    for i in range(51):
        now = effective_config(config, i, 51)
        assert now.actor.optim.lr == pytest.approx(1e-6 + (1e-7 - 1e-6) * i / 50)
        assert now.algorithm.kl_ctrl.kl_coef == pytest.approx(0.001 * min(1, max(0, (i - 5) / 5)))
    assert config.model_dump() == before
    assert now.critic is config.critic, "sections in which nothing differs are shared"


def test_a_scheduled_clip_ratio_moves_both_sides_unless_they_are_given():
    both = effective_config(make({"actor.clip_ratio": {"start": 0.3, "end": 0.1}}), 0, 10).actor
    assert (both.clip_ratio_low, both.clip_ratio_high) == (0.3, 0.3)
    config = make({"actor.clip_ratio": {"start": 0.3, "end": 0.1}}, actor={"clip_ratio_high": 0.28})
    assert effective_config(config, 9, 10).actor.clip_ratio_low == 0.1
    assert effective_config(config, 9, 10).actor.clip_ratio_high == 0.28


def test_adjustments_come_after_the_schedule():
    config = make({"actor.entropy_coeff": {"start": 0.02, "end": 0.0}, "actor.optim.lr": {"end": 0.5e-6}})
    adjustments = {"actor.entropy_coeff": Adjustment(value=0.01), "actor.optim.lr": Adjustment(factor=0.25)}
    for i in (0, 9):
        now = effective_config(config, i, 10, adjustments)
        assert now.actor.entropy_coeff == 0.01
        assert now.actor.optim.lr == pytest.approx(0.25 * (1e-6 if i == 0 else 0.5e-6))
    adjusted = effective_config(config, 0, 10, {"rollout.temperature": Adjustment(value=0.8, factor=0.5)})
    assert adjusted.rollout.temperature == pytest.approx(0.4)


def test_values_in_force_are_reported():
    config = make({"actor.entropy_coeff": {"start": 0.02, "end": 0.0}})
    adjustments = {"actor.optim.lr": Adjustment(factor=0.5)}
    now = effective_config(config, 0, 10, adjustments)
    assert changing_metrics(config, now, adjustments) == {
        "schedule/actor.entropy_coeff": 0.02,
        "schedule/actor.optim.lr": 5e-7,
    }


RAMP = {"data.train_batch_size": {"start": 128, "fraction": 0.5}}


def test_the_batch_grows_in_whole_mini_batches_of_actor_and_critic():
    sizes = batch_sizes(make(RAMP), 50)
    assert sizes[0] == 128 and sizes[-25:] == [256] * 25 and sizes == sorted(sizes)
    assert {size % 64 for size in sizes} == {0} and 192 in sizes
    assert all(isinstance(size, int) for size in sizes)
    config = make(RAMP, critic={"ppo_mini_batch_size": 128})
    assert set(batch_sizes(config, 50)) == {128, 256}
    assert effective_config(config, 0, 50).data.train_batch_size == 128
    assert largest_batch(config) == 256


def test_epochs_become_iterations_also_while_the_batch_grows():
    epochs = {"total_epochs": 4}
    assert count_iterations(make(trainer=epochs), 1024) == 16
    grown = count_iterations(make(RAMP, trainer=epochs), 1024)
    assert 16 < grown < 32
    assert count_iterations(make(RAMP, trainer={"total_iterations": 7}), 1024) == 7


def test_optimizer_steps_count_what_each_iteration_makes():
    assert optimizer_steps([256] * 10, 64, 4) == 160
    assert optimizer_steps([128, 192, 256], 64, 2) == 2 * (2 + 3 + 4)
    assert optimizer_steps([], 64, 2) == 1
