"""The kernels of `vocab_triton`; importing this module needs triton. Each softmax row is one program's work."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_stats_kernel(z_ptr, target_ptr, out_ptr, rows, columns, z_stride, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Online softmax (Milakov & Gimelshein 2018), with the sum for the entropy carried along."""
    row = tl.program_id(0).to(tl.int64)  # rows * columns may exceed 32 bits
    z_row = z_ptr + row * z_stride
    m = -float("inf")
    s = 0.0
    u = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(z_row + column, mask=inside, other=-float("inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(z, 0))
        base = tl.where(new == -float("inf"), 0.0, new)  # nothing but -inf so far
        shift = tl.where(m == -float("inf"), 0.0, m - base)
        scale = tl.where(m == -float("inf"), 0.0, tl.exp(shift))
        centred = tl.where(inside, z - base, 0.0)
        e = tl.where(inside, tl.exp(centred), 0.0)
        if ENTROPY:
            u = scale * (u + shift * s) + tl.sum(e * centred, 0)
        s = scale * s + tl.sum(e, 0)
        m = new
    target = tl.load(target_ptr + row)
    at_target = tl.load(z_row + target, mask=target >= 0, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, m)
    tl.store(out_ptr + rows + row, s)
    tl.store(out_ptr + 2 * rows + row, at_target)
    tl.store(out_ptr + 3 * rows + row, u)


@triton.jit
def logit_gradient_kernel(
    z_ptr,
    out_ptr,
    target_ptr,
    log_normaliser_ptr,
    entropy_ptr,
    g_ptr,
    g_h_ptr,
    columns,
    z_stride,
    out_stride,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(z_ptr + row * z_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row)
    log_p = z - tl.load(log_normaliser_ptr + row)
    p = tl.exp(log_p)
    gradient = tl.where(column == tl.load(target_ptr + row), g, 0.0) - g * p
    idle = g == 0.0
    if ENTROPY:
        g_h = tl.load(g_h_ptr + row)
        gradient -= g_h * p * (log_p + tl.load(entropy_ptr + row))
        idle = idle & (g_h == 0.0)
    gradient = tl.where(idle, 0.0, gradient)
    tl.store(out_ptr + row * out_stride + column, gradient.to(out_ptr.dtype.element_ty), mask=inside)
