"""Discounted sums `G_t = x_t + c_t·G_{t+1}` over a flat column in O(log T) blocks of serial steps, not T.

The column is cut into blocks of K entries, laid out as the columns of a `[K, blocks]` matrix: one step of
the recurrence is then one vector operation over every block. Two walks of K steps solve it. The first gives
each block's own sum and the product of its decays; these obey the same recurrence, K times shorter, and are
solved by the same code. The second starts each block from its successor's sum. Work and memory are linear
in T.

A decay per entry makes the jagged case free: 0 on the last token of a sequence keeps the next one out, 1 on
a masked token hands the sum through. A product with the triangular matrix of powers of c is no faster, has
one matrix for one constant c (length-adaptive λ has one c a sequence), knows no masks, and silently loses
digits where TF32 or bf16 matrix products are allowed.
"""

import torch
from torch import Tensor

BLOCK = 32


def discounted_sums(x: Tensor, decay: Tensor) -> Tensor:
    """`G_t = x_t + decay_t·G_{t+1}` for finite `x` and `decay`, both `[total]`; G is 0 behind the end."""
    total = x.numel()
    covered = total - total % BLOCK
    result = torch.empty_like(x)
    result[covered:] = x[covered:]
    for t in range(total - 2, covered - 1, -1):
        result[t].addcmul_(decay[t], result[t + 1])
    if covered == 0:
        return result

    sums, decays = _columns(x[:covered]), _columns(decay[:covered])
    behind = result[covered : covered + 1] if covered < total else x.new_zeros(1)
    if covered > BLOCK:
        head, product = sums[-1].clone(), decays[-1].clone()
        for k in range(BLOCK - 2, -1, -1):
            head.mul_(decays[k]).add_(sums[k])
            product.mul_(decays[k])
        behind = discounted_sums(torch.cat([head, behind]), torch.cat([product, behind]))[1:]
    sums[-1].addcmul_(decays[-1], behind)
    for k in range(BLOCK - 2, -1, -1):
        sums[k].addcmul_(decays[k], sums[k + 1])
    result[:covered].view(-1, BLOCK).copy_(sums.t())
    return result


def _columns(column: Tensor) -> Tensor:
    """`[blocks·K]` → contiguous copy `[K, blocks]`."""
    return column.view(-1, BLOCK).t().clone(memory_format=torch.contiguous_format)
