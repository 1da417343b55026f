"""Clipped value loss and explained variance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.segments import widen, zero_outside


@dataclass(frozen=True)
class ValueLoss:
    """Both `[total]`; `clipped` (bool) where the clip decided the loss."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    cliprange_value: float | None,
    *,
    loss_mask: Tensor | None = None,
) -> ValueLoss:
    """`½·max((V − R)², (clip(V, V_old ± ε) − R)²)` per token; `½(V − R)²` where ε is None.

    Give `loss_mask` whenever entries outside it may not be finite. Raises ValueError for a negative ε.
    """
    values = zero_outside(widen(values), loss_mask)
    returns = zero_outside(widen(returns), loss_mask).detach()
    free = (values - returns).square()
    if cliprange_value is None:
        return ValueLoss(0.5 * free, torch.zeros_like(free, dtype=torch.bool))
    if cliprange_value < 0:
        raise ValueError(f"cliprange_value is {cliprange_value}: it must not be negative (null switches it off)")
    old = zero_outside(widen(old_values), loss_mask).detach()
    bounded = (values.clamp(old - cliprange_value, old + cliprange_value) - returns).square()
    return ValueLoss(0.5 * torch.maximum(free, bounded), bounded.detach() > free.detach())


@torch.no_grad()
def explained_variance_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Float64 `[5]`: (count, Σe, Σe², ΣR, ΣR²) inside the mask, e = R − V. All-reduce with SUM."""
    target = zero_outside(returns, mask).double()
    error = target - zero_outside(values, mask).double()
    count = mask.bool().sum().double()
    return torch.stack([count, error.sum(), error.square().sum(), target.sum(), target.square().sum()])


def explained_variance_from(moments: Tensor) -> float:
    """`1 − Var(R − V) / Var(R)` from the global moments; 0 where the returns do not vary."""
    n, error, error_squares, target, target_squares = moments.double().tolist()
    if n < 2:
        return 0.0
    spread = target_squares - target * target / n
    if spread <= 1e-14 * target_squares:  # all that is left after cancellation is rounding
        return 0.0
    return 1.0 - max(error_squares - error * error / n, 0.0) / spread
