"""Carry out a plan: routes packed into flat buckets of fixed size, two of them in flight on each rank.

Every rank derives the same list of buckets from the plan and walks through those that it sends or receives in the
order of the list; a bucket is begun when the one before the last is finished, in the same two buffers for ever. So the
extra memory is two buckets, and no two ranks can wait for each other: the earliest unfinished bucket has been begun by
both of its ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.algebra import Box, local_shape, slices
from megappo.bridge.plan import Place, Plan, Route, WeightLayout

BUCKET_BYTES = 32 << 20
Tensors = Mapping[tuple[int, str], Tensor]  # by (model chunk, name)


class Bucket(NamedTuple):
    """Routes that travel together. `number`: its place in the order that all ranks follow."""

    number: int
    src: int
    dst: int
    routes: list[Route]
    numel: int


@dataclass
class SyncReport:
    """What one synchronisation took on this rank. Bytes are of the wire's dtype; `lower_bound` is of all ranks.

    `extra_memory`: bytes of buffers held meanwhile.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("pack", "wait", "unpack", "local"), 0.0))
    sent: int = 0
    received: int = 0
    local: int = 0
    buckets: int = 0
    extra_memory: int = 0
    lower_bound: int = 0
    total_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Flat, for a logger."""
        out = {f"sync/{name}_seconds": value for name, value in self.seconds.items()}
        for name in ("sent", "received", "local", "buckets", "extra_memory", "lower_bound", "total_seconds"):
            out[f"sync/{name}"] = float(getattr(self, name))
        return out


class Transport(Protocol):
    """Moves a flat tensor; both calls return at once, with a function that waits. The tensor is the caller's again
    after the wait."""

    def send(self, flat: Tensor, bucket: Bucket) -> Callable[[], object]: ...

    def receive(self, flat: Tensor, bucket: Bucket) -> Callable[[], object]: ...


class PeerTransport:
    """Point-to-point messages of torch.distributed: gloo, or NCCL where the tensors are on its devices.

    `rank_of`: the group's global rank for a rank of the plan, if they differ.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, rank_of: Callable[[int], int] = int):
        self._group, self._rank_of = group, rank_of

    def send(self, flat: Tensor, bucket: Bucket) -> Callable[[], object]:
        return self._begin(dist.isend, flat, bucket.dst)

    def receive(self, flat: Tensor, bucket: Bucket) -> Callable[[], object]:
        return self._begin(dist.irecv, flat, bucket.src)

    def _begin(self, operation: Callable, flat: Tensor, peer: int) -> Callable[[], object]:
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, flat, self._rank_of(peer), self._group)])
        return work.wait


class DiskTransport:
    """Buckets as files of a folder that all ranks see. What is received must have been written before: first every
    rank executes the phase "send", then (after a barrier) every rank the phase "receive"."""

    def __init__(self, folder: Path):
        self._folder = folder

    def _file(self, bucket: Bucket) -> Path:
        return self._folder / f"bucket_{bucket.number:08d}.bin"

    def send(self, flat: Tensor, bucket: Bucket) -> Callable[[], object]:
        beside = self._file(bucket).with_suffix(".tmp")
        beside.write_bytes(flat.cpu().view(torch.uint8).numpy().data)
        beside.replace(self._file(bucket))
        return lambda: None

    def receive(self, flat: Tensor, bucket: Bucket) -> Callable[[], object]:
        raw = torch.frombuffer(bytearray(self._file(bucket).read_bytes()), dtype=flat.dtype)
        flat.copy_(raw)
        return lambda: None


