"""Advantage estimators and whitening. Nothing here is differentiated and nothing here communicates."""

import torch
from torch import Tensor

from megappo.algorithms.scan import discounted_sums
from megappo.algorithms.segments import (
    TrainableRuns,
    expand,
    trainable_counts,
    trainable_runs,
    widen,
    zero_outside,
)

GRPO_EPS = 1e-6
WHITEN_EPS = 1e-8


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    *,
    lam_returns: float | None = None,
    adaptive_alpha: float | None = None,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438) on each sequence's trainable tokens.

    Masked tokens (prompt, tool output) are no time steps: V_{t+1} is the value at the next *trainable* token,
    and `δ_t = r_t + γ·V_{t+1} − V_t`, `A_t = δ_t + γ·λ·A_{t+1}`.

    Args:
        rewards, values: `[total]`; entries outside the mask are never read.
        loss_mask: bool `[total]`. cu_seqlens: int64 `[n + 1]`.
        lam_returns: VAPO's decoupled λ (arXiv:2504.05118): returns use it, advantages keep theirs.
            Without it the returns are advantages + values.
        adaptive_alpha: VAPO's length-adaptive λ, `1 − 1/(α·trainable tokens)` per sequence, not below 0;
            replaces `lam`.
        bootstrap_values: `[n]`, value of the state after the last trainable token of a truncated sequence;
            0 for a terminated one.

    Returns:
        (advantages, returns), fp32 `[total]`, 0 outside the mask.
    """
    rewards, values, mask = rewards.float(), values.float(), loss_mask.bool()
    if values.numel() == 0:
        return torch.zeros_like(values), torch.zeros_like(values)
    runs = trainable_runs(mask, cu_seqlens)
    delta = _td_errors(rewards, values, mask, gamma, runs, bootstrap_values)
    if adaptive_alpha is not None:
        lam = adaptive_lambda(trainable_counts(mask, cu_seqlens), adaptive_alpha)
    advantages = _sums_of_trainable(delta, gamma * lam, mask, cu_seqlens, runs)
    baselined = advantages
    if lam_returns is not None:
        baselined = _sums_of_trainable(delta, gamma * lam_returns, mask, cu_seqlens, runs)
    return advantages, (baselined + values).masked_fill_(~mask, 0.0)


def _td_errors(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    runs: TrainableRuns,
    bootstrap_values: Tensor | None,
) -> Tensor:
    """`δ_t = r_t + γ·V_{next trainable} − V_t`, 0 outside the mask."""
    delta = rewards - values
    last = delta[runs.last]
    following = torch.zeros_like(last)
    if bootstrap_values is not None:
        following = bootstrap_values.to(values.dtype)[runs.sequence]
    following[:-1] = torch.where(runs.continues, values[runs.first[1:]], following[:-1])
    delta[:-1].add_(values[1:], alpha=gamma)
    delta[runs.last] = last + gamma * following
    return delta.masked_fill_(~mask, 0.0)


def _sums_of_trainable(
    x: Tensor, decay: float | Tensor, mask: Tensor, cu_seqlens: Tensor, runs: TrainableRuns
) -> Tensor:
    """`G_t = x_t + decay·G_{next trainable}`, 0 outside the mask; x is 0 there, decay a number or `[n]`."""
    if isinstance(decay, Tensor):
        decays = expand(decay.to(x.dtype), cu_seqlens, x.numel())
    else:
        decays = torch.full_like(x, decay)
    if bool(runs.continues.any()):  # else every masked token is before or behind all trainable ones
        decays.masked_fill_(~mask, 1.0)
    decays[cu_seqlens[1:] - 1] = 0.0  # the end of an empty sequence is the end of an earlier one: harmless
    return discounted_sums(x, decays).masked_fill_(~mask, 0.0)


def adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """VAPO's `λ = 1 − 1/(α·length)`, float64 `[n]`, clamped to [0, 1]. Raises ValueError unless alpha > 0."""
    if alpha <= 0:
        raise ValueError(f"adaptive_lam_alpha is {alpha}: it must be positive")
    return 1.0 - 1.0 / (alpha * lengths.double()).clamp(min=1.0)


