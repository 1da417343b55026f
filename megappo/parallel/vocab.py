"""Log-probabilities, entropy and token losses of a vocabulary-parallel output layer, chunk by chunk.

Nothing of size tokens x vocabulary is ever kept: a chunk of tokens is taken from hidden states to logits, to
log-probs and, where the loss is local to a token, on to its gradients while the logits are still there.

Notation: z logits / temperature of the whole vocabulary, m = max z, E = exp(z - m), S = sum E, p = E / S:

    log p(t) = z_t - m - log S          d log p(t) / dz = 1[t] - p
    H = log S - sum E (z - m) / S       dH / dz = -p (log p + H)

Softmax maths is in fp32 (fp64 for fp64 input). A rank of the tensor-parallel `group` holds a contiguous run
of vocabulary rows; per chunk one MAX all-reduce gives m and one SUM all-reduce the rest. Vocabulary padding
is cut off before the product: it costs nothing, takes no probability and gets zero gradient.

The elementwise work is done by torch, or by the kernels of `vocab_triton` where they can run (GPUs, fp32 softmax).
Ranks of a group need not agree on that: the collectives are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megappo.parallel import vocab_triton

CHUNK_BYTES = {"cpu": 40 << 20, "cuda": 512 << 20}  # logits of a chunk: large enough for the matrix products
BLOCK_BYTES = 2 << 20  # elementwise work goes over rows that stay in a core's cache
MIN_CHUNK, UPCAST_ROWS = 64, 4096
USE_TRITON = True  # where it can run; tests and benchmarks switch it off to compare

TokenLoss = Callable[[Tensor, Tensor | None, int, int], Tensor]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    want_entropy: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p(targets[i] | hidden[i]) and, if wanted, the entropy of that distribution.

    `hidden[T, H]`, equal on all ranks of `group`; `weight[V_local, H]` this rank's vocabulary rows (rank r
    holds r*V_local onwards); `targets[T]` global token ids; `vocab_size` the vocabulary without padding;
    `chunk_size` in tokens, None for as many as make 40 MB of fp32 logits (512 MB on a GPU).
    Returns fp32 `[T]` and fp32 `[T]` or None. Differentiable in hidden and weight; the backward recomputes
    the logits of each chunk. d hidden is this rank's part: the caller sums it over `group`. d weight is
    accumulated in fp32. Raises ValueError on shapes, ids or sizes that do not fit together.
    """
    head = _Head(hidden, weight, targets, vocab_size, temperature, group, want_entropy, chunk_size)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, head)
    return logprobs, entropy


