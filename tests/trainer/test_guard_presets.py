"""The presets: every row of the documents' tables fires at its number, not before, and does what the row says."""

import math

import pytest
from guard_case import HEALTHY, KL, TOTAL, events_of, make_guard

from megappo.config.schema.guard_presets import preset_rules
from megappo.trainer.effective import effective_config
from megappo.trainer.guard import Guard, Verdict

EPS = 1e-9
BOTH = ("conservative", "loose")
LR, CRITIC_LR = "actor.optim.lr", "critic.optim.lr"
KL_COEF, KL_LOSS = "algorithm.kl_ctrl.kl_coef", "actor.kl_loss_coef"

#: preset, rule, metric, last value at which it is silent, step to where it fires
THRESHOLDS = [
    ("conservative", "kl_high", KL, 0.03, EPS),
    ("conservative", "kl_drift", KL, 0.05, EPS),
    ("conservative", "kl_risk", KL, 0.015, EPS),
    ("conservative", "kl_step", "actor/ppo_kl", 0.02, EPS),
    ("loose", "kl_drift", KL, 0.1, EPS),
    ("loose", "kl_tight", KL, 0.02, -EPS),
    ("loose", "kl_risk", KL, 0.08, EPS),
    *(
        (preset, *row)
        for preset in BOTH
        for row in (
            ("loss_explosion", "actor/loss", 10.0, EPS),
            ("entropy_low", "actor/entropy", 0.5, -EPS),
            ("mode_collapse", "actor/entropy", 0.1, -EPS),
            ("entropy_fading", "actor/entropy", 1.0, -EPS),
            ("value_loss", "critic/vf_loss", 1.0, EPS),
            ("reward_low", "critic/score/median", 0.1, -EPS),
            ("actor_grad_norm", "actor/grad_norm", 5.0, EPS),
            ("critic_grad_norm", "critic/grad_norm", 5.0, EPS),
            ("policy_converged", "actor/pg_loss", 0.5, -EPS),
            ("value_converged", "critic/vf_loss", 0.5, -EPS),
            ("off_policy_drift", "rollout_corr/k3_kl", 0.02, EPS),
        )
    ),
]


def fired(guard: Guard, changes: dict, iterations=range(500, 510)) -> dict[str, int]:
    """Rule -> first iteration in which it fired."""
    out: dict[str, int] = {}
    for i in iterations:
        for event in guard.check({**HEALTHY, **changes}, i, TOTAL):
            out.setdefault(event.rule, i)
    return out


@pytest.mark.parametrize(("preset", "name", "metric", "value", "step"), THRESHOLDS)
def test_each_rule_fires_beyond_its_number_and_not_at_it(preset, name, metric, value, step):
    (rule,) = (r for r in preset_rules(preset) if r.name == name)
    assert name not in fired(make_guard(preset=preset), {metric: value})
    only = Guard(make_guard(preset=preset).config.model_copy(deep=True))  # other rules' rollbacks would interfere
    only.rules = [r for r in only.rules if r.name == name]
    patience = int(rule.patience)
    assert fired(only, {metric: value + step}) == {name: 500 + patience - 1}


def test_every_rule_of_every_preset_has_a_test_here():
    tested = {(preset, name) for preset, name, *_ in THRESHOLDS}
    others = {"kl_penalty_too_strong", "non_finite", "reward_flat"}
    for preset in BOTH:
        names = [rule.name for rule in preset_rules(preset)]
        assert len(names) == len(set(names))
        assert {(preset, n) for n in names if n not in others} == {pair for pair in tested if pair[0] == preset}


@pytest.mark.parametrize("preset", BOTH)
def test_a_healthy_run_is_left_alone(preset):
    guard = make_guard(preset=preset)
    for i in range(1, 200):
        score = {"critic/score/mean": 0.3 + i / 1000, KL: 0.01 if preset == "conservative" else 0.05}
        assert guard.check({**HEALTHY, **score}, i, TOTAL) == [], i
        assert (guard.metrics()["guard/healthy"], guard.metrics()["guard/kl_band"]) == (1.0, 0.0)


def after(guard: Guard, changes: dict):
    """Verdict of one iteration and the configuration in force after it."""
    verdict = Verdict.of(events_of(guard, changes))
    return verdict, effective_config(guard.config, 500, TOTAL, guard.adjustments)


def test_conservative_kl_above_0_03_raises_the_coefficient_halves_the_rate_and_rolls_back():
    verdict, config = after(make_guard(preset="conservative"), {KL: 0.031})
    assert verdict.rollback == "stable"
    assert config.algorithm.kl_ctrl.kl_coef == pytest.approx(0.0015)
    assert config.actor.kl_loss_coef == pytest.approx(0.0015)
    assert (config.actor.optim.lr, config.critic.optim.lr) == (5e-7, 5e-6)


def test_conservative_kl_drift_above_0_05_loads_the_last_stable_checkpoint():
    events = events_of(make_guard(preset="conservative"), {KL: 0.051})
    (drift,) = (event for event in events if event.rule == "kl_drift")
    assert drift.actions == ({"rollback": "stable", "skip_data": True},)


def test_loose_drift_sets_the_coefficient_and_rolls_back():
    verdict, config = after(make_guard(preset="loose"), {KL: 0.11})
    assert verdict.rollback == "stable"
    assert (config.algorithm.kl_ctrl.kl_coef, config.actor.kl_loss_coef) == (0.005, 0.005)
    assert config.actor.optim.lr == 1e-6


