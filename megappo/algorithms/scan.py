"""Jagged discounted sums `G_t = x_t + c·G_{t+1}` in O(log T) blocks of serial steps instead of O(T).

Each sequence's trainable tokens are cut into blocks of K, and the blocks of all sequences are laid out as
columns of one `[K, blocks]` matrix, so a step of the recurrence is one vector operation over every block of
the batch. Two walks of K steps solve it: the first gives each block's own sum, those sums obey the same
recurrence with decay c^K over blocks (solved by the same code, K times shorter), and the second starts each
block from its successor's sum. Serial steps: 2·K·log_K(longest). Work and memory: linear in trainable tokens;
a sequence wastes at most K − 1 slots.

A product with the triangular matrix of powers of c would be as fast, but it needs one matrix per decay
(length adaptive λ has one a sequence) and silently loses digits where TF32 or bf16 matrix products are
allowed.
"""

from functools import cached_property

import torch
from torch import Tensor

from megappo.algorithms.segments import TrainableSpans, trainable_spans

BLOCK = 32


class Blocks:
    """Columns-of-K layout of jagged runs: run i is `length[i]` entries from `start[i]` on.

    `order`, where given, maps a position in the compacted trainable tokens to its flat index.
    """

    def __init__(self, start: Tensor, length: Tensor, order: Tensor | None = None):
        device = length.device
        self.length = length
        longest = int(length.max()) if length.numel() else 0
        self.size = max(1, min(BLOCK, longest))
        self.per_run = (length + self.size - 1) // self.size
        self.first = self.per_run.cumsum(0) - self.per_run
        self.longest = -(-longest // self.size)
        self.number = int(self.per_run.sum())
        runs = torch.arange(length.numel(), device=device)
        self.run = torch.repeat_interleave(runs, self.per_run, output_size=self.number)
        steps = torch.arange(self.size, device=device).unsqueeze(1)
        offset = (torch.arange(self.number, device=device) - self.first[self.run]) * self.size
        position = (start[self.run] + offset) + steps  # [K, blocks]

        # Only the last block of a run can be partly filled. Its spare slots repeat the run's last entry.
        filled = length > 0
        self.filled_runs = filled.nonzero().squeeze(1)
        self.tail = (self.first + self.per_run - 1)[filled]
        self.tail_last = (length - (self.per_run - 1) * self.size)[filled] - 1
        self.inside = steps <= self.tail_last
        self.at_last = steps == self.tail_last
        position[:, self.tail] = torch.minimum(position[:, self.tail], (start + length)[filled] - 1)
        position = position.view(-1)
        self.position = position if order is None else order[position]

    @classmethod
    def of_trainable(cls, loss_mask: Tensor, cu_seqlens: Tensor) -> "Blocks":
        """Layout of the trainable tokens of each sequence; masked tokens between them are skipped."""
        spans: TrainableSpans = trainable_spans(loss_mask, cu_seqlens)
        holes = (spans.last - spans.first + 1 != spans.count) & (spans.count > 0)
        if not bool(holes.any()):
            return cls(spans.first, spans.count)
        return cls(spans.before.long(), spans.count, order=loss_mask.bool().nonzero().squeeze(1))

    def gather(self, column: Tensor) -> Tensor:
        """`[total]` → `[K, blocks]`; spare slots repeat the run's last entry."""
        return column.index_select(0, self.position).view(self.size, self.number)

    def scatter(self, blocks: Tensor, total: int) -> Tensor:
        """`[K, blocks]` → `[total]`, 0 wherever no run reaches. Overwrites the spare slots of `blocks`."""
        tail = blocks[:, self.tail]
        last = tail.gather(0, self.tail_last.unsqueeze(0))
        # Spare slots are written to the place of the last entry: make them equal to it.
        blocks[:, self.tail] = torch.where(self.inside, tail, last)
        return blocks.new_zeros(total).index_copy_(0, self.position, blocks.view(-1))

    def clear_spare(self, blocks: Tensor) -> Tensor:
        """Zero the spare slots in place."""
        blocks[:, self.tail] = torch.where(self.inside, blocks[:, self.tail], 0.0)
        return blocks

    def scan_(self, blocks: Tensor, decay: Tensor) -> Tensor:
        """In place `G_t = x_t + decay·G_{t+1}` along each run; spare slots are 0, decay is float64 `[runs]`."""
        factor = decay.to(blocks.dtype)[self.run]
        rows = blocks.unbind(0)
        if self.longest > 1:
            head = rows[-1].clone()
            for row in reversed(rows[:-1]):
                head.mul_(factor).add_(row)
            sums = self._outer.scan(head, decay**self.size)
            incoming = torch.zeros_like(sums)
            incoming[:-1] = sums[1:]
            incoming[self.tail] = 0.0
            rows[-1].addcmul_(incoming, factor)
        for k in range(self.size - 2, -1, -1):
            rows[k].addcmul_(rows[k + 1], factor)
        return blocks

    def scan(self, column: Tensor, decay: Tensor) -> Tensor:
        """The same on a flat column, `[total]` → `[total]`."""
        blocks = self.clear_spare(self.gather(column))
        return self.scatter(self.scan_(blocks, decay), column.numel())

    @cached_property
    def _outer(self) -> "Blocks":
        """The blocks of a run, as a run themselves."""
        return Blocks(self.first, self.per_run)
