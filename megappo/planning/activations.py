"""What a forward and backward needs beside weights and optimizer (bytes).

Counts the tensors that autograd keeps in the modules that we build (`megappo/models`): the layers of plain torch, and
those of Transformer Engine, whose norms keep two tensors where ours keep three. Follows Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", with the tensors that flash attention keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megappo.parallel.layout import ParallelLayout
from megappo.planning.shape import ModelShape

HEAD_CHUNK = 512 << 20  # bytes of fp32 logits made at a time on a GPU, megappo.parallel.vocab.CHUNK_BYTES
MIN_HEAD_CHUNK = 64  # rows


@dataclass(frozen=True)
class Work:
    """How a role computes a micro-batch.

    Attributes:
        tokens: of a micro-batch, over all context-parallel ranks.
        element: bytes of an activation.
        fused: Transformer Engine's layers instead of torch's.
        packed: several sequences in a row, which torch's attention regroups.
    """

    tokens: int
    element: int = 2
    fused: bool = True
    packed: bool = True
    recompute: Literal["selective", "full"] | None = None
    head_chunk: int = HEAD_CHUNK


def _norm(width: int, work: Work) -> int:
    """Kept of a norm, a row."""
    if work.fused:
        return 2 * width * work.element + 4
    return 4 * width + 4 + 2 * width * work.element  # its fp32 input, 1 / rms, the normed rows before and after scaling


def _attention(shape: ModelShape, layout: ParallelLayout, work: Work) -> int:
    """Kept between the two projections, a token."""
    q, kv = shape.q_width // layout.tp, max(shape.kv_width // layout.tp, shape.head_dim)
    s = work.element
    kept = 4 * shape.heads // layout.tp + 4 * shape.head_dim * s  # log-sum-exp; sines and cosines, twice
    regrouped = work.packed and not work.fused
    if shape.qk_norm:
        heads = (shape.heads + shape.kv_heads) // layout.tp
        wide = 0 if s == 4 or work.fused else 4 * (q + kv)
        kept += 4 * heads + (q + kv) * s + wide + (q * s if s == 4 or work.fused else 0)
        # Key and value are views of the projection's output, which a norm in fp32 (or a fused one) keeps whole.
        kept += (q + 2 * kv) * s if regrouped and (s == 4 or work.fused) else 0
    if regrouped:
        return kept + (q + 2 * kv + 2 * q) * s  # copies of query, key, value; output by group and in order
    return kept + (q + kv + (q + 2 * kv) + q) * s  # rotated query and key, the projection's output, the result


def _mlp(shape: ModelShape, layout: ParallelLayout, work: Work) -> int:
    """Kept inside the feed-forward part, a token."""
    s = work.element
    if not shape.experts:
        return 5 * shape.ffn // layout.tp * s  # both halves, silu(gate), up + 0, their product
    sliced = layout.tp if layout.sequence_parallel else 1
    router = shape.experts * 5 + shape.top_k * 32
    # A rank of the expert group computes its share of the tokens of all ranks: on average as many as it has itself.
    expert = shape.hidden * s + 6 * shape.expert_ffn // layout.etp * s + 4
    gathered = layout.etp if layout.etp > 1 else 1
    return router // sliced + shape.top_k * expert * gathered // sliced


def layer_bytes(shape: ModelShape, layout: ParallelLayout, work: Work) -> int:
    """Kept by one decoder layer for its backward, on one rank, without recomputation of the whole layer."""
    tokens = work.tokens // layout.cp
    rows = tokens // layout.tp if layout.sequence_parallel else tokens
    norms = 2 * _norm(shape.hidden, work)
    attention = _attention(shape, layout, work)
    if work.recompute == "selective":  # attention itself is computed anew: its log-sum-exp is not kept
        attention -= 4 * shape.heads // layout.tp
    return rows * norms + tokens * (attention + _mlp(shape, layout, work))


def layer_input_bytes(shape: ModelShape, layout: ParallelLayout, work: Work) -> int:
    """The hidden states between two layers: all that full recomputation keeps of a layer."""
    rows = work.tokens // layout.cp
    rows = rows // layout.tp if layout.sequence_parallel else rows
    return rows * shape.hidden * work.element


def in_flight(layout: ParallelLayout, stage: int, micro_batches: int) -> int:
    """Forward passes of one model chunk that wait for their backward at the worst moment of the 1F1B schedule.

    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
    """
    if layout.vpp == 1:
        return min(layout.pp - stage, micro_batches)
    warmup = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp
    return min(warmup + 1, micro_batches * layout.vpp)


def head_bytes(shape: ModelShape, layout: ParallelLayout, work: Work, *, critic: bool, train: bool) -> int:
    """The final norm and what the head needs on the last stage."""
    tokens = work.tokens // layout.cp
    rows = tokens // layout.tp if layout.sequence_parallel else tokens
    kept = rows * _norm(shape.hidden, work) if train else 0
    if critic:
        return kept + rows * shape.hidden * 4 * (1 if work.element == 2 else 0) + 3 * tokens * 4
    columns = shape.padded_vocabulary(layout.tp) // layout.tp
    chunk = min(tokens, max(work.head_chunk // (4 * columns), MIN_HEAD_CHUNK))
    low = work.element if work.fused else 0  # tensor cores take the logits' gradient in bf16
    logits = chunk * columns * (4 + low)
    hidden = tokens * shape.hidden * work.element  # the scored rows, copied
    if layout.sequence_parallel and layout.tp > 1:
        hidden += tokens * shape.hidden * work.element  # gathered from all tensor-parallel ranks
    if not train:
        return logits + hidden
    weight = columns * shape.hidden * (4 + (work.element if work.element == 2 else 0))
    return kept + logits + hidden + tokens * shape.hidden * work.element + weight


def backward_bytes(shape: ModelShape, layout: ParallelLayout, work: Work) -> int:
    """Gradients alive while all of a layer's activations still are: of the down projection's input and the residual."""
    tokens = work.tokens // layout.cp
    rows = tokens // layout.tp if layout.sequence_parallel else tokens
    width = shape.top_k * shape.expert_ffn // layout.etp if shape.experts else shape.ffn // layout.tp
    return tokens * width * work.element + 2 * rows * shape.hidden * work.element


def training_bytes(
    shape: ModelShape, layout: ParallelLayout, stage: int, work: Work, micro_batches: int, *, critic: bool
) -> int:
    """The most that activations take on a rank of this stage during an optimizer step."""
    layers = len(layout.layers(shape.layers, stage))
    waiting = in_flight(layout, stage, micro_batches)
    last = stage == layout.pp - 1
    layer = layer_bytes(shape, layout, replace(work, recompute=None) if work.recompute == "full" else work)
    edges = 2 * layer_input_bytes(shape, layout, work) if layout.pp > 1 else 0  # received, and sent on
    head = head_bytes(shape, layout, work, critic=critic, train=True) if last else 0
    backward = backward_bytes(shape, layout, work)
    if work.recompute == "full":
        kept = waiting * layers * layer_input_bytes(shape, layout, work)
        return kept + edges + max(layer + backward, head)
    return waiting * layers * layer + edges + max(backward, head)


def forward_bytes(shape: ModelShape, layout: ParallelLayout, stage: int, work: Work, *, critic: bool) -> int:
    """The most that activations take on a rank of this stage in a pass without gradients."""
    tokens = work.tokens // layout.cp
    rows = tokens // layout.tp if layout.sequence_parallel else tokens
    width = shape.top_k * shape.expert_ffn // layout.etp if shape.experts else shape.ffn // layout.tp
    layer = (4 * rows * shape.hidden + 4 * tokens * width) * work.element
    head = head_bytes(shape, layout, work, critic=critic, train=False) if stage == layout.pp - 1 else 0
    return max(layer, head + layer_input_bytes(shape, layout, work))
