"""Per-token policy losses. Aggregate with `aggregate.weighted_sum`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.segments import expand, segment_mean, widen, zero_outside

POLICY_LOSSES = ("ppo", "gspo", "cispo", "reinforce")
MAX_LOG_RATIO = 20.0
MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True)
class PolicyLossConfig:
    """Which loss, and how far the ratio may move: [1 − clip_ratio_low, 1 + clip_ratio_high].

    clip_ratio_c is the dual clip of `ppo` (arXiv:1912.09729), > 1, None = off; the other kinds ignore it.
    Raises ValueError for an unknown kind, a negative range, or c ≤ 1.
    """

    kind: str = "ppo"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0

    def __post_init__(self) -> None:
        if self.kind not in POLICY_LOSSES:
            raise ValueError(f"unknown policy_loss {self.kind!r}: use one of {', '.join(POLICY_LOSSES)}")
        if self.clip_ratio_low < 0 or self.clip_ratio_high < 0:
            raise ValueError(f"clip ratios {self.clip_ratio_low}, {self.clip_ratio_high} must not be negative")
        if self.clip_ratio_c is not None and not self.clip_ratio_c > 1:
            raise ValueError(f"clip_ratio_c is {self.clip_ratio_c}: it must be above 1 (null switches it off)")


@dataclass(frozen=True)
class PolicyLoss:
    """All `[total]`, everything but `loss` detached. Averaging over the mask is the caller's."""

    loss: Tensor
    ratio: Tensor  # π/π_old (of the sequence, for gspo)
    clipped: Tensor  # bool: the clip decided this token's loss
    clipped_dual: Tensor  # bool: the dual clip did
    approx_kl: Tensor  # k1 estimate of KL(π_old ‖ π): o − l


def is_token_local(cfg: PolicyLossConfig) -> bool:
    """Whether a token's loss depends on that token alone, so that it may be computed chunk by chunk."""
    return cfg.kind != "gspo"


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cfg: PolicyLossConfig,
    *,
    loss_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> PolicyLoss:
    """Loss of each token; with l, o the new and old log-probs, `r = exp(clip(l − o, ±20))` in fp32.

    - ppo (arXiv:1707.06347): `max(−A·r, −A·clip(r))`; where A < 0 no more than `−c·A` (dual clip).
    - gspo (arXiv:2507.18071): the same without the dual clip, r the sequence's geometric mean ratio with a
      gradient through each token. Meant for seq-mean-token-mean. Needs loss_mask, cu_seqlens, whole
      sequences.
    - cispo (arXiv:2506.13585): `−sg(clip(r))·A·l`: clipped tokens keep a gradient.
    - reinforce: `−A·l`.

    Give `loss_mask` whenever entries outside it may not be finite: then they reach no value and no gradient.
    Raises ValueError for gspo without loss_mask and cu_seqlens.
    """
    logprobs = zero_outside(widen(logprobs), loss_mask)
    old_logprobs = zero_outside(widen(old_logprobs), loss_mask).detach()
    advantages = zero_outside(widen(advantages), loss_mask).detach()
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if cfg.kind == "gspo":
        if loss_mask is None or cu_seqlens is None:
            raise ValueError("gspo needs loss_mask and cu_seqlens: its ratio belongs to a whole sequence")
        ratio = _sequence_ratio(logprobs, old_logprobs, loss_mask, cu_seqlens)
    else:
        ratio = log_ratio.exp()
    inside = ratio.clamp(1 - cfg.clip_ratio_low, 1 + cfg.clip_ratio_high)
    clipped_dual = torch.zeros_like(ratio, dtype=torch.bool)
    if cfg.kind == "reinforce":
        loss = -advantages * logprobs
        clipped = clipped_dual
    elif cfg.kind == "cispo":
        loss = -inside.detach() * advantages * logprobs
        clipped = inside != ratio
    else:
        free, bounded = -advantages * ratio, -advantages * inside
        loss = torch.maximum(free, bounded)
        clipped = bounded > free
        if cfg.kind == "ppo" and cfg.clip_ratio_c is not None:
            ceiling = -advantages * cfg.clip_ratio_c
            clipped_dual = (advantages < 0) & (loss > ceiling)
            loss = torch.where(clipped_dual, ceiling, loss)
    return PolicyLoss(loss, ratio.detach(), clipped, clipped_dual, -log_ratio.detach())


def _sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """GSPO's `s_i = exp(mean_t(l − o))` on each token, with the gradient of the token's own log-prob."""
    mean = segment_mean((logprobs - old_logprobs).detach(), loss_mask, cu_seqlens)
    mean = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_SEQUENCE_RATIO).to(logprobs.dtype)
    return (logprobs - logprobs.detach() + expand(mean, cu_seqlens, logprobs.numel())).exp()