def fused_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: TokenLoss,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    want_entropy: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A loss that is a sum over tokens of a function of their own log-prob and entropy, in one pass.

    Arguments as in `token_logprobs`. `token_loss(logprobs[c], entropy[c] or None, start, stop)` returns the
    weighted sum over tokens start..stop-1 and is differentiated in its two tensors only. Gradients are
    computed in the forward pass (three matrix products, none repeated); the backward scales them by the
    incoming scalar and frees them, so it can run once. A row whose gradient is zero contributes nothing, NaN
    or not, and a chunk of such rows costs one product instead of three.

    Returns (loss scalar, logprobs fp32 `[T]`, entropy fp32 `[T]` or None), the last two detached. Without
    gradients to compute only the forward part runs.
    """
    head = _Head(hidden, weight, targets, vocab_size, temperature, group, want_entropy, chunk_size)
    return _FusedTokenLoss.apply(hidden, weight, head, token_loss, torch.is_grad_enabled())


class _Stats(NamedTuple):
    """Of a chunk, each [c], equal on all ranks: log-probs, max logit, log S, entropy if wanted."""

    logprobs: Tensor
    max: Tensor
    log_s: Tensor
    entropy: Tensor | None


class _Head:
    """Geometry, buffers and arithmetic of one call."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        want_entropy: bool,
        chunk_size: int | None,
    ) -> None:
        rows, ranks = weight.shape[0], 1 if group is None else group.size()
        _check(hidden, weight, targets, vocab_size, temperature, rows * ranks)
        self.group = group if ranks > 1 else None
        self.start = 0 if group is None else group.rank() * rows
        self.columns = min(max(vocab_size - self.start, 0), rows)
        self.targets, self.want_entropy = targets, want_entropy
        self.inverse_temperature = 1.0 / temperature
        self.tokens, self.device = len(targets), hidden.device
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.product_dtype = hidden.dtype if _tensor_cores(hidden, self.dtype) else self.dtype
        self.kernels = USE_TRITON and self.dtype == torch.float32 and vocab_triton.usable(self.device)
        width = torch.finfo(self.dtype).bits // 8 * max(rows, 1)  # of all rows: equal chunks on all ranks
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        if chunk_size is None:
            chunk_size = max(CHUNK_BYTES.get(self.device.type, CHUNK_BYTES["cuda"]) // width, MIN_CHUNK)
        self.chunk = min(chunk_size, max(self.tokens, 1))
        self.block = max(BLOCK_BYTES // width, 1) if self.device.type == "cpu" else self.chunk
        self.buffer = self.scratch = torch.empty(0)

    def allocate(self) -> None:
        self.buffer = self.empty(self.chunk, self.columns)
        if self.want_entropy and not self.kernels:
            self.scratch = self.empty(min(self.block, self.chunk), self.columns)

    def free(self) -> None:
        self.buffer = self.scratch = torch.empty(0)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.tokens, self.chunk):
            yield slice(start, min(start + self.chunk, self.tokens))

    def blocks(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.block):
            yield slice(start, min(start + self.block, count))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """z[c, columns] of hidden[c, H], in the buffer."""
        z, alpha = self.buffer[: len(hidden)], self.inverse_temperature
        if _tensor_cores(hidden, self.dtype):
            torch.mm(hidden, weight[: self.columns].t(), self.dtype, out=z)
            return z.mul_(alpha) if alpha != 1.0 else z
        hidden = hidden.to(self.dtype)
        for rows, part in _upcast(weight[: self.columns], self.dtype):
            out = z[:, rows]
            torch.addmm(out, hidden, part.t(), beta=0, alpha=alpha, out=out)
        return z

    def reduce(self, z: Tensor, span: slice) -> _Stats:
        """Softmax statistics of a chunk. The torch version leaves z - m in z if entropy is wanted, else E."""
        m, sums = self._sums_by_kernel(z, span) if self.kernels else self._sums(z, span)
        self.all_reduce(sums, dist.ReduceOp.SUM)
        log_s = sums[0].log()
        return _Stats(sums[1] - m - log_s, m, log_s, log_s - sums[2] / sums[0] if self.want_entropy else None)

    def _sums(self, z: Tensor, span: slice) -> tuple[Tensor, Tensor]:
        """m `[c]` of all ranks; S, z of the target and, if entropy is wanted, sum E (z - m) of this one."""
        m = z.new_full((len(z),), -torch.inf)
        sums = z.new_zeros(3 if self.want_entropy else 2, len(z))
        local, inside = self.local_targets(span)
        if self.columns:
            sums[1] = torch.where(inside, z.gather(1, local[:, None]).squeeze(1), 0.0)
        if self.columns and self.group is not None:
            torch.amax(z, -1, out=m)
        self.all_reduce(m, dist.ReduceOp.MAX)
        for rows in self.blocks(len(z)):
            if self.group is None:
                m[rows] = z[rows].amax(-1)
            block = z[rows].sub_(m[rows, None])
            if not self.want_entropy:
                sums[0, rows] = block.exp_().sum(-1)
                continue
            e = torch.exp(block, out=self.scratch[: len(block)])
            sums[0, rows] = e.sum(-1)
            sums[2, rows] = e.mul_(block).sum(-1)
        return m, sums

    def _sums_by_kernel(self, z: Tensor, span: slice) -> tuple[Tensor, Tensor]:
        """As `_sums`; leaves the logits as they are."""
        local, inside = self.local_targets(span)
        stats = vocab_triton.row_stats(z, torch.where(inside, local, -1), want_entropy=self.want_entropy)
        m, sums = stats[0], stats[1:]
        if self.group is not None:
            m = m.clone()
            self.all_reduce(m, dist.ReduceOp.MAX)
            sums = vocab_triton.rebase(stats, m)
        return m, sums[: 3 if self.want_entropy else 2]

    def center(self, z: Tensor, normaliser: Tensor) -> None:
        """Bring logits to the state that `reduce` leaves them in, with m + log S, which is known, for m (so S is 1)."""
        for rows in () if self.kernels else self.blocks(len(z)):
            block = z[rows].sub_(normaliser[rows, None])
            if not self.want_entropy:
                block.exp_()

    def local_targets(self, span: slice) -> tuple[Tensor, Tensor]:
        """Column of each target on this rank (0 where another rank has it), and whether it is here."""
        local = self.targets[span] - self.start
        inside = (local >= 0) & (local < self.columns)
        return torch.where(inside, local, 0), inside

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.group is not None:
            dist.all_reduce(x, op, group=self.group)

    def logit_gradient(
        self, z: Tensor, span: slice, stats: _Stats, g: Tensor, g_h: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient with respect to the logits, up to the factor `[c]` of each row, and that factor. Uses up z.

        z as `reduce` or `center` left it. `g`, `g_h` [c]: gradients of log-probs and entropy. The factor is kept
        apart because it is cheaper to apply to [c, H] than to [c, columns]; it is 0 where both gradients are.
        """
        idle = g == 0 if g_h is None else (g == 0) & (g_h == 0)
        if self.kernels:
            return self._gradient_by_kernel(z, span, stats, g, g_h), torch.where(idle, 0.0, 1.0)
        s = stats.log_s.exp()
        if g_h is None:  # -g/S (E - S 1[t])
            factor, at_target = -g / s, -s
            for rows in self.blocks(len(z)) if self.want_entropy else ():
                z[rows].exp_()
        else:  # 1/S (E (-g_h (z - m) + g_h (log S - H) - g) + S g 1[t])
            factor, at_target, constant = 1 / s, s * g, g_h * (stats.log_s - stats.entropy) - g
            for rows in self.blocks(len(z)):
                e = torch.exp(z[rows], out=self.scratch[: rows.stop - rows.start])
                z[rows].mul_(-g_h[rows, None]).add_(constant[rows, None]).mul_(e)
        local, inside = self.local_targets(span)
        if self.columns:
            z.scatter_add_(1, local[:, None], torch.where(inside, at_target, 0.0)[:, None])
        if z.is_cuda:  # idle rows may hold NaN; on a GPU asking which costs more than filling
            z.masked_fill_(idle[:, None], 0.0)
        else:
            z.index_fill_(0, idle.nonzero().squeeze(1), 0.0)
        return z, (factor * self.inverse_temperature).masked_fill_(idle, 0.0)

    def _gradient_by_kernel(self, z: Tensor, span: slice, stats: _Stats, g: Tensor, g_h: Tensor | None) -> Tensor:
        """The whole gradient, already in the precision that the products want."""
        local, inside = self.local_targets(span)
        alpha = self.inverse_temperature
        return vocab_triton.logit_gradient_(
            z,
            torch.where(inside, local, -1),
            stats.max + stats.log_s,
            stats.entropy,
            g * alpha,
            None if g_h is None else g_h * alpha,
            z if self.product_dtype == z.dtype else torch.empty_like(z, dtype=self.product_dtype),
        )


class _Gradients:
    """d hidden (in its dtype) and d weight (in the softmax dtype); None where not wanted."""

    def __init__(self, head: _Head, hidden: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> None:
        self.columns, self.weight_dtype, self.dtype = weight[: head.columns], weight.dtype, head.dtype
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=head.dtype) if wanted[1] else None

    def add(self, z: Tensor, factor: Tensor, hidden: Tensor, span: slice) -> None:
        """Products of a chunk's logit gradient, factor * z[c, columns], with the weight and hidden[c, H]."""
        if not z.is_cuda and not factor.any():
            if self.hidden is not None:
                self.hidden[span] = 0
            return
        hidden = torch.where(factor[:, None] == 0, 0, hidden)  # a skipped row may hold NaN
        if _tensor_cores(hidden, self.dtype):
            low = z if z.dtype == hidden.dtype else z.mul_(factor[:, None]).to(hidden.dtype)
            if self.hidden is not None:
                torch.mm(low, self.columns, out=self.hidden[span])
            if self.weight is not None:
                _add_product(self.weight[: len(self.columns)], low.t(), hidden)
            return
        if self.hidden is not None:
            self.hidden[span] = self._times_weight(z, hidden).mul_(factor[:, None])
        if self.weight is not None:
            self.weight[: len(self.columns)].addmm_(z.t(), hidden.to(z.dtype).mul(factor[:, None]))

    def _times_weight(self, z: Tensor, hidden: Tensor) -> Tensor:
        total = torch.zeros_like(hidden, dtype=z.dtype)
        for rows, part in _upcast(self.columns, z.dtype):
            total.addmm_(z[:, rows], part)
        return total

    def scaled(self, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients times the scalar `g`, in place: (d hidden, d weight in the weight's dtype)."""
        if g.is_cuda or g != 1:  # on a GPU asking would wait for the device
            for x in (self.hidden, self.weight):
                if x is not None:
                    x.mul_(g)
        return self.hidden, None if self.weight is None else self.weight.to(self.weight_dtype)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, head: _Head):
        logprobs, normaliser = head.empty(head.tokens), head.empty(head.tokens)
        entropy = head.empty(head.tokens) if head.want_entropy else None
        head.allocate()
        for span in head.chunks():
            stats = head.reduce(head.logits(hidden[span], weight), span)
            logprobs[span] = stats.logprobs
            normaliser[span] = stats.max + stats.log_s
            if entropy is not None:
                entropy[span] = stats.entropy
        head.free()
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, normaliser, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor | None, g_entropy: Tensor | None):
        hidden, weight, normaliser, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        g = torch.zeros_like(normaliser) if g is None else g
        grads = _Gradients(head, hidden, weight, ctx.needs_input_grad[:2])
        head.allocate()
        for span in head.chunks():
            z = head.logits(hidden[span], weight)
            head.center(z, normaliser[span])
            g_h, ent = (None, None) if g_entropy is None else (g_entropy[span], entropy[span])
            known = _Stats(g[span], normaliser[span], torch.zeros_like(g[span]), ent)
            z, factor = head.logit_gradient(z, span, known, g[span], g_h)
            grads.add(z, factor, hidden[span], span)
        head.free()
        return *grads.scaled(torch.ones(())), None


class _FusedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, head: _Head, token_loss: TokenLoss, grad_enabled: bool):
        logprobs = head.empty(head.tokens)
        entropy = head.empty(head.tokens) if head.want_entropy else None
        loss = torch.zeros((), dtype=head.dtype, device=head.device)
        wanted = (grad_enabled and hidden.requires_grad, grad_enabled and weight.requires_grad)
        grads = _Gradients(head, hidden, weight, wanted)
        head.allocate()
        for span in head.chunks():
            z = head.logits(hidden[span], weight)
            stats = head.reduce(z, span)
            logprobs[span] = stats.logprobs
            if entropy is not None:
                entropy[span] = stats.entropy
            value, g, g_h = _value_and_gradients(token_loss, stats, span, any(wanted))
            loss += value
            if any(wanted):
                z, factor = head.logit_gradient(z, span, stats, g, g_h)
                grads.add(z, factor, hidden[span], span)
        head.free()
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([logprobs] if entropy is None else [logprobs, entropy]))
        return loss, logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor, *_):
        if ctx.grads is None:
            raise RuntimeError("fused_token_loss keeps its gradients for one backward only")
        grads, ctx.grads = (
            ctx.grads,
            None,
        )  # no reference kept: autograd may then take the buffers as they are
        return *grads.scaled(g), None, None, None