@torch.no_grad()
def rewards_to_go(rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """`G_t = r_t + γ·G_{t+1}` over trainable tokens (REINFORCE++, arXiv:2501.03262).

    Returns fp32 `[total]`, 0 outside the mask.
    """
    mask = loss_mask.bool()
    if mask.numel() == 0:
        return torch.zeros_like(mask, dtype=torch.float32)
    runs = trainable_runs(mask, cu_seqlens)
    return _sums_of_trainable(zero_outside(rewards.float(), mask), float(gamma), mask, cu_seqlens, runs)


GROUP_KINDS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "remax")


@torch.no_grad()
def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    kind: str,
    *,
    norm_by_std: bool = True,
    baseline_scores: Tensor | None = None,
) -> Tensor:
    """One advantage per sequence from the scores of its group (the samples of one prompt).

    - `grpo` (arXiv:2402.03300): `(s − mean) / (std + 1e-6)`, unbiased std; without `norm_by_std`, `s − mean`
      (Dr. GRPO, arXiv:2503.20783).
    - `rloo` (arXiv:2402.14740): s − mean of the *other* scores of the group.
    - `reinforce_plus_plus_baseline`: s − mean; whiten over the global batch afterwards.
    - `remax` (arXiv:2310.10505): s − `baseline_scores`, the score of the greedy answer to the same prompt.

    A group of one has nothing to be compared with: advantage 0 (verl keeps the raw score there). Groups need
    not be contiguous. Scores must cover whole groups, so give the global ones.

    Args: scores `[n]`, group_ids int `[n]`, baseline_scores `[n]` (remax). Returns fp32 `[n]`.
    Raises ValueError for an unknown kind, or remax without baseline scores.
    """
    if kind not in GROUP_KINDS:
        raise ValueError(f"unknown group advantage {kind!r}: use one of {', '.join(GROUP_KINDS)}")
    scores = scores.double()
    if kind == "remax":
        if baseline_scores is None:
            raise ValueError("remax needs baseline_scores, the score of each prompt's greedy answer")
        return (scores - baseline_scores.double()).float()
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros_like(size, dtype=torch.float64).index_add_(0, group, x)

    centred = scores - (group_sum(scores) / size)[group]
    if kind == "rloo":
        centred = centred * (size / (size - 1).clamp(min=1))[group]
    elif kind == "grpo" and norm_by_std:
        variance = group_sum(centred.square()) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + GRPO_EPS)[group]
    return centred.float()


def broadcast_to_tokens(per_sequence: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`[n]` → `[total]`: the sequence's entry on its trainable tokens, 0 elsewhere."""
    return zero_outside(expand(per_sequence, cu_seqlens, loss_mask.numel()), loss_mask)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Float64 `[3]`: (count, Σx, Σx²) inside the mask. All-reduce with SUM before use."""
    inside = zero_outside(values, mask).double()
    return torch.stack([mask.bool().sum().double(), inside.sum(), inside.square().sum()])


def whiten(values: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool = True) -> Tensor:
    """`(x − μ) / √(σ² + 1e-8)`, plus μ again without `shift_mean`; 0 outside the mask.

    `moments` are the global ones. Unbiased σ², taken as 0 for a single element, which therefore becomes 0 (or
    stays itself without the shift). The subtraction is in float64: in fp32 a large mean would swamp a small
    spread.

    Returns: fp32 `[total]` (float64 for float64 input).
    """
    n, total, squares = moments.double().unbind()
    mean = total / n.clamp(min=1)
    variance = ((squares - mean * total) / (n - 1).clamp(min=1)).clamp(min=0)
    white = (values.double() - mean) * torch.rsqrt(variance + WHITEN_EPS)
    if not shift_mean:
        white = white + mean
    return zero_outside(white, mask).to(widen(values).dtype)
