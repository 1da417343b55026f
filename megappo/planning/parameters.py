"""Which parameters a rank holds, and the bytes that megatron-core allocates for them, their gradients and optimizer.

The same arithmetic as megatron-core 0.16.1's `_ParamAndGradBuffer` and `DistributedOptimizer`; the tests build the
real models on the meta device and compare byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megappo.parallel.layout import ParallelLayout
from megappo.planning.shape import ModelShape

_PARAM_ALIGN, _BUCKET_ALIGN = 64, 128  # elements; megatron-core's, with the distributed optimizer


@dataclass(frozen=True)
class Parameter:
    """`size` in elements on one rank; `expert`: reduced over the expert-data-parallel group; `shared`: tied, PP > 1."""

    name: str
    size: int
    expert: bool = False
    shared: bool = False


@dataclass(frozen=True)
class StateBytes:
    """What a role keeps on one rank between its phases (bytes)."""

    weights: int
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


@lru_cache
def layer_parameters(shape: ModelShape, tp: int, ep: int, etp: int) -> tuple[Parameter, ...]:
    """One decoder layer on one rank, in the order of the module's parameters."""
    h, qkv = shape.hidden, (shape.q_width + 2 * shape.kv_width) // tp
    found = [
        Parameter("input_layernorm", h),
        Parameter("linear_proj", shape.q_width // tp * h),
        Parameter("linear_qkv", qkv * h),
    ]
    if shape.qkv_bias:
        found.append(Parameter("linear_qkv.bias", qkv))
    if shape.qk_norm:
        found += [Parameter("q_layernorm", shape.head_dim), Parameter("k_layernorm", shape.head_dim)]
    found.append(Parameter("pre_mlp_layernorm", h))
    if not shape.experts:
        width = shape.ffn // tp
        return (*found, Parameter("linear_fc1", 2 * width * h), Parameter("linear_fc2", width * h))
    width = shape.expert_ffn // etp
    found.append(Parameter("router", shape.experts * h))
    for number in range(shape.experts // ep):
        found.append(Parameter(f"experts.{number}.linear_fc1", 2 * width * h, expert=True))
        found.append(Parameter(f"experts.{number}.linear_fc2", width * h, expert=True))
    return tuple(found)


@lru_cache(maxsize=4096)
def chunk_parameters(
    shape: ModelShape, layout: ParallelLayout, stage: int, chunk: int, critic: bool
) -> tuple[Parameter, ...]:
    """Everything in virtual chunk `chunk` of pipeline stage `stage` on one rank."""
    first = stage == 0 and chunk == 0
    last = stage == layout.pp - 1 and chunk == layout.vpp - 1
    table = shape.padded_vocabulary(layout.tp) // layout.tp * shape.hidden
    shared = shape.tied and not critic and layout.pp > 1
    found = [Parameter("embedding", table, shared=shared)] if first else []
    layer = layer_parameters(shape, layout.tp, layout.ep, layout.etp)
    found += layer * len(layout.layers(shape.layers, stage, chunk))
    if last:
        found.append(Parameter("final_layernorm", shape.hidden))
        if critic:
            found += [Parameter("value_head.weight", shape.hidden), Parameter("value_head.bias", 1)]
        elif not shape.tied or not first:
            found.append(Parameter("output_layer", table, shared=shared))
    return tuple(found)


@dataclass(frozen=True)
class Buffer:
    """megatron-core's flat buffer: `spans` (start, end) of the parameters, `buckets` (start, end), in elements."""

    spans: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def largest_shard(self, group: int) -> int:
        """Most parameter elements that one of `group` ranks updates: the padding belongs to nobody's optimizer."""
        return max(self.shards(group), default=0)

    def shards(self, group: int) -> list[int]:
        """Parameter elements of each rank of the data-parallel group."""
        counts = [0] * group
        for begin, end in self.buckets:
            width = (end - begin) // group
            for start, stop in self.spans:
                if stop <= begin or start >= end:
                    continue
                for rank in range((start - begin) // width, min(group, -(-(stop - begin) // width))):
                    low = begin + rank * width
                    counts[rank] += max(0, min(stop, low + width) - max(start, low))
        return counts


@lru_cache(maxsize=4096)
def buffer(parameters: tuple[Parameter, ...], group: int, distributed: bool) -> Buffer:
    """Lay out parameters as megatron-core's DDP does without overlapped reduction: one bucket, tied weights apart."""

    def pad(number: int, divisor: int) -> int:
        return -(-number // divisor) * divisor if distributed else number

    spans: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    bucket_start = position = 0
    waiting = False

    def close(end: int) -> int:
        nonlocal bucket_start, waiting
        padded = pad(end, math.lcm(group, _BUCKET_ALIGN))
        buckets.append((bucket_start, padded))
        bucket_start, waiting = padded, False
        return padded

    for parameter in reversed(parameters):
        start = pad(position, _PARAM_ALIGN)
        apart = parameter.shared and distributed
        if apart and waiting:
            start = close(start)
        position, waiting = start + parameter.size, True
        spans.append((start, position))
        if apart:
            position = close(position)
    if waiting:
        close(position)
    return Buffer(tuple(spans), tuple(buckets))


def groups(layout: ParallelLayout) -> tuple[int, int]:
    """Sizes of the groups over which gradients of (dense, expert) parameters are reduced."""
    return layout.dp * layout.cp, layout.world // layout.pp // (layout.ep * layout.etp)


def _chunks(shape: ModelShape, layout: ParallelLayout, stage: int, critic: bool) -> Iterator[tuple[Parameter, ...]]:
    for chunk in range(layout.vpp):
        yield chunk_parameters(shape, layout, stage, chunk, critic)


def _buffers(
    shape: ModelShape, layout: ParallelLayout, stage: int, critic: bool, distributed: bool
) -> Iterator[tuple[Buffer, int, bool]]:
    """(buffer, size of its data-parallel group, does it hold experts) of every chunk."""
    dense, expert = groups(layout)
    for parameters in _chunks(shape, layout, stage, critic):
        for is_expert, group in ((False, dense), (True, expert)):
            kept = tuple(p for p in parameters if p.expert == is_expert)
            if kept:
                yield buffer(kept, group, distributed), group, is_expert


def frozen_bytes(shape: ModelShape, layout: ParallelLayout, stage: int, element: int, *, critic: bool) -> StateBytes:
    """A role without optimizer; `element` bytes a weight."""
    sizes = (p.size for parameters in _chunks(shape, layout, stage, critic) for p in parameters)
    return StateBytes(element * sum(sizes))


def trained_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    stage: int,
    element: int,
    *,
    critic: bool,
    distributed: bool,
    index: tuple[int, int] | None = None,
) -> StateBytes:
    """A role with gradients (fp32), AdamW moments (fp32) and, unless `element` is 4, fp32 masters.

    `index`: place in the (dense, expert) data-parallel groups; None: the rank that holds most.
    """
    weights = gradients = masters = 0
    for flat, group, is_expert in _buffers(shape, layout, stage, critic, distributed):
        kept = flat.size if distributed else sum(end - start for start, end in flat.spans)
        weights += kept * element
        gradients += kept * 4
        if not distributed:
            masters += kept
        elif index is None:
            masters += _largest_shard(flat, group)
        else:
            masters += flat.shards(group)[index[is_expert]]
    return StateBytes(weights, gradients, masters * (8 if element == 4 else 12))


@lru_cache(maxsize=4096)
def _largest_shard(flat: Buffer, group: int) -> int:
    return flat.largest_shard(group)


def total_parameters(shape: ModelShape) -> int:
    """Parameters of the policy, tied weights once (the number on the model card)."""
    return sum(p.size for p in chunk_parameters(shape, ParallelLayout(), 0, 0, False))


def active_parameters(shape: ModelShape) -> int:
    """Parameters that multiply each token: no embedding look-up, of the experts only the chosen ones."""
    layer = layer_parameters(shape, 1, 1, 1)
    dense = sum(p.size for p in layer if not p.expert)
    expert = 3 * shape.expert_ffn * shape.hidden * shape.top_k
    return shape.layers * (dense + expert) + shape.vocabulary * shape.hidden