def test_loose_too_tight_halves_the_coefficient_once_and_widens_the_clip():
    guard = make_guard(preset="loose")
    assert "kl_tight" not in fired(guard, {KL: 0.001}, range(1, 101)), "the KL grows from 0"
    fired(guard, {KL: 0.01}, range(101, 106))
    config = effective_config(guard.config, 106, TOTAL, guard.adjustments)
    assert config.algorithm.kl_ctrl.kl_coef == pytest.approx(0.0005)
    assert config.actor.clip_ratio_high == pytest.approx(0.22) and config.actor.clip_ratio_low == pytest.approx(0.22)
    fired(guard, {KL: 0.01}, range(106, 300))
    config = effective_config(guard.config, 300, TOTAL, guard.adjustments)
    assert config.algorithm.kl_ctrl.kl_coef == pytest.approx(0.0005), "0.0005 is the document's bound"
    assert config.actor.clip_ratio_high == pytest.approx(0.3)


@pytest.mark.parametrize("preset", BOTH)
def test_loss_explosion_loads_the_last_checkpoint_and_cuts_the_rate_by_a_fifth(preset):
    kl = 0.01 if preset == "conservative" else 0.05
    verdict, config = after(make_guard(preset=preset), {"actor/loss": 50.0, KL: kl})
    assert verdict.rollback == "latest" and config.actor.optim.lr == pytest.approx(8e-7)


@pytest.mark.parametrize("preset", BOTH)
def test_low_entropy_sets_temperature_and_entropy_coefficient(preset):
    verdict, config = after(make_guard(preset=preset), {"actor/entropy": 0.4})
    assert (config.rollout.temperature, config.actor.entropy_coeff) == (0.8, 0.01)
    assert verdict.rollback is None


@pytest.mark.parametrize("preset", BOTH)
def test_nan_skips_the_update_clips_tighter_and_looks_at_the_reward_range(preset):
    guard = make_guard(preset=preset)
    known_before_the_update = {"critic/score/mean": math.nan, "critic/score/max": 9.0}
    assert guard.vetoes(known_before_the_update, 500, TOTAL) == ["non_finite"]
    (event,) = (e for e in events_of(guard, known_before_the_update) if e.rule == "non_finite")
    assert {"outside": "critic/score/max", "value": 9.0} in event.actions
    config = effective_config(guard.config, 500, TOTAL, guard.adjustments)
    assert (config.actor.optim.max_grad_norm, config.critic.optim.max_grad_norm) == (0.5, 0.5)
    assert guard.metrics()["guard/healthy"] == 0.0
    assert "non_finite" in fired(make_guard(preset=preset), {"some/other": math.inf})
    assert "non_finite" not in fired(make_guard(preset=preset), {"some/other": 1e300})


@pytest.mark.parametrize("preset", BOTH)
def test_value_loss_above_1_and_a_flat_reward_restore_the_optimizer(preset):
    assert after(make_guard(preset=preset), {"critic/vf_loss": 1.1})[0].restore_optimizer
    flat = fired(make_guard(preset=preset), {KL: 0.05 if preset == "loose" else 0.01}, range(1, 40))
    assert flat == {"reward_flat": 30}
    guard = make_guard(preset=preset)
    rising = [guard.check({**HEALTHY, "critic/score/mean": i / 100}, i, TOTAL) for i in range(1, 60)]
    assert not any(event.rule == "reward_flat" for events in rising for event in events)


@pytest.mark.parametrize("preset", BOTH)
def test_grad_norm_above_5_cuts_the_rate_of_its_role_by_a_tenth(preset):
    guard = make_guard(preset=preset)
    for metric, rates in (("actor/grad_norm", (9e-7, 1e-5)), ("critic/grad_norm", (9e-7, 9e-6))):
        _, config = after(guard, {metric: 5.1})
        assert (config.actor.optim.lr, config.critic.optim.lr) == pytest.approx(rates)


@pytest.mark.parametrize("preset", BOTH)
def test_off_policy_drift_asks_for_on_policy_rollouts(preset):
    assert after(make_guard(preset=preset), {"rollout_corr/k3_kl": 0.021})[0].on_policy


def test_a_kl_that_stays_below_0_002_for_the_first_tenth_means_too_strong_a_penalty():
    def run(kls, total=50):
        guard = make_guard(preset="conservative")
        return [
            event.step
            for i, kl in enumerate(kls, 1)
            for event in guard.check({**HEALTHY, KL: kl}, i, total)
            if event.rule == "kl_penalty_too_strong"
        ]

    assert run([0.0019] * 50) == [5]
    assert run([0.002] * 50) == [] and run([0.001] * 4 + [0.002] + [0.001] * 45) == []


@pytest.mark.parametrize(("preset", "low", "high"), [("conservative", 0.005, 0.015), ("loose", 0.02, 0.08)])
def test_bands(preset, low, high):
    guard = make_guard(preset=preset)
    for kl, where in ((low - EPS, -1), (low, 0), (high, 0), (high + EPS, 1)):
        events_of(guard, {KL: kl})
        assert guard.metrics()["guard/kl_band"] == where


def test_an_iteration_above_the_band_is_not_healthy():
    guard = make_guard(preset="conservative")
    events_of(guard, {KL: 0.02})
    assert guard.metrics()["guard/healthy"] == 0.0


@pytest.mark.parametrize("preset", ["conservative", "loose"])
def test_losses_below_a_half_are_reported_as_converged(preset):
    """Ten times in a row, told once; nothing else happens."""
    guard, told = make_guard(preset=preset), []
    calm = {**HEALTHY, KL: 0.01 if preset == "conservative" else 0.05}
    for i in range(500, 520):
        events = guard.check({**calm, "actor/pg_loss": 0.4, "critic/vf_loss": 0.4}, i, TOTAL)
        told += [(event.step, event.rule) for event in events]
        assert not any(kind in action for e in events for action in e.actions for kind in ("rollback", "scale", "stop"))
    assert told == [(509, "policy_converged"), (509, "value_converged")]
