"""Megatron's side of the bridge: what each rank holds, and moving weights between it and Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megappo.bridge.algebra import Box, Piece, Rule, local_shape, pieces, slices
from megappo.bridge.families import dense
from megappo.models.spec import ModelSpec
from megappo.parallel import backend
from megappo.parallel.layout import ParallelLayout

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class MegatronWeights:
    """The weight layout of one role: model, grid, policy or critic, fused layers (Transformer Engine) or not."""

    spec: ModelSpec
    layout: ParallelLayout
    critic: bool = False
    fused: bool = False

    @property
    def ranks(self) -> range:
        """The global ranks of the layout."""
        return self.layout.ranks

    def shape_key(self, rank: int) -> tuple[int, ...]:
        """Ranks with the same key hold the same."""
        where = self.layout.coordinates(rank)
        if self.spec.moe is None:
            return where.pp, where.tp
        return (where.pp, where.tp, *self.layout.expert_coordinates(rank)[:2])

    def rules(self, rank: int) -> Iterator[tuple[int, Rule]]:
        """`(chunk, rule)` for every parameter that `rank` holds."""
        spec, tp = self.spec, self.layout.tp
        experts = self.experts(rank)
        for chunk, layers in self.layout.chunks(spec.num_layers, rank):
            first, last = self.layout.is_first(rank, chunk), self.layout.is_last(rank, chunk)
            found: list[Rule] = []
            if first:
                found += dense.embedding_rules(spec, tp)
            for local, layer in enumerate(layers):
                found += dense.layer_rules(spec, layer, local, experts=experts, fused=self.fused)
            if last:
                found += dense.head_rules(spec, tp, critic=self.critic, has_embedding=first)
            for rule in found:
                yield chunk, rule

    def pieces(self, rank: int) -> Iterator[tuple[int, Piece]]:
        """`(chunk, piece)` for everything that `rank` holds."""
        for chunk, rule in self.rules(rank):
            for piece in pieces(rule, *self.shard(rule, rank)):
                yield chunk, piece

    def shard(self, rule: Rule, rank: int) -> tuple[int, int]:
        """`(index, count)`: which of how many equal shards of a parameter `rank` holds."""
        if rule.expert:
            return self.layout.expert_coordinates(rank)[0], self.layout.etp
        return self.layout.coordinates(rank).tp, self.layout.tp

    def experts(self, rank: int) -> range | None:
        """Global ids of the experts that `rank` holds, None for a dense model."""
        if self.spec.moe is None:
            return None
        count = self.spec.moe.num_experts // self.layout.ep
        _, ep, _ = self.layout.expert_coordinates(rank)
        return range(ep * count, (ep + 1) * count)

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of the model with its shape, in checkpoint order."""
        whole = MegatronWeights(self.spec, ParallelLayout(), self.critic, self.fused)
        shapes: dict[str, list[int]] = {}
        for _, piece in whole.pieces(0):
            shape = shapes.setdefault(piece.hf, [0] * len(piece.hf_box))
            for dim, (_, stop) in enumerate(piece.hf_box):
                shape[dim] = max(shape[dim], stop)
        return {name: tuple(shape) for name, shape in shapes.items()}


def check_model(weights: MegatronWeights, chunks: list[torch.nn.Module], rank: int) -> None:
    """The table and the model that megatron-core built must name the same parameters with the same shapes.

    Raises:
        RuntimeError: an unmapped or unknown parameter, or a shape that differs.
    """
    expected = {
        (chunk, rule.local): local_shape(rule, weights.shard(rule, rank)[1]) for chunk, rule in weights.rules(rank)
    }
    actual = {
        (i, name): tuple(param.shape) for i, chunk in enumerate(chunks) for name, param in chunk.named_parameters()
    }
    if expected != actual:
        differing = sorted(k for k in expected.keys() | actual.keys() if expected.get(k) != actual.get(k))
        chunk, name = differing[0]
        raise RuntimeError(
            f"bridge and model disagree on {len(differing)} parameters, first {name} in chunk {chunk}: "
            f"table {expected.get(differing[0])}, model {actual.get(differing[0])}"
        )


