"""Small collectives over metadata."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank. For small metadata only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def from_first_rank(value: Any) -> Any:
    """Rank 0's `value` on every rank. For small metadata only. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_rank(flag: bool) -> bool:
    """True everywhere if it is true anywhere. Collective."""
    tensor = torch.tensor(int(flag))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor)


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def sum_of_parts(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum over `group` of tensors whose every rank then computes the same loss. Collective.

    Backward hands the gradient to each part as it is, without communication: the loss counts once, not once a rank.
    """
    return _SumOfParts.apply(part, group)
