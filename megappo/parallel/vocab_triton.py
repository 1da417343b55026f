"""Triton kernels for the chunk arithmetic of `vocab`: one pass over the logits for everything the softmax needs, one
for the gradient. The matrix products stay with cuBLAS.

Notation as in `vocab`. On one rank's columns, with its own maximum m, `row_stats` gives

    m,  S = sum exp(z - m),  z of the target,  U = sum exp(z - m) (z - m)

and `rebase` moves S and U to the maximum of all ranks, after which they can be added up.

Triton is no dependency: CUDA builds of torch bring it. `usable` says whether the kernels can run; under
TRITON_INTERPRET=1 they also take CPU tensors (slowly), which is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

STATS_BLOCK, GRADIENT_BLOCK = 4096, 2048  # columns a program has in registers at a time


@functools.cache
def _kernels() -> ModuleType | None:
    """The module of kernels, or None where triton is not installed."""
    try:
        from megappo.parallel import vocab_kernels
    except ImportError:
        return None
    return vocab_kernels


def usable(device: torch.device) -> bool:
    """Can the kernels run on tensors of this device? The first answer for a GPU launches one."""
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and _kernels() is not None
    return device.type == "cuda" and _kernels() is not None and _works(device.index or 0)


@functools.cache
def _works(index: int) -> bool:
    """Triton compiles a launcher with the machine's C compiler, which may be missing: try, and say so once."""
    z = torch.zeros(1, 2, device=torch.device("cuda", index))
    try:
        stats = row_stats(z, torch.zeros(1, dtype=torch.int64, device=z.device), want_entropy=True)
        return stats[1].item() == 2.0
    except Exception as err:  # whatever the compiler or driver raises
        reason = " ".join(str(err).split())[:200]
        warnings.warn(f"Triton cannot run here, the torch version is used ({reason})", stacklevel=2)
        return False


def row_stats(z: Tensor, target: Tensor, *, want_entropy: bool) -> Tensor:
    """m, S, z of the target (0 if `target` is -1) and U (0 unless `want_entropy`) of logits `z[c, V]`: fp32 `[4, c]`.

    `z` is bf16 or fp32 with contiguous rows; `target[c]` int64, the column, or -1 for a target on another rank.
    """
    rows, columns = z.shape
    out = torch.zeros(4, rows, dtype=torch.float32, device=z.device)
    if not columns:  # a rank that holds nothing but padding
        out[0] = -torch.inf
    elif rows:
        with torch.cuda.device_of(z):
            _kernels().row_stats_kernel[(rows,)](
                z,
                target,
                out,
                rows,
                columns,
                z.stride(0),
                ENTROPY=want_entropy,
                BLOCK=_block(columns, STATS_BLOCK),
                num_warps=8,
            )
    return out


def rebase(stats: Tensor, m: Tensor) -> Tensor:
    """S, z of the target and U of `row_stats`, `[3, c]`, with S and U relative to another maximum `m[c]`."""
    shift = stats[0] - m
    scale = shift.exp()
    s = stats[1] * scale
    # A rank whose columns are far below the maximum contributes 0, and not 0 · inf.
    u = torch.where(scale == 0, 0.0, stats[3] * scale + s * shift)
    return torch.stack([s, stats[2], u])


def logit_gradient_(
    z: Tensor,
    target: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor | None,
    g: Tensor,
    g_h: Tensor | None,
    out: Tensor,
) -> Tensor:
    """`out[c, V] = g (1[target] - p) - g_h p (log p + H)` with `p = exp(z - log_normaliser)`; returns `out`.

    `out` may be `z` itself, or a buffer of its shape in another precision. A row whose `g` (and `g_h`) is 0 becomes
    0, whatever is in it. With `g_h` comes `entropy` H. `target` as in `row_stats`; the others are fp32 `[c]`.
    """
    rows, columns = z.shape
    block = _block(columns, GRADIENT_BLOCK)
    with_entropy = g_h is not None
    log_normaliser, g = log_normaliser.contiguous(), g.contiguous()
    if rows and columns:
        with torch.cuda.device_of(z):
            _kernels().logit_gradient_kernel[(rows, -(-columns // block))](
                z,
                out,
                target,
                log_normaliser,
                entropy.contiguous() if with_entropy else g,
                g,
                g_h.contiguous() if with_entropy else g,
                columns,
                z.stride(0),
                out.stride(0),
                ENTROPY=with_entropy,
                BLOCK=block,
            )
    return out


def _block(columns: int, most: int) -> int:
    return min(most, 1 << max(columns - 1, 0).bit_length())