# ------------------------------------------------------------------ buckets
def buckets(plan: Plan, itemsize: int, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """The routes between different ranks in buckets of at most `bucket_bytes`, in the order in which they travel.

    Deterministic. In each round every rank sends about one bucket and receives about one.
    """
    limit = max(bucket_bytes // itemsize, 1)
    filled: dict[tuple[int, int], list[list[Route]]] = {}
    room: dict[tuple[int, int], int] = {}
    for route in plan.routes:
        if route.src == route.dst:
            continue
        pair = (route.src, route.dst)
        for part in split(route, limit):
            if room.get(pair, -1) < part.numel:
                filled.setdefault(pair, []).append([])
                room[pair] = limit
            filled[pair][-1].append(part)
            room[pair] -= part.numel
    world = 1 + max((max(pair) for pair in filled), default=0)
    order = sorted((i, (dst - src) % world, src, dst) for (src, dst), all_ in filled.items() for i in range(len(all_)))
    out = []
    for number, (i, _, src, dst) in enumerate(order):
        routes = filled[src, dst][i]
        out.append(Bucket(number, src, dst, routes, sum(route.numel for route in routes)))
    return out


def split(route: Route, limit: int) -> Iterator[Route]:
    """The route in parts of at most `limit` elements, cut along its first dimensions."""
    if route.numel <= limit:
        yield route
        return
    shape = [stop - start for start, stop in route.target.box]
    dim, row = 0, route.numel // shape[0]
    while row > limit:  # a single row is too large: cut it up as well
        dim += 1
        row //= shape[dim]
    for outer in _rows(shape[:dim]):
        step = limit // row
        for start in range(0, shape[dim], step):
            count = min(step, shape[dim] - start)
            at = [*outer, (start, count)]
            yield route._replace(source=_cut(route.source, at), target=_cut(route.target, at), numel=count * row)


def _rows(shape: list[int]) -> list[list[tuple[int, int]]]:
    out: list[list[tuple[int, int]]] = [[]]
    for size in shape:
        out = [[*head, (i, 1)] for head in out for i in range(size)]
    return out


def _cut(place: Place, at: list[tuple[int, int]]) -> Place:
    """`at`: `(start, count)` for the first dimensions."""
    head = tuple((low + start, low + start + count) for (low, _), (start, count) in zip(place.box, at, strict=False))
    box: Box = head + place.box[len(at) :]
    return place._replace(box=box)


def view(tensors: Tensors, place: Place) -> Tensor:
    """The box of a local tensor."""
    tensor = tensors[place.chunk, place.local]
    return (tensor if place.entry is None else tensor[place.entry])[slices(place.box)]


# ------------------------------------------------------------------ carrying out
@torch.no_grad()
def execute(
    plan: Plan,
    rank: int,
    source: Tensors,
    target: Tensors,
    transport: Transport,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    bucket_bytes: int = BUCKET_BYTES,
    phase: Literal["both", "send", "receive"] = "both",
) -> SyncReport:
    """This rank's part of the plan: sends from `source`, writes into `target`. All ranks of the plan must take part.

    Args:
        dtype: on the wire; that of the targets, so that nothing larger travels than arrives.
        source, target: empty for a rank that holds nothing of one side. They must not share memory.
        phase: "send" and "receive" are the halves for a transport that stores buckets in between; what stays on the
            rank is copied with the second.
    """
    report, started = SyncReport(), time.perf_counter()
    report.lower_bound = plan.lower_bound * dtype.itemsize
    mine = [b for b in buckets(plan, dtype.itemsize, bucket_bytes) if rank in (b.src, b.dst)]
    if phase != "both":
        mine = [b for b in mine if (b.src == rank) == (phase == "send")]
    size = max((bucket.numel for bucket in mine), default=0)
    flats = [torch.empty(size, dtype=dtype, device=device) for _ in range(min(2, len(mine)))]
    report.extra_memory = sum(flat.nbytes for flat in flats)
    pending: list[Callable[[], None] | None] = [None, None]
    for i, bucket in enumerate(mine):
        if pending[i % 2] is not None:
            pending[i % 2]()
        flat = flats[i % 2][: bucket.numel]
        pending[i % 2] = _begin(bucket, rank, flat, source, target, transport, report)
    if phase != "send":
        _copy_local(plan, rank, source, target, report, dtype)
    for finish in (pending[len(mine) % 2], pending[(len(mine) + 1) % 2]):
        if finish is not None:
            finish()
    report.buckets, report.total_seconds = len(mine), time.perf_counter() - started
    return report


def _begin(bucket, rank, flat, source, target, transport, report) -> Callable[[], None]:
    """Start a bucket on its way; returns what finishes it."""
    sending = bucket.src == rank
    if sending:
        with _Timed(report, "pack"):
            pack(bucket, source, flat)
        wait = transport.send(flat, bucket)
        report.sent += flat.nbytes
    else:
        wait = transport.receive(flat, bucket)
        report.received += flat.nbytes

    def finish() -> None:
        with _Timed(report, "wait"):
            wait()
        if not sending:
            with _Timed(report, "unpack"):
                unpack(bucket, target, flat)

    return finish


def pack(bucket: Bucket, source: Tensors, flat: Tensor) -> None:
    """Copy (and convert) the bucket's boxes into the flat buffer."""
    at = 0
    for route in bucket.routes:
        box = view(source, route.source)
        flat[at : at + route.numel].view(box.shape).copy_(box)
        at += route.numel


def unpack(bucket: Bucket, target: Tensors, flat: Tensor) -> None:
    """Copy the flat buffer into the bucket's boxes."""
    at = 0
    for route in bucket.routes:
        box = view(target, route.target)
        box.copy_(flat[at : at + route.numel].view(box.shape))
        at += route.numel


def _copy_local(plan: Plan, rank: int, source: Tensors, target: Tensors, report: SyncReport, dtype) -> None:
    with _Timed(report, "local"):
        for route in plan.routes:
            if route.src == rank == route.dst:
                view(target, route.target).copy_(view(source, route.source).to(dtype))
                report.local += route.numel * dtype.itemsize


class _Timed:
    def __init__(self, report: SyncReport, phase: str):
        self._report, self._phase = report, phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._report.seconds[self._phase] += time.perf_counter() - self._start


@torch.no_grad()
def execute_in_process(
    plan: Plan,
    sources: Mapping[int, Tensors],
    targets: Mapping[int, Tensors],
    *,
    dtype: torch.dtype,
    bucket_bytes: int = BUCKET_BYTES,
) -> SyncReport:
    """The whole plan in one process that holds the tensors of all ranks: bucket by bucket, through one buffer."""
    report, started = SyncReport(), time.perf_counter()
    report.lower_bound = plan.lower_bound * dtype.itemsize
    for rank in targets.keys() & sources.keys():
        _copy_local(plan, rank, sources[rank], targets[rank], report, dtype)
    all_buckets = buckets(plan, dtype.itemsize, bucket_bytes)
    flat = torch.empty(max((bucket.numel for bucket in all_buckets), default=0), dtype=dtype)
    for bucket in all_buckets:
        with _Timed(report, "pack"):
            pack(bucket, sources[bucket.src], flat[: bucket.numel])
        with _Timed(report, "unpack"):
            unpack(bucket, targets[bucket.dst], flat[: bucket.numel])
        report.sent += bucket.numel * dtype.itemsize
    report.received, report.buckets, report.extra_memory = report.sent, len(all_buckets), flat.nbytes
    report.total_seconds = time.perf_counter() - started
    return report


# ------------------------------------------------------------------ what a rank holds
def local_shapes(layout: WeightLayout, rank: int) -> dict[tuple[int, str], tuple[int, ...]]:
    """`{(chunk, name): shape}` of every tensor of a rank, stacks included."""
    out = {}
    for chunk, rule in layout.rules(rank):
        shape = local_shape(rule, layout.shard(rule, rank)[1])
        out[chunk, rule.local] = (rule.stack[1], *shape) if rule.stack else shape
    return out


def zero_padding(layout: WeightLayout, rank: int, tensors: Tensors) -> None:
    """Clear the tensors that hold padding, which no route writes; before the first synchronisation."""
    for chunk, rule in layout.rules(rank):
        if any(span.hf is None for group in rule.groups for span in group):
            tensors[chunk, rule.local].zero_()


@torch.no_grad()
def gather_all(
    source: WeightLayout,
    destination: WeightLayout,
    rank: int,
    tensors: Tensors,
    target: Tensors,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> int:
    """The slow golden reference: every whole tensor on every rank, then cut. Collective over the default group.

    Shares nothing with the planner: ranks add up what they hold, bytes of one rank and zeros of the others. Returns
    the bytes that each rank receives.
    """
    held: dict[str, dict[Box, tuple[int, Place]]] = {}
    for holder in source.ranks:
        for chunk, piece in source.pieces(holder):
            place = Place(chunk, piece.local, piece.entry, piece.local_box)
            held.setdefault(piece.hf, {}).setdefault(piece.hf_box, (holder, place))
    needed: dict[str, list[tuple[Box, Place]]] = {}
    for chunk, piece in destination.pieces(rank) if rank in destination.ranks else ():
        place = Place(chunk, piece.local, piece.entry, piece.local_box)
        needed.setdefault(piece.hf, []).append((piece.hf_box, place))
    received = 0
    for hf, boxes in sorted(held.items()):
        shape = [max(stops) for stops in zip(*([stop for _, stop in box] for box in boxes), strict=True)]
        full = torch.zeros(shape, dtype=dtype, device=device)
        for box, (holder, place) in boxes.items():
            if holder == rank:
                full[slices(box)] = view(tensors, place).to(dtype)
        flat = full.view(-1).view(torch.uint8)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        received += flat.nbytes
        for box, place in needed.get(hf, ()):
            view(target, place).copy_(full[slices(box)])
    return received
