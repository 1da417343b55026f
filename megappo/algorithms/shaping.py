"""From one score a sequence to rewards per token."""

import math

import torch
from torch import Tensor

from megappo.algorithms.segments import expand, trainable_spans, zero_outside

CREDITS = ("last", "uniform", "exponential")


def token_rewards(
    scores: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, credit: str = "last", decay: float = 0.95
) -> Tensor:
    """Spread each score over its sequence's trainable tokens, `[n]` → fp32 `[total]`; their sum is the score.

    `last`: all on the last trainable token. `uniform`: equal shares. `exponential`: shares ∝ decay^(trainable
    tokens that follow). A sequence without trainable tokens gets nothing.

    Raises ValueError for an unknown credit, or a decay outside (0, 1].
    """
    if credit not in CREDITS:
        raise ValueError(f"unknown reward_shaping.credit {credit!r}: use one of {', '.join(CREDITS)}")
    if credit == "exponential" and not 0 < decay <= 1:
        raise ValueError(f"reward_shaping.decay is {decay}: it must be in (0, 1]")
    spans, total = trainable_spans(loss_mask, cu_seqlens), loss_mask.numel()
    if credit == "last":
        owned = spans.count > 0
        rewards = torch.zeros(total, dtype=torch.float32, device=loss_mask.device)
        rewards[spans.last[owned]] = scores[owned].float()
        return rewards
    scores, count = scores.double(), spans.count.clamp(min=1)
    if credit == "uniform" or decay == 1:
        return zero_outside(expand(scores / count, cu_seqlens, total), loss_mask).float()
    shares = -torch.expm1(count * math.log(decay)) / (1 - decay)  # Σ decay^k = (1 − decay^n) / (1 − decay)
    following = expand(spans.end_rank, cu_seqlens, total) - spans.rank
    return zero_outside(expand(scores / shares, cu_seqlens, total) * decay ** following.double(), loss_mask).float()


def overlong_penalty(response_lengths: Tensor, max_length: int, buffer_length: int, factor: float = 1.0) -> Tensor:
    """DAPO's soft length penalty (arXiv:2503.14476): 0 up to max − buffer, then linear to −factor at max and
    beyond at the same slope.

    Args: response_lengths `[n]` in tokens. Returns fp32 `[n]`, ≤ 0.
    Raises ValueError unless 0 < buffer_length ≤ max_length.
    """
    if not 0 < buffer_length <= max_length:
        raise ValueError(f"overlong.buffer_len is {buffer_length}: it must be in (0, max length {max_length}]")
    excess = response_lengths.double() - (max_length - buffer_length)
    return (-excess / buffer_length * factor).clamp(max=0.0).float()


def clip_scores(scores: Tensor, low: float, high: float) -> Tensor:
    """Scores within [low, high]. Raises ValueError if the interval is empty."""
    if low > high:
        raise ValueError(f"reward_shaping.clip is [{low}, {high}]: the lower end is above the upper one")
    return scores.clamp(low, high)


def apply_kl_penalty(token_rewards: Tensor, kl: Tensor, coef: float, loss_mask: Tensor) -> Tensor:
    """`r_t − β·KL_t` on trainable tokens, 0 elsewhere; `[total]`."""
    return zero_outside(token_rewards - coef * kl, loss_mask)
