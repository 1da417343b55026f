"""Per-sequence sums and masks over jagged columns; the one place that reads `cu_seqlens`.

A batch of n sequences is stored back to back: sequence i owns `column[cu_seqlens[i]:cu_seqlens[i + 1]]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def widen(column: Tensor) -> Tensor:
    """At least fp32: half precision is too coarse for ratios, sums and losses; float64 stays float64."""
    return column if column.dtype == torch.float64 else column.float()


def zero_outside(column: Tensor, loss_mask: Tensor | None) -> Tensor:
    """`column` with 0 outside the mask. `where`, not a product: NaN leaks into neither value nor gradient."""
    if loss_mask is None:
        return column
    return torch.where(loss_mask.bool(), column, 0.0)


def expand(per_sequence: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """`[n]` → `[total]`: every token gets its sequence's entry."""
    return torch.repeat_interleave(per_sequence, cu_seqlens.diff(), output_size=total)


def segment_sum(column: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Float64 sum of each sequence, `[total]` → `[n]`; an empty sequence gives 0. Deterministic."""
    if column.numel() == 0:
        return column.new_zeros(cu_seqlens.numel() - 1, dtype=torch.float64)
    return torch.segment_reduce(column.double(), "sum", offsets=cu_seqlens, initial=0.0, unsafe=True)


def segment_mean(column: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Float64 mean of each sequence over its trainable tokens, `[total]` → `[n]`; 0 where there are none."""
    sums = segment_sum(zero_outside(column, loss_mask), cu_seqlens)
    return sums / trainable_counts(loss_mask, cu_seqlens).clamp(min=1)


def trainable_counts(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of trainable tokens of each sequence, int64 `[n]`."""
    return _running_count(loss_mask, cu_seqlens)[1].diff().long()


@dataclass(frozen=True)
class TrainableSpans:
    """Counts and ends of each sequence's trainable tokens. `last` means nothing where `count` is 0."""

    last: Tensor  # int64[n], flat index of the last trainable token
    count: Tensor  # int64[n]
    rank: Tensor  # int32[total], trainable tokens up to and including this one, over the whole batch
    end_rank: Tensor  # int32[n], the same at the end of the sequence


def trainable_spans(loss_mask: Tensor, cu_seqlens: Tensor) -> TrainableSpans:
    """Last trainable token of each sequence, how many there are, and the rank of each."""
    rank, at_boundary = _running_count(loss_mask, cu_seqlens)
    end_rank = at_boundary[1:].contiguous()
    return TrainableSpans(torch.searchsorted(rank, end_rank), at_boundary.diff().long(), rank, end_rank)


@dataclass(frozen=True)
class TrainableRuns:
    """The unbroken runs of trainable tokens, in order. A run never crosses a sequence boundary."""

    first: Tensor  # int64[runs], flat index of the run's first token
    last: Tensor  # int64[runs]
    sequence: Tensor  # int64[runs]
    continues: Tensor  # bool[runs - 1]: the next run is of the same sequence, so there is a hole between them


def trainable_runs(mask: Tensor, cu_seqlens: Tensor) -> TrainableRuns:
    """Find the runs of a bool mask."""
    total = mask.numel()
    before = torch.zeros(total + 3, dtype=torch.bool, device=mask.device)  # before[t] = mask[t - 1]
    before[1 : total + 1] = mask
    after = before[2:].clone()  # after[t] = mask[t + 1], with a spare entry that index −1 may hit
    before[cu_seqlens] = False
    after[cu_seqlens[1:] - 1] = False
    first = (mask & ~before[:total]).nonzero().squeeze(1)
    last = (mask & ~after[:total]).nonzero().squeeze(1)
    sequence = torch.searchsorted(cu_seqlens, first, right=True) - 1
    return TrainableRuns(first, last, sequence, sequence[1:] == sequence[:-1])


def _running_count(loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Inclusive running count of trainable tokens (int32 `[total]`), and its value before each boundary."""
    rank = loss_mask.bool().cumsum(0, dtype=torch.int32)
    if rank.numel() == 0:
        return rank, torch.zeros_like(cu_seqlens, dtype=torch.int32)
    at_boundary = rank[(cu_seqlens - 1).clamp(min=0)]
    return rank, torch.where(cu_seqlens > 0, at_boundary, 0)
