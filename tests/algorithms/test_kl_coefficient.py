"""The KL coefficient under a schedule and a controller at once."""

import math
import random

import pytest

from megappo.algorithms.kl import make_controller
from megappo.algorithms.kl_coefficient import KlCoefficient
from megappo.algorithms.schedules import Schedule, value_at

TOTAL, SAMPLES = 50, 64


def measured(seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(0.0, 0.3) for _ in range(TOTAL)]


@pytest.mark.parametrize("type", ["fixed", "adaptive", "power"])
def test_with_a_constant_base_it_is_the_controller_itself(type):
    settings = {"target_kl": 0.1, "horizon": 1000, "power": 0.3}
    plain, ours = make_controller(type, 0.002, **settings), KlCoefficient(type, **settings)
    for kl in measured():
        assert ours.value(0.002) == pytest.approx(plain.value, rel=1e-12)
        plain.update(kl, SAMPLES)
        assert ours.update(0.002, kl, SAMPLES, 0.1) == pytest.approx(plain.value, rel=1e-12)


@pytest.mark.parametrize("type", ["fixed", "adaptive", "power"])
def test_fifty_iterations_of_scheduled_base_and_target_follow_the_closed_form(type):
    base = Schedule(start=0.01, end=0.1, shape="exponential")  # annealing: start loose, end tight
    target = Schedule(shape="stages", stages=((0.2, 0.008), (0.8, 0.012), (1.0, 0.015)))
    kl_of = measured(1)
    ours, factor = KlCoefficient(type, horizon=2000, power=0.2), 1.0
    for i, kl in enumerate(kl_of):
        beta, aim = 0.01 * 10 ** (i / (TOTAL - 1)), 0.008 if i < 10 else 0.012 if i < 40 else 0.015
        assert ours.value(value_at(base, i, TOTAL)) == pytest.approx(beta * factor, rel=1e-9)
        ours.update(value_at(base, i, TOTAL), kl, SAMPLES, value_at(target, i, TOTAL))
        if type == "adaptive":
            factor *= 1 + max(-0.2, min(0.2, kl / aim - 1)) * SAMPLES / 2000
        elif type == "power":
            factor *= max(0.1, min(10.0, kl / aim)) ** 0.2
    assert ours.factor == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize("type", ["adaptive", "power"])
def test_the_controller_rests_while_a_warm_up_keeps_the_base_at_zero(type):
    ours = KlCoefficient(type, horizon=100)
    for _ in range(20):
        assert ours.update(0.0, 1e-6, SAMPLES, 0.01) == 0.0
    assert ours.factor == 1.0 and ours.value(0.001) == 0.001
    assert ours.update(0.001, 0.5, SAMPLES, 0.01) > 0.001


def test_a_kl_that_is_not_finite_changes_nothing():
    ours = KlCoefficient("adaptive", horizon=100)
    ours.update(0.001, math.nan, SAMPLES, 0.01)
    assert ours.factor == 1.0


def test_state_continues():
    first, second = KlCoefficient("power"), KlCoefficient("power")
    for kl in measured(2)[:7]:
        first.update(0.001, kl, SAMPLES, 0.1)
    second.load_state_dict(first.state_dict())
    assert second.update(0.001, 0.2, SAMPLES, 0.1) == first.update(0.001, 0.2, SAMPLES, 0.1)
