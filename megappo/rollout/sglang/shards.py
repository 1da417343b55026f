"""Weights as the server's own shards: rank by rank, fused and cut, copied in place (`load_format="direct"`).

The bridge says which box of which Hugging Face tensor lies where in which parameter of which rank; rank 0 puts the
shards together from the stream of full tensors. Each byte crosses HTTP once, not once for every tensor-parallel rank,
and the server has nothing to cut or fuse.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megappo.bridge.algebra import Piece, local_tensor, slices
from megappo.bridge.inference import InferenceWeights
from megappo.models.spec import ModelSpec
from megappo.rollout.sglang import contract as api
from megappo.rollout.sglang.servers import Server
from megappo.rollout.sglang.weights import Run, Update


@dataclass
class _Rank:
    """What one rank of a server waits for, has in part, and is ready to be sent."""

    wanted: dict[str, list[Piece]]  # by Hugging Face name
    shapes: dict[str, tuple[int, ...]]
    missing: dict[str, int]  # elements of each parameter that have not come yet; padding never comes
    partial: dict[str, Tensor] = field(default_factory=dict)
    ready: list[tuple[str, Tensor]] = field(default_factory=list)
    size: int = 0  # bytes that are ready

    @classmethod
    def of(cls, layout: InferenceWeights, rank: int) -> _Rank:
        wanted: dict[str, list[Piece]] = {}
        missing: dict[str, int] = {}
        for _, piece in layout.pieces(rank):
            wanted.setdefault(piece.hf, []).append(piece)
            missing[piece.local] = missing.get(piece.local, 0) + piece.numel
        return cls(wanted, layout.local_shapes(rank), missing)

    def take(self, name: str, tensor: Tensor) -> None:
        """Put the rank's boxes of a full tensor where they belong."""
        for piece in self.wanted.get(name, ()):
            local = self.partial.get(piece.local)
            if local is None:
                local = self.partial[piece.local] = torch.zeros(self.shapes[piece.local], dtype=tensor.dtype)
            local_tensor(local, piece).copy_(tensor[slices(piece.hf_box)])
            self.missing[piece.local] -= piece.numel
            if self.missing[piece.local] == 0:
                del self.partial[piece.local], self.missing[piece.local]
                self.ready.append((piece.local, local))
                self.size += local.numel() * local.element_size()

    def payload(self) -> str:
        """What is ready, by value."""
        text = base64.b64encode(pickle.dumps(self.ready)).decode()
        self.ready, self.size = [], 0
        return text


class ShardWay:
    """One payload for each tensor-parallel rank, bucket by bucket. Servers may differ in their number of ranks."""

    session = True

    def __init__(self, spec: ModelSpec, bucket_bytes: int) -> None:
        self.spec, self.bucket_bytes = spec, bucket_bytes
        self.trouble: str | None = None

    def send(self, named: Iterable[tuple[str, Tensor]], update: Update, run: Run) -> None:
        """Drain `named`; all buckets but the last leave the version as it is."""
        self.trouble = None
        sizes = sorted({server.tp for server in update.servers})
        try:
            ranks = {tp: [_Rank.of(InferenceWeights(self.spec, tp), r) for r in range(tp)] for tp in sizes}
        except ValueError as error:
            ranks, self.trouble = {}, f"the model cannot be cut as the servers are ({error}): use weight_sync tensor"
        everyone = [rank for group in ranks.values() for rank in group]
        for name, tensor in named:
            own = tensor.detach().to("cpu")
            for rank in everyone:
                rank.take(name, own)
            if max((rank.size for rank in everyone), default=0) > self.bucket_bytes:
                self._post(ranks, update, run, last=False)
        unfilled = [name for rank in everyone for name in rank.missing]
        if unfilled:
            self.trouble = f"weight update: nothing was sent for {len(unfilled)} parameters, the first is {unfilled[0]}"
        elif ranks:
            self._post(ranks, update, run, last=True)

    def _post(self, ranks: dict[int, list[_Rank]], update: Update, run: Run, *, last: bool) -> None:
        sizes = {tp: sum(rank.size for rank in group) for tp, group in ranks.items()}
        payloads = {tp: [rank.payload() for rank in group] for tp, group in ranks.items()}

        def body(server: Server) -> dict[str, Any]:
            out: dict[str, Any] = {"serialized_named_tensors": payloads[server.tp], "load_format": "direct"}
            return out | {"flush_cache": last} | ({"weight_version": update.version_name} if last else {})

        run(update.checked(api.FROM_TENSOR, body))
        update.bytes += sum(sizes[server.tp] for server in update.servers)
        update.transfers += 1
