"""Importance weights for the gap between the rollout engine's log-probs b and the trainer's own o."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.segments import expand, segment_mean, segment_sum, widen, zero_outside

CORRECTION_MODES = ("none", "token", "sequence", "geometric_rejection", "band")
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Correction:
    """Multiply the policy loss by `weights`, 0 outside `keep`; train and count with `keep` as loss mask."""

    weights: Tensor  # fp32[total], detached
    keep: Tensor  # bool[total]


@torch.no_grad()
def correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    mode: str,
    clip_max: float = 2.0,
    band_low: float = 0.5,
    band_high: float = 2.0,
) -> Correction:
    """Weights from `ρ = exp(clip(o − b, ±20))`, all columns `[total]`.

    - none: 1; rollout_logprobs are not read.
    - token: min(ρ, clip_max) (truncated importance sampling).
    - sequence: min(exp(clip(Σ(o − b), ±20)), clip_max) on every token of the sequence.
    - geometric_rejection: 1, and whole sequences are dropped from `keep` unless exp(mean(o − b)) is in the
      band.
    - band: ρ inside [band_low, band_high], 0 outside (IcePop). `keep` is unchanged: zeroed tokens stay in the
      denominators.

    The rollout must hold log-probs for every trainable token, a NaN there ends in the weights.
    Raises ValueError for an unknown mode, a clip_max ≤ 0 or an empty band.
    """
    if mode not in CORRECTION_MODES:
        raise ValueError(f"unknown correction.mode {mode!r}: use one of {', '.join(CORRECTION_MODES)}")
    if clip_max <= 0:
        raise ValueError(f"correction.clip_max is {clip_max}: it must be positive")
    if not 0 <= band_low <= band_high:
        raise ValueError(f"correction band [{band_low}, {band_high}] is empty or negative")
    mask, total = loss_mask.bool(), loss_mask.numel()
    if mode == "none":
        return Correction(mask.float(), mask)
    log_ratio = zero_outside(widen(old_logprobs) - widen(rollout_logprobs), mask)
    if mode == "token":
        weights = _ratio(log_ratio).clamp(max=clip_max)
    elif mode == "sequence":
        per_sequence = _ratio(segment_sum(log_ratio, cu_seqlens)).clamp(max=clip_max)
        weights = expand(per_sequence, cu_seqlens, total)
    elif mode == "band":
        ratio = _ratio(log_ratio)
        weights = torch.where((ratio >= band_low) & (ratio <= band_high), ratio, 0.0)
    else:
        ratio = _ratio(segment_mean(log_ratio, mask, cu_seqlens))
        mask = mask & expand((ratio >= band_low) & (ratio <= band_high), cu_seqlens, total)
        weights = torch.ones_like(log_ratio)
    return Correction(zero_outside(weights.float(), mask), mask)


@torch.no_grad()
def mismatch_moments(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Float64 `[6]` over trainable tokens: (count, Σ|o − b|, Σ(b − o), Σk3, Σρ, Σρ²). All-reduce with SUM."""
    log_ratio = zero_outside(old_logprobs.double() - rollout_logprobs.double(), loss_mask)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = zero_outside(bounded.exp(), loss_mask)
    k3 = torch.expm1(bounded) - bounded
    count = loss_mask.bool().sum().double()
    sums = [log_ratio.abs().sum(), -log_ratio.sum(), k3.sum(), ratio.sum(), ratio.square().sum()]
    return torch.stack([count, *sums])


def mismatch_from(moments: Tensor) -> dict[str, float]:
    """Metrics from the global moments; empty where there was no trainable token.

    ess: effective sample size of the token weights ρ as a share of the tokens, (Σρ)² / (n·Σρ²), 1 = no
    mismatch. kl, k3_kl: estimates of KL(rollout ‖ trainer) per token.
    """
    n, absolute, k1, k3, weight, weight_squares = moments.double().tolist()
    if n == 0:
        return {}
    return {
        "rollout_corr/ess": weight * weight / (n * weight_squares),
        "rollout_corr/logprob_abs_diff_mean": absolute / n,
        "rollout_corr/kl": k1 / n,
        "rollout_corr/k3_kl": k3 / n,
    }


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
