"""KL estimators between policy and reference, and controllers of the KL coefficient."""

import math

import torch
from torch import Tensor

from megappo.algorithms.segments import segment_mean, trainable_counts, widen, zero_outside

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str, *, loss_mask: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) from tokens drawn from π, `[total]`; l policy, q reference
    log-probs.

    kl/k1 `l − q`; abs `|l − q|`; mse/k2 `½(l − q)²`; low_var_kl/k3 `eˣ − x − 1` with `x = clip(q − l, ±20)`,
    the result clipped to ±10 (http://joschu.net/blog/kl-approx.html). As a loss only k2 has the gradient of
    the KL: k1's is 0 on average, k3's belongs to the reverse KL. A `+` suffix keeps the value and takes the
    gradient of k2.

    Give `loss_mask` whenever entries outside it may not be finite. Raises ValueError for an unknown kind.
    """
    base = kind.removesuffix("+")
    if base not in KL_KINDS:
        raise ValueError(f"unknown KL kind {kind!r}: use one of {', '.join(KL_KINDS)}, optionally followed by +")
    logprobs = zero_outside(widen(logprobs), loss_mask)
    difference = logprobs - zero_outside(widen(ref_logprobs), loss_mask).detach()
    estimate = _estimate(difference, base)
    if kind == base:
        return estimate
    gradient_of = _estimate(difference, "k2")
    return estimate.detach() + (gradient_of - gradient_of.detach())


def _estimate(difference: Tensor, kind: str) -> Tensor:
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    x = (-difference).clamp(-20.0, 20.0)
    return (torch.expm1(x) - x).clamp(-10.0, 10.0)


@torch.no_grad()
def kl_moments(kl: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Float64 `[2]`: (Σ over sequences of the mean KL of its trainable tokens, number of such sequences).

    All-reduce with SUM; the first over the second is the KL a controller is updated with.
    """
    sequences = (trainable_counts(loss_mask, cu_seqlens) > 0).sum().double()
    return torch.stack([segment_mean(kl, loss_mask, cu_seqlens).sum(), sequences])


class FixedController:
    """A constant coefficient."""

    def __init__(self, value: float):
        self.value = float(value)

    def update(self, current_kl: float, n_steps: int) -> float:
        """Take the measured mean KL and the samples behind it; return the coefficient now in force."""
        if math.isfinite(current_kl):
            self._update(current_kl, n_steps)
        return self.value

    def _update(self, current_kl: float, n_steps: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveController(FixedController):
    """`β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon)` (arXiv:1909.08593).

    n/horizon counts as at most 1: a horizon shorter than the batch would make the coefficient negative. A KL
    that is not finite changes nothing.
    """

    def __init__(self, value: float, target_kl: float, horizon: float):
        super().__init__(value)
        _require_positive(target_kl=target_kl, horizon=horizon)
        self.target_kl, self.horizon = target_kl, horizon

    def _update(self, current_kl: float, n_steps: int) -> None:
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(n_steps / self.horizon, 1.0)


class PowerController(FixedController):
    """`β ← β·(KL/target)^power`.

    KL/target is taken within [0.1, 10]: at KL 0, where training starts, the coefficient would become 0 for
    good, and an estimate below 0 has no power. A KL that is not finite changes nothing.
    """

    def __init__(self, value: float, target_kl: float, power: float):
        super().__init__(value)
        _require_positive(target_kl=target_kl, power=power)
        self.target_kl, self.power = target_kl, power

    def _update(self, current_kl: float, n_steps: int) -> None:
        self.value *= min(max(current_kl / self.target_kl, 0.1), 10.0) ** self.power


def make_controller(
    type: str, kl_coef: float, target_kl: float = 0.1, horizon: float = 10000, power: float = 1.5
) -> FixedController:
    """The controller of that name. Raises ValueError for an unknown name or a non-positive number."""
    if type == "fixed":
        return FixedController(kl_coef)
    if type == "adaptive":
        return AdaptiveController(kl_coef, target_kl, horizon)
    if type == "power":
        return PowerController(kl_coef, target_kl, power)
    raise ValueError(f"unknown kl_ctrl.type {type!r}: use fixed, adaptive or power")


def _require_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"kl_ctrl.{name} is {number}: it must be positive")
