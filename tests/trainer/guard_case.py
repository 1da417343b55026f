"""Guards for tests: a configuration with rules, and metrics of a healthy iteration."""

from megappo.config.check_changes import check_changes
from megappo.config.schema import ExperimentConfig
from megappo.trainer.guard import Event, Guard

KL = "actor/reward_kl_penalty"
TOTAL = 1000

HEALTHY = {
    KL: 0.01,
    "actor/ppo_kl": 0.001,
    "actor/loss": 0.1,
    "actor/pg_loss": 0.6,
    "actor/entropy": 1.5,
    "actor/grad_norm": 0.9,
    "critic/grad_norm": 0.9,
    "critic/vf_loss": 0.7,
    "critic/score/mean": 0.6,
    "critic/score/median": 0.5,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "rollout_corr/k3_kl": 0.001,
}


def make_config(rules=(), *, preset="none", **sections) -> ExperimentConfig:
    guard = {"preset": preset, "rules": list(rules), **sections.pop("guard", {})}
    config = ExperimentConfig.model_validate({"model": {"path": "m"}, "guard": guard, **sections}).resolved()
    problems = [problem for problem in check_changes(config) if not problem.note]
    assert not problems, problems
    return config


def make_guard(rules=(), **kwargs) -> Guard:
    return Guard(make_config(rules, **kwargs))


def rule(metric="m", actions=("warn",), **fields) -> dict:
    return {"name": "r", "metric": metric, "actions": list(actions), **fields}


def run(guard: Guard, values, metric="m", *, total=TOTAL, begin=1) -> list[int]:
    """Iterations at which something fired, `values` being the metric from iteration `begin` on (None: not logged)."""
    fired = []
    for i, value in enumerate(values, begin):
        metrics = {} if value is None else {metric: value}
        fired += [event.step for event in guard.check(metrics, i, total)]
    return fired


def events_of(guard: Guard, changes: dict, *, iteration=500, total=TOTAL) -> list[Event]:
    """One iteration, healthy but for `changes`."""
    return guard.check({**HEALTHY, **changes}, iteration, total)