def _value_and_gradients(
    token_loss: TokenLoss, stats: _Stats, span: slice, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss of a chunk and its gradients with respect to log-probs and entropy (None if it has none)."""
    with torch.set_grad_enabled(wanted):
        logprobs = stats.logprobs.detach().requires_grad_(wanted)
        entropy = None if stats.entropy is None else stats.entropy.detach().requires_grad_(wanted)
        value = token_loss(logprobs, entropy, span.start, span.stop)
    g = g_h = None
    if value.requires_grad:
        inputs = [logprobs] if entropy is None else [logprobs, entropy]
        g, g_h = (*torch.autograd.grad(value, inputs, allow_unused=True), None)[:2]
    return value.detach(), torch.zeros_like(stats.logprobs) if g is None else g, g_h


def _tensor_cores(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Whether to multiply low-precision matrices into results in `dtype` (CUDA, torch 2.8 or newer)."""
    return hidden.is_cuda and hidden.dtype != dtype and _mixed_products(hidden.device, hidden.dtype)[0]


@functools.cache
def _mixed_products(device: torch.device, dtype: torch.dtype) -> tuple[bool, bool]:
    """Does this torch give the fp32 product of two `dtype` matrices, and add it to an fp32 matrix? (2.8 and 2.10 do)"""
    one = torch.ones(8, 8, dtype=dtype, device=device)
    out = torch.zeros(8, 8, device=device)
    works = [False, False]
    for i, product in enumerate((torch.mm, functools.partial(torch.addmm, out))):
        try:
            product(one, one, torch.float32, out=out)
            works[i] = bool((out == 8 * (i + 1)).all())
        except (RuntimeError, TypeError):
            break
    return works[0], works[1]


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, `out` in fp32, the factors in lower precision."""
    if _mixed_products(b.device, b.dtype)[1]:
        torch.addmm(out, a, b, out.dtype, out=out)
        return
    for start in range(0, len(out), UPCAST_ROWS):  # the product needs memory of its own
        out[start : start + UPCAST_ROWS] += torch.mm(a[start : start + UPCAST_ROWS], b, out.dtype)


def _upcast(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in `dtype`: whole if it is already, else some rows at a time."""
    step = len(weight) if weight.dtype == dtype else UPCAST_ROWS
    for start in range(0, len(weight), max(step, 1)):
        rows = slice(start, min(start + step, len(weight)))
        yield rows, weight[rows].to(dtype)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, temperature: float, padded: int) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"expected hidden [T, H], weight [V, H], targets [T], got {shapes}")
    if hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight do not fit: {shapes}, {hidden.dtype}, {weight.dtype}")
    if not 1 <= vocab_size <= padded:
        raise ValueError(f"vocab_size {vocab_size} is not in 1..{padded}, the rows of all ranks' weights")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if targets.device.type == "cpu" and len(targets) and not (0 <= targets.min() <= targets.max() < vocab_size):
        raise ValueError(f"targets must be in 0..{vocab_size - 1}, got {targets.min()}..{targets.max()}")