@torch.no_grad()
def load_weights(
    weights: MegatronWeights,
    chunks: list[torch.nn.Module],
    rank: int,
    read: Callable[[str, Box], torch.Tensor],
    skip: frozenset[str] = frozenset(),
) -> None:
    """Fill this rank's parameters from Hugging Face tensors, reading only the boxes that it holds.

    Args:
        read: `(hf_name, box) → tensor` of the box's shape.
        skip: Hugging Face names to leave as initialised (a value head that the source does not have).
    """
    check_model(weights, chunks, rank)
    params = [dict(chunk.named_parameters()) for chunk in chunks]
    for chunk, rule in weights.rules(rank):
        if any(span.hf is None for group in rule.groups for span in group):
            params[chunk][rule.local].zero_()
    for chunk, piece in weights.pieces(rank):
        if piece.hf not in skip:
            target = params[chunk][piece.local][slices(piece.local_box)]
            target.copy_(read(piece.hf, piece.hf_box))


@dataclass(frozen=True)
class _Part:
    rank: int
    chunk: int
    piece: Piece


def _sources(weights: MegatronWeights) -> dict[str, list[_Part]]:
    """For every Hugging Face tensor, the parts that make it up, each held by exactly one chosen rank."""
    parts: dict[str, list[_Part]] = {}
    seen: set[tuple[str, Box]] = set()
    layout = weights.layout
    ranks = layout.ranks if weights.spec.moe else layout.replica_ranks(0)
    for rank in ranks:
        where = layout.coordinates(rank)
        if (where.dp or where.cp) and layout.expert_coordinates(rank)[2]:
            continue  # holds nothing that an earlier rank does not hold too
        for chunk, piece in weights.pieces(rank):
            if (piece.hf, piece.hf_box) not in seen:
                seen.add((piece.hf, piece.hf_box))
                parts.setdefault(piece.hf, []).append(_Part(rank, chunk, piece))
    return parts


def _buckets(parts: dict[str, list[_Part]], itemsize: int) -> Iterator[list[str]]:
    """Names in groups of about BUCKET_BYTES (a larger tensor is alone in its group)."""
    bucket, size = [], 0
    for name, items in parts.items():
        nbytes = itemsize * sum(part.piece.numel for part in items)
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def stream_full_tensors(
    weights: MegatronWeights, chunks: list[torch.nn.Module], rank: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """`(hf_name, whole tensor)` of the model on every rank, bucket by bucket. Collective over all ranks.

    Each element crosses the network once, as part of a broadcast from the one rank chosen to send it. The yielded
    tensors are for reading: on a single rank some are the parameters themselves. At most one bucket of new ones is
    alive unless the caller keeps them.
    """
    params = [dict(chunk.named_parameters()) for chunk in chunks]
    shapes = weights.hf_shapes()
    parts = _sources(weights)
    device = backend.device()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        for name, items in parts.items():
            yield name, _assemble(items, shapes[name], params, dtype, device)
        return
    itemsize = torch.empty((), dtype=dtype).element_size()
    for names in _buckets(parts, itemsize):
        full = {name: torch.empty(shapes[name], dtype=dtype, device=device) for name in names}
        by_rank: dict[int, list[_Part]] = {}
        for name in names:
            for part in parts[name]:
                by_rank.setdefault(part.rank, []).append(part)
        for source, items in sorted(by_rank.items()):
            _broadcast_parts(items, source, rank, params, full, dtype, device)
        for name in names:
            yield name, full.pop(name)


def _assemble(items: list[_Part], shape: tuple[int, ...], params, dtype, device) -> torch.Tensor:
    """One tensor of parts that are all here: a view of the parameter if it is in one part."""
    boxes = [params[part.chunk][part.piece.local].detach()[slices(part.piece.local_box)] for part in items]
    if len(boxes) == 1:
        return boxes[0].to(dtype)
    full = torch.empty(shape, dtype=dtype, device=device)
    for part, box in zip(items, boxes, strict=True):
        full[slices(part.piece.hf_box)] = box
    return full


def _broadcast_parts(items, source, rank, params, full, dtype, device) -> None:
    flat = torch.empty(sum(part.piece.numel for part in items), dtype=dtype, device=device)
    offset = 0
    for part in items if rank == source else ():
        piece = part.piece
        box = params[part.chunk][piece.local][slices(piece.local_box)]
        flat[offset : offset + piece.numel].copy_(box.reshape(-1))
        offset += piece.numel
    dist.broadcast(flat, src=source)
    offset = 0
    for part in items:
        piece = part.piece
        shape = [stop - start for start, stop in piece.hf_box]
        full[piece.hf][slices(piece.hf_box)] = flat[offset : offset + piece.numel].view(shape)
        offset += piece.numel
