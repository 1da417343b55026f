"""The guard's presets: the tables of the users' documents, row by row (docs/guard.md shows them as tables).

`conservative` keeps the KL within 0.005-0.015, `loose` within 0.02-0.08; everything else is common to both. Where
the documents give no number (what a loss explosion is, windows, rests between two firings) it is chosen here.
"""

from functools import cache
from typing import Any

from megappo.config.schema.guard import GuardRuleConfig, KlBandConfig

KL = "actor/reward_kl_penalty"  # mean KL to the reference, measured before the update
_COEFFICIENTS = ("algorithm.kl_ctrl.kl_coef", "actor.kl_loss_coef")  # in the reward, in the loss
_RATES = ("actor.optim.lr", "critic.optim.lr")
_CLIPS = ("actor.optim.max_grad_norm", "critic.optim.max_grad_norm")

KL_BANDS: dict[str, KlBandConfig] = {
    "conservative": KlBandConfig(metric=KL, low=0.005, high=0.015),  # "mean KL 0.005-0.015 healthy"
    "loose": KlBandConfig(metric=KL, low=0.02, high=0.08),  # "0.02-0.08 stable"
}


def _scale(keys: tuple[str, ...], by: float, **bounds: float) -> list[dict[str, Any]]:
    return [{"scale": {"key": key, "by": by, **bounds}} for key in keys]


def _set(keys: tuple[str, ...], to: float) -> list[dict[str, Any]]:
    return [{"set": {"key": key, "to": to}} for key in keys]


_CONSERVATIVE: list[dict[str, Any]] = [
    # "mean KL > 0.03: raise the KL coefficient x1.5, learning rate x0.5, roll back to the last good checkpoint".
    # The second document's "KL > 0.03: load last checkpoint, learning rate -20 %" is the weaker form of this row.
    {
        "name": "kl_high", "metric": KL, "above": 0.03, "cooldown": 2,
        "actions": [*_scale(_COEFFICIENTS, 1.5), *_scale(_RATES, 0.5), {"rollback": "stable"}],
    },
    # "KL drift > 0.05: load the last stable checkpoint"
    {"name": "kl_drift", "metric": KL, "above": 0.05, "cooldown": 2, "actions": [{"rollback": "stable"}]},
    # "> 0.015 means risk of drift". Not healthy: a stable checkpoint is one with the KL in its band.
    {
        "name": "kl_risk", "metric": KL, "above": 0.015, "cooldown": 10, "unhealthy": True,
        "message": "risk of drift", "actions": ["warn"],
    },
    # "each step < 0.02": how far one iteration's update moves the policy
    {
        "name": "kl_step", "metric": "actor/ppo_kl", "above": 0.02, "cooldown": 10,
        "message": "the update moves the policy far", "actions": ["warn"],
    },
    # "KL < 0.002 for the first 10 % of iterations means the penalty is too strong"
    {
        "name": "kl_penalty_too_strong", "metric": KL, "below": 0.002, "patience": 0.1, "until": 0.1,
        "message": "the KL penalty is too strong", "actions": ["warn"],
    },
]  # fmt: skip

_LOOSE: list[dict[str, Any]] = [
    # "> 0.1 drift -> coefficient to 0.005 and roll back"; "KL drift > 0.1 in the looser preset: load the last
    # stable checkpoint"
    {
        "name": "kl_drift", "metric": KL, "above": 0.1, "cooldown": 2,
        "actions": [*_set(_COEFFICIENTS, 0.005), {"rollback": "stable"}],
    },
    # "< 0.02 too tight -> halve the coefficient (0.0005) and widen the clip" (to 0.3 at most, the widest that the
    # documents name). Not in the first tenth: there the KL grows from 0.
    {
        "name": "kl_tight", "metric": KL, "below": 0.02, "after": 0.1, "patience": 5, "cooldown": 10,
        "message": "the KL penalty is too tight",
        "actions": [
            *_scale(_COEFFICIENTS, 0.5, min=0.0005),
            *_scale(("actor.clip_ratio_low", "actor.clip_ratio_high"), 1.1, max=0.3),
        ],
    },
    # "0.02-0.08 stable": above it is not healthy
    {
        "name": "kl_risk", "metric": KL, "above": 0.08, "cooldown": 10, "unhealthy": True,
        "message": "risk of drift", "actions": ["warn"],
    },
]  # fmt: skip

