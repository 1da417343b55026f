"""A weight layout is data: which slice of which Hugging Face tensor sits where in which local tensor.

Everything here is plain arithmetic on integers: no torch.distributed, no tensors. A model family states, for every
Megatron parameter, how it is put together from Hugging Face tensors (`Rule`); `pieces` cuts that for one
tensor-parallel rank. Loading, exporting and live weight sync all read the same pieces, in one direction or the
other, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

Box = tuple[tuple[int, int], ...]  # [start, stop) along each dimension
T = TypeVar("T", bound=Any)  # a tensor of any library


@dataclass(frozen=True)
class Span:
    """Rows (along a rule's dimension) `[start, stop)` of the Hugging Face tensor `hf`; `hf` None is padding."""

    hf: str | None
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is assembled.

    Attributes:
        local: its name inside a model chunk.
        shape: shape of the whole (unsharded) parameter.
        dim: the dimension that tensor parallelism divides, or None when every TP rank holds all of it.
        groups: each group is a concatenation of spans along `dim` (0 when `dim` is None) that is divided over TP
            on its own; a rank holds its part of the first group, then its part of the second, and so on.
            One group `[q₀ k₀ v₀ q₁ …]` is Megatron's interleaved QKV; two groups `[gate] [up]` its gated MLP.
        expert: part of an expert, so divided over expert-tensor-parallel ranks instead of tensor-parallel ones.
        copies: for each group, how many neighbouring ranks hold the same part of it (inference engines replicate
            key/value heads that are fewer than the ranks). Empty: one each.
        stack: `(index, count)` when the parameter is entry `index` of a local tensor `[count, …]` (fused experts).
    """

    local: str
    shape: tuple[int, ...]
    dim: int | None
    groups: tuple[tuple[Span, ...], ...]
    expert: bool = False
    copies: tuple[int, ...] = ()
    stack: tuple[int, int] | None = None


@dataclass(frozen=True)
class Piece:
    """A box of a Hugging Face tensor and the box of the local tensor that holds it. Equal shapes.

    `entry`: the box lies in this entry of a stacked local tensor, see `Rule.stack`.
    """

    hf: str
    hf_box: Box
    local: str
    local_box: Box
    entry: int | None = None

    @property
    def numel(self) -> int:
        count = 1
        for start, stop in self.hf_box:
            count *= stop - start
        return count


def local_shape(rule: Rule, tp: int) -> tuple[int, ...]:
    """Shape of the parameter on each of `tp` ranks (of one entry, if it is stacked)."""
    if rule.dim is None:
        return rule.shape
    copies = rule.copies or (1,) * len(rule.groups)
    rows = sum(sum(span.size for span in g) * c for g, c in zip(rule.groups, copies, strict=True)) // tp
    return tuple(rows if d == rule.dim else n for d, n in enumerate(rule.shape))


def local_tensor(tensor: T, piece: Piece) -> T:
    """The part of a local tensor that `piece` describes, as a view with the piece's shape."""
    return (tensor if piece.entry is None else tensor[piece.entry])[slices(piece.local_box)]


def pieces(rule: Rule, tp_rank: int, tp: int) -> list[Piece]:
    """The pieces of one parameter on tensor-parallel rank `tp_rank` of `tp`. Padding yields none.

    Raises:
        ValueError: a group cannot be divided evenly over `tp` ranks.
    """
    dim = rule.dim or 0
    if rule.dim is None:
        tp_rank, tp = 0, 1
    out: list[Piece] = []
    base = 0
    entry = rule.stack[0] if rule.stack else None
    for number, group in enumerate(rule.groups):
        total = sum(span.size for span in group)
        copies = rule.copies[number] if rule.copies else 1
        if tp % copies or total % (tp // copies):
            raise ValueError(f"{rule.local}: {total} rows cannot be divided over {tp} tensor-parallel ranks")
        size = total // (tp // copies)
        low, high = tp_rank // copies * size, (tp_rank // copies + 1) * size
        offset = 0
        for span in group:
            start, stop = max(low, offset), min(high, offset + span.size)
            if start < stop and span.hf is not None:
                source = span.start + start - offset
                target = base + start - low
                out.append(
                    Piece(
                        span.hf,
                        _box(rule.shape, dim, source, stop - start),
                        rule.local,
                        _box(rule.shape, dim, target, stop - start),
                        entry,
                    )
                )
            offset += span.size
        base += size
    return out


def _box(shape: tuple[int, ...], dim: int, start: int, size: int) -> Box:
    return tuple((start, start + size) if d == dim else (0, n) for d, n in enumerate(shape))


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index into a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


# ------------------------------------------------------------------ the shapes that rules come in
def replicated(local: str, hf: str, *shape: int) -> Rule:
    """Every tensor-parallel rank holds the whole tensor."""
    return Rule(local, shape, None, ((Span(hf, 0, shape[0]),),))


def column(local: str, hf: str, *shape: int) -> Rule:
    """Rows of the weight (outputs of the layer) are divided."""
    return Rule(local, shape, 0, ((Span(hf, 0, shape[0]),),))


def row(local: str, hf: str, *shape: int) -> Rule:
    """Columns of the weight (inputs of the layer) are divided."""
    return Rule(local, shape, 1, ((Span(hf, 0, shape[1]),),))


def vocabulary(local: str, hf: str, vocab: int, padded: int, hidden: int) -> Rule:
    """Rows are divided after padding the vocabulary to a multiple of the ranks."""
    spans = (Span(hf, 0, vocab),) + ((Span(None, 0, padded - vocab),) if padded > vocab else ())
    return Rule(local, (padded, hidden), 0, (spans,))


def gate_up(local: str, gate: str, up: str, ffn: int, hidden: int) -> Rule:
    """Each rank holds its rows of the gate, then its rows of the up projection."""
    return Rule(local, (2 * ffn, hidden), 0, ((Span(gate, 0, ffn),), (Span(up, 0, ffn),)))


def grouped_qkv(local: str, q: str, k: str, v: str, heads: int, kv_heads: int, dim: int, *tail: int) -> Rule:
    """Megatron's order: for each key/value head, its query heads, the key, the value. Then divided over TP.

    `tail` is `(hidden,)` for the weight and empty for the bias.
    """
    per_group = heads // kv_heads * dim
    spans: list[Span] = []
    for g in range(kv_heads):
        spans.append(Span(q, g * per_group, (g + 1) * per_group))
        spans.append(Span(k, g * dim, (g + 1) * dim))
        spans.append(Span(v, g * dim, (g + 1) * dim))
    return Rule(local, ((heads + 2 * kv_heads) * dim, *tail), 0, (tuple(spans),))


def separate_qkv(local: str, q: str, k: str, v: str, heads: int, kv_heads: int, dim: int, *tail: int, tp: int) -> Rule:
    """An inference engine's order: a rank's query heads, its keys, its values. `tp`: the ranks they are divided over;
    key/value heads that are fewer are held by `tp / kv_heads` neighbours each."""
    copies = max(1, tp // kv_heads)
    sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
    groups = tuple((Span(name, 0, size),) for name, size in zip((q, k, v), sizes, strict=True))
    return Rule(local, (sum(sizes), *tail), 0, groups, copies=(1, copies, copies))
