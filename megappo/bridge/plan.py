"""Which rank sends which part of which tensor to whom, when weights move from one layout into another.

Plain arithmetic: every rank computes the same plan by itself, without asking anyone, and a laptop can compute the
plan of a thousand ranks. What each rank holds comes from the layouts' pieces; a route is where a piece of the source
and a piece of the destination overlap.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megappo.bridge.algebra import Box, Piece, Rule


class WeightLayout(Protocol):
    """Who holds what: MegatronWeights and InferenceWeights."""

    @property
    def ranks(self) -> range: ...

    def shape_key(self, rank: int) -> Hashable:
        """Ranks with the same key hold the same."""

    def rules(self, rank: int) -> Iterator[tuple[int, Rule]]: ...

    def shard(self, rule: Rule, rank: int) -> tuple[int, int]: ...

    def pieces(self, rank: int) -> Iterator[tuple[int, Piece]]: ...


class Place(NamedTuple):
    """A box of a local tensor: its model chunk and name, the entry of a stacked tensor (or None)."""

    chunk: int
    local: str
    entry: int | None
    box: Box


class Route(NamedTuple):
    """`numel` elements from `source` on rank `src` to `target` on rank `dst`: boxes of equal shape."""

    src: int
    dst: int
    hf: str
    source: Place
    target: Place
    numel: int


@dataclass(frozen=True)
class Plan:
    """Routes in a fixed order (by destination rank), and the elements that must cross between ranks at the least.

    `needed`: elements that destination ranks hold; `lower_bound`: those of them that the same rank does not hold in
    the source layout. A route within a rank moves nothing.
    """

    routes: list[Route]
    needed: int
    lower_bound: int

    @property
    def moved(self) -> int:
        """Elements that the routes carry from one rank to another."""
        return sum(route.numel for route in self.routes if route.src != route.dst)

    def sent(self) -> dict[int, int]:
        """Elements that each rank sends to others."""
        out: dict[int, int] = {}
        for route in self.routes:
            if route.src != route.dst:
                out[route.src] = out.get(route.src, 0) + route.numel
        return out


class _Holders:
    """The ranks that hold the same piece, and who of them sends next: on the same rank, then on the same node, then
    whoever has sent least."""

    def __init__(self, ranks: list[int], node_size: int, load: list[int]):
        self.ranks, self.here, self._load = ranks, frozenset(ranks), load
        self._node_size = node_size
        self._nodes: dict[int, list[int]] = {}
        for rank in ranks:
            self._nodes.setdefault(rank // node_size, []).append(rank)

    def choose(self, dst: int, numel: int) -> int:
        if dst in self.here:
            return dst
        near = self._nodes.get(dst // self._node_size, self.ranks)
        src = min(near, key=self._load.__getitem__)
        self._load[src] += numel
        return src


class _Held(NamedTuple):
    """A box of a Hugging Face tensor in the source layout: where its holders have it, by what they hold in all."""

    box: Box
    keys: tuple[Hashable, ...]
    places: dict[Hashable, tuple[int, Piece]]


def plan(source: WeightLayout, destination: WeightLayout, *, node_size: int = 8) -> Plan:
    """The routes from one layout into another of the same model. Deterministic.

    Args:
        node_size: ranks that share a machine; a sender on the receiver's machine is preferred.

    Raises:
        ValueError: the destination needs something that the source does not hold.
    """
    held = _held(source)
    ranks_of = _groups(source)
    load = [0] * (max(source.ranks) + 1)
    holders: dict[tuple[Hashable, ...], _Holders] = {}
    key_of = {rank: key for key, ranks in ranks_of.items() for rank in ranks}
    templates = {key: _overlaps(destination, ranks[0], held) for key, ranks in _groups(destination).items()}
    routes: list[Route] = []
    needed = lower_bound = 0
    for dst in destination.ranks:
        for hf, found, common, target, numel in templates[destination.shape_key(dst)]:
            at = holders.get(found.keys)
            if at is None:
                ranks = sorted(rank for key in found.keys for rank in ranks_of[key])
                at = holders[found.keys] = _Holders(ranks, node_size, load)
            src = at.choose(dst, numel)
            chunk, piece = found.places[key_of[src]]
            routes.append(Route(src, dst, hf, _shift(chunk, piece, common), target, numel))
            needed += numel
            lower_bound += 0 if dst in at.here else numel
    return Plan(routes, needed, lower_bound)


def _groups(layout: WeightLayout) -> dict[Hashable, list[int]]:
    """Ranks by what they hold."""
    out: dict[Hashable, list[int]] = {}
    for rank in layout.ranks:
        out.setdefault(layout.shape_key(rank), []).append(rank)
    return out


def _held(source: WeightLayout) -> dict[str, list[_Held]]:
    """Every box of every Hugging Face tensor that the source holds, once, with all that hold it."""
    found: dict[str, dict[Box, dict[Hashable, tuple[int, Piece]]]] = {}
    for key, ranks in _groups(source).items():
        for chunk, piece in source.pieces(ranks[0]):
            found.setdefault(piece.hf, {}).setdefault(piece.hf_box, {}).setdefault(key, (chunk, piece))
    return {
        hf: [_Held(box, tuple(places), places) for box, places in sorted(boxes.items())] for hf, boxes in found.items()
    }


def _overlaps(
    destination: WeightLayout, rank: int, held: dict[str, list[_Held]]
) -> list[tuple[str, _Held, Box, Place, int]]:
    """`(hf, who holds it, common box, place in the destination, elements)` for everything that `rank` needs."""
    out = []
    for chunk, piece in destination.pieces(rank):
        missing = piece.numel
        for one in held.get(piece.hf, ()):
            if one.box == piece.hf_box:  # the usual case, and the fast one
                common, numel = one.box, piece.numel
            else:
                common = _intersect(one.box, piece.hf_box)
                numel = _numel(common)
            if numel:
                out.append((piece.hf, one, common, _shift(chunk, piece, common), numel))
                missing -= numel
        if missing:
            raise ValueError(f"{missing} elements of {piece.hf} for rank {rank} are nowhere in the source layout")
    return out


def _intersect(a: Box, b: Box) -> Box:
    return tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))


def _numel(box: Box) -> int:
    count = 1
    for start, stop in box:
        if stop <= start:
            return 0
        count *= stop - start
    return count


def _shift(chunk: int, piece: Piece, box: Box) -> Place:
    """Where a box of the Hugging Face tensor lies in the piece's local tensor."""
    if box == piece.hf_box:
        return Place(chunk, piece.local, piece.entry, piece.local_box)
    local = tuple(
        (low + at[0] - hf[0], high + at[0] - hf[0])
        for (low, high), at, hf in zip(box, piece.local_box, piece.hf_box, strict=True)
    )
    return Place(chunk, piece.local, piece.entry, local)
