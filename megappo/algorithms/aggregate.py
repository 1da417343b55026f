"""Linear loss aggregation, `Σ_t w_t·L_t`, w from global counts: any split of a batch sums to one loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.segments import expand, trainable_counts, widen

AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class BatchCounts:
    """Denominators of a mini-batch: sum them over data-parallel ranks before use."""

    tokens: int  # trainable tokens
    sequences: int  # sequences with at least one trainable token

    def __add__(self, other: "BatchCounts") -> "BatchCounts":
        return BatchCounts(self.tokens + other.tokens, self.sequences + other.sequences)


def count(loss_mask: Tensor, cu_seqlens: Tensor) -> BatchCounts:
    """Counts of this batch. A sequence without trainable tokens is in no denominator."""
    counts = trainable_counts(loss_mask, cu_seqlens)
    return BatchCounts(int(counts.sum()), int((counts > 0).sum()))


def token_weights(
    loss_mask: Tensor, cu_seqlens: Tensor, mode: str, counts: BatchCounts, norm_length: int | None = None
) -> Tensor:
    """Weight of each token's loss, fp32 `[total]`: 0 outside the mask, and everywhere if the counts are 0.

    With N = counts.tokens, B = counts.sequences and |i| the trainable tokens of the token's sequence:
    token-mean 1/N; seq-mean-token-sum 1/B; seq-mean-token-mean 1/(B·|i|); seq-mean-token-sum-norm
    1/(B·norm_length).

    Raises ValueError for an unknown mode, or a missing or non-positive norm_length.
    """
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}: use one of {', '.join(AGGREGATION_MODES)}")
    if mode == "seq-mean-token-sum-norm" and (norm_length is None or norm_length <= 0):
        raise ValueError(f"loss_agg_norm_length is {norm_length}: {mode} needs a positive constant")
    mask = loss_mask.bool()
    denominator = counts.tokens if mode == "token-mean" else counts.sequences
    if denominator == 0:
        return torch.zeros_like(mask, dtype=torch.float32)
    if mode == "seq-mean-token-mean":
        lengths = trainable_counts(mask, cu_seqlens).clamp(min=1).double()
        per_token = expand((1.0 / (denominator * lengths)).float(), cu_seqlens, mask.numel())
        return torch.where(mask, per_token, 0.0)
    if mode == "seq-mean-token-sum-norm":
        denominator *= norm_length
    return mask.float() / denominator


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """`Σ w·x` as a scalar. Where w is 0, NaN and inf in `values` reach neither the sum nor their gradient."""
    return (torch.where(weights != 0, widen(values), 0.0) * weights).sum()