_COMMON: list[dict[str, Any]] = [
    # "loss explosion: load last checkpoint, learning rate -20 %"
    {
        "name": "loss_explosion", "metric": "actor/loss", "above": 10.0, "cooldown": 2,
        "actions": [*_scale(_RATES, 0.8), {"rollback": "latest"}],
    },
    # "NaN anywhere: skip the update, gradient clip 0.5, check that the reward output is within [-2, 2]"
    {
        "name": "non_finite", "metric": "*", "non_finite": True,
        "actions": [
            "skip_update", *_set(_CLIPS, 0.5), "warn",
            {"check": {"metric": "critic/score/m*", "low": -2.0, "high": 2.0}},
        ],
    },
    # "entropy < 0.5: temperature 0.8, entropy coefficient 0.01"
    {
        "name": "entropy_low", "metric": "actor/entropy", "below": 0.5, "cooldown": 50,
        "actions": [*_set(("rollout.temperature",), 0.8), *_set(("actor.entropy_coeff",), 0.01)],
    },
    # "mode collapse warning below 0.1"
    {
        "name": "mode_collapse", "metric": "actor/entropy", "below": 0.1, "cooldown": 10,
        "message": "mode collapse", "actions": ["warn"],
    },
    # "healthy > 1.0"
    {
        "name": "entropy_fading", "metric": "actor/entropy", "below": 1.0, "cooldown": 100,
        "message": "the entropy has left its healthy range", "actions": ["warn"],
    },
    # "value loss > 1.0: restore optimizer state from the last checkpoint"
    {
        "name": "value_loss", "metric": "critic/vf_loss", "above": 1.0, "cooldown": 10,
        "actions": ["restore_optimizer"],
    },
    # "reward not rising over a window: restore optimizer state"
    {
        "name": "reward_flat", "metric": "critic/score/mean", "not_rising": 0.0, "window": 30, "cooldown": 30,
        "actions": ["restore_optimizer"],
    },
    # "median > 0.1" is a stable signal
    {
        "name": "reward_low", "metric": "critic/score/median", "below": 0.1, "after": 0.1, "patience": 10,
        "cooldown": 100, "message": "the median reward is low", "actions": ["warn"],
    },
    # "grad norm > 5: learning rate -10 %", of the role whose norm it is
    {
        "name": "actor_grad_norm", "metric": "actor/grad_norm", "above": 5.0,
        "actions": _scale(("actor.optim.lr",), 0.9),
    },
    {
        "name": "critic_grad_norm", "metric": "critic/grad_norm", "above": 5.0,
        "actions": _scale(("critic.optim.lr",), 0.9),
    },
    # "policy/value loss < 0.5: considered converged (report)"
    {
        "name": "policy_converged", "metric": "actor/pg_loss", "below": 0.5, "patience": 10, "cooldown": 1000,
        "message": "the policy loss is considered converged", "actions": ["warn"],
    },
    {
        "name": "value_converged", "metric": "critic/vf_loss", "below": 0.5, "patience": 10, "cooldown": 1000,
        "message": "the value loss is considered converged", "actions": ["warn"],
    },
    # "off-policy drift > 0.02: fall back to on-policy rollout"
    {
        "name": "off_policy_drift", "metric": "rollout_corr/k3_kl", "above": 0.02, "cooldown": 10,
        "actions": ["on_policy", "warn"],
    },
]  # fmt: skip

_PRESETS = {"none": [], "conservative": [*_CONSERVATIVE, *_COMMON], "loose": [*_LOOSE, *_COMMON]}


@cache
def _rules(preset: str) -> tuple[GuardRuleConfig, ...]:
    return tuple(GuardRuleConfig.model_validate(rule) for rule in _PRESETS[preset])


def preset_rules(preset: str) -> list[GuardRuleConfig]:
    """Copies of a preset's rules, in order."""
    return [rule.model_copy(deep=True) for rule in _rules(preset)]
