import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.kl import KL_KINDS, kl_moments, kl_penalty, make_controller

ALL_KINDS = [*KL_KINDS, *(kind + "+" for kind in KL_KINDS)]


def naive_kl(l: float, q: float, kind: str) -> tuple[float, float]:
    """Value and derivative in l."""
    base = kind.removesuffix("+")
    x = min(max(q - l, -20.0), 20.0)
    k3 = math.exp(x) - x - 1
    value, slope = {
        "kl": (l - q, 1.0),
        "abs": (abs(l - q), math.copysign(1.0, l - q)),
        "mse": ((l - q) ** 2 / 2, l - q),
        "low_var_kl": (min(k3, 10.0), 1 - math.exp(x) if k3 <= 10 and abs(q - l) <= 20 else 0.0),
    }[{"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(base, base)]
    return value, (l - q) if kind.endswith("+") else slope


@quick
@given(ragged(), st.sampled_from(ALL_KINDS), st.sampled_from([0.01, 0.5, 3.0, 15.0]))
def test_value_and_gradient_equal_the_definition(batch, kind, spread):
    l, q = batch.column("l", spread), batch.column("q", spread)
    leaf = l.clone().requires_grad_()
    kl = kl_penalty(leaf, q, kind, loss_mask=batch.mask)
    kl.sum().backward()
    expected = torch.zeros(2, batch.total, dtype=torch.float64)
    for _, index in batch.rows():
        for t in index:
            expected[:, t] = torch.tensor(naive_kl(float(l[t]), float(q[t]), kind), dtype=torch.float64)
    assert_close(kl.detach(), expected[0])
    assert_close(leaf.grad, expected[1])


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_an_overflowing_difference_stays_finite(kind, gap):
    leaf = torch.tensor([gap], requires_grad=True)
    kl = kl_penalty(leaf, torch.zeros(1), kind)
    kl.sum().backward()
    assert math.isfinite(float(kl.detach())) and math.isfinite(float(leaf.grad))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_nan_outside_the_mask_reaches_no_value_and_no_gradient(kind):
    batch = from_rows([[False, True]])
    leaf = batch.column("l").requires_grad_()
    kl = kl_penalty(leaf, batch.column("q"), kind, loss_mask=batch.mask)
    kl.sum().backward()
    assert float(kl[0].detach()) == 0 and float(leaf.grad[0]) == 0
    assert bool(kl.isfinite().all()) and bool(leaf.grad.isfinite().all())


def test_the_plus_suffix_gives_k1_and_k3_the_gradient_of_the_true_kl():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    probabilities = logprobs.exp().detach()
    true = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(true, logits, retain_graph=True)
    for kind in ("k1+", "k2", "k3+"):
        kl = kl_penalty(logprobs, reference, kind)
        (actual,) = torch.autograd.grad((probabilities * kl).sum(), logits, retain_graph=True)
        torch.testing.assert_close(actual, expected)


def test_k3_keeps_its_digits_for_close_policies():
    difference = 1e-3
    kl = kl_penalty(torch.tensor([difference]), torch.zeros(1), "k3")
    assert float(kl) == pytest.approx(math.exp(-difference) + difference - 1, rel=1e-3)


def test_an_unknown_kind_is_named_with_the_known_ones():
    for kind in ("k4", "+", "k1++"):
        with pytest.raises(ValueError, match="low_var_kl"):
            kl_penalty(torch.zeros(1), torch.zeros(1), kind)


@quick
@given(ragged())
def test_controller_kl_is_the_mean_over_sequences_of_token_means(batch):
    kl = batch.column("kl")
    means = [float(kl[index].double().mean()) for _, index in batch.rows() if index]
    total, sequences = kl_moments(kl, batch.mask, batch.cu).tolist()
    assert sequences == len(means)
    assert total == pytest.approx(sum(means), abs=1e-5)


def test_fixed_controller_never_moves():
    controller = make_controller("fixed", 0.001)
    assert controller.update(100.0, 64) == 0.001 == controller.value


@pytest.mark.parametrize(
    ("kl", "n", "horizon", "factor"),
    [
        (0.2, 100, 10000, 1 + 0.2 * 0.01),  # far above: the error is clipped at +0.2
        (0.0, 100, 10000, 1 - 0.2 * 0.01),
        (0.11, 100, 10000, 1 + 0.1 * 0.01),
        (0.1, 100, 10000, 1.0),
        (0.0, 1000, 10, 0.8),  # a horizon shorter than the batch must not turn the coefficient negative
    ],
)
def test_adaptive_controller_follows_its_formula(kl, n, horizon, factor):
    controller = make_controller("adaptive", 0.002, target_kl=0.1, horizon=horizon)
    controller.update(kl, n)
    assert controller.value == pytest.approx(0.002 * factor)


@pytest.mark.parametrize(("kl", "factor"), [(0.02, 2**1.5), (0.01, 1.0), (0.005, 0.5**1.5)])
def test_power_controller_raises_the_coefficient_above_the_target(kl, factor):
    controller = make_controller("power", 0.002, target_kl=0.01, power=1.5)
    controller.update(kl, 64)
    assert controller.value == pytest.approx(0.002 * factor)


@pytest.mark.parametrize("kl", [0.0, -0.5, float("nan"), float("inf"), 1e9])
@pytest.mark.parametrize("type", ["fixed", "adaptive", "power"])
def test_no_measured_kl_destroys_the_coefficient(type, kl):
    controller = make_controller(type, 0.002, target_kl=0.01, horizon=100)
    controller.update(kl, 64)
    assert math.isfinite(controller.value) and controller.value > 0


@pytest.mark.parametrize("type", ["fixed", "adaptive", "power"])
def test_the_coefficient_survives_a_resume(type):
    controller = make_controller(type, 0.002, target_kl=0.01, horizon=100)
    controller.update(0.05, 64)
    resumed = make_controller(type, 0.002, target_kl=0.01, horizon=100)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value
    assert resumed.update(0.02, 64) == controller.update(0.02, 64)


def test_wrong_controller_settings_are_refused():
    with pytest.raises(ValueError, match="fixed, adaptive or power"):
        make_controller("pid", 0.1)
    with pytest.raises(ValueError, match="target_kl"):
        make_controller("adaptive", 0.1, target_kl=0.0)
    with pytest.raises(ValueError, match="horizon"):
        make_controller("adaptive", 0.1, horizon=0)
