"""The rollout batch: metadata of every sample on every rank, tokens and per-token columns only where they are needed.

Because every rank knows every sample's length and holders, any rank can compute who sends what to whom: samples
move with one all-to-all of known sizes, and nobody asks anybody.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.parallel.layout import ParallelLayout

FINISH_REASONS = ("stop", "length", "abort")


@dataclass
class SampleInfo:
    """Replicated metadata of n samples, one array entry each.

    `length` counts prompt and response, `trainable` the tokens with loss mask 1, both in tokens. `score` is what is
    reported; `reward` (default: the score) is what is trained on. `dropped` (default: none): the sample could not be
    scored and is not trained on. `sft` (default: none): an example to imitate, which counts in no denominator of the
    policy.
    """

    sample_id: np.ndarray
    group_id: np.ndarray
    prompt_len: np.ndarray
    length: np.ndarray
    trainable: np.ndarray
    score: np.ndarray
    finish_reason: np.ndarray  # index into FINISH_REASONS
    weight_version: np.ndarray
    source: list[str]
    reward: np.ndarray = field(default=None)  # type: ignore[assignment]
    dropped: np.ndarray = field(default=None)  # type: ignore[assignment]
    sft: np.ndarray = field(default=None)  # type: ignore[assignment]

    def __post_init__(self):
        if self.reward is None:
            self.reward = self.score
        if self.dropped is None:
            self.dropped = np.zeros(len(self), bool)
        if self.sft is None:
            self.sft = np.zeros(len(self), bool)

    def __len__(self) -> int:
        return len(self.sample_id)

    @property
    def response_len(self) -> np.ndarray:
        return self.length - self.prompt_len

    @property
    def truncated(self) -> np.ndarray:
        """Cut by the length limit (bool): the episode did not end there."""
        return self.finish_reason == FINISH_REASONS.index("length")

    @property
    def aborted(self) -> np.ndarray:
        """Given up by the rollout engine (bool): nothing of it is trained on."""
        return self.finish_reason == FINISH_REASONS.index("abort")

    @property
    def whole(self) -> np.ndarray:
        """A finished response with a score (bool)."""
        return ~(self.aborted | self.dropped)


@dataclass(frozen=True)
class Placement:
    """Which ranks hold each sample: every rank of data-parallel replica `owner[i]` in `layout`."""

    layout: ParallelLayout
    owner: np.ndarray

    def samples_of(self, rank: int) -> np.ndarray:
        """Ascending indices of the samples that `rank` holds; none for a rank outside the layout."""
        if rank not in self.layout.ranks:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.owner == self.layout.coordinates(rank).dp)

    def holders(self) -> list[list[int]]:
        """`holders()[dp]`: the ranks of each replica."""
        return [self.layout.replica_ranks(dp) for dp in range(self.layout.dp)]

    def same_as(self, other: Placement) -> bool:
        return self.layout == other.layout and np.array_equal(self.owner, other.owner)


@dataclass
class RolloutBatch:
    """This rank's view of a batch.

    Attributes:
        info: metadata of all samples, the same on every rank.
        placement: who holds which samples.
        indices: the samples held here, ascending indices into `info`.
        columns: `[total tokens held here]` tensors, sample after sample in the order of `indices`. Always there:
            `tokens` (int64) and `loss_mask` (bool, 1 = trained on). Others are fp32 and aligned with the token they
            speak about: `logprobs[t] = log p(tokens[t] | tokens[<t])`, `values[t]` = V before `tokens[t]`.
    """

    info: SampleInfo
    placement: Placement
    indices: np.ndarray
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.cu_seqlens = torch.zeros(len(self.indices) + 1, dtype=torch.int64)
        self.cu_seqlens[1:] = torch.from_numpy(self.info.length[self.indices].astype(np.int64)).cumsum(0)
        self._row = {int(sample): row for row, sample in enumerate(self.indices)}
        total = int(self.cu_seqlens[-1])
        for name, column in self.columns.items():
            if column.shape != (total,):
                raise ValueError(f"column {name} has shape {tuple(column.shape)}, the batch {total} tokens")

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        total = int(self.cu_seqlens[-1])
        if column.shape != (total,):
            raise ValueError(f"column {name} has shape {tuple(column.shape)}, the batch {total} tokens")
        self.columns[name] = column

    def token_index(self, samples: list[int]) -> Tensor:
        """Positions in the local columns of the tokens of `samples` (indices into `info`, all held here)."""
        cu = self.cu_seqlens
        rows = [self._row[s] for s in samples]
        if not rows:
            return torch.empty(0, dtype=torch.int64)
        return torch.cat([torch.arange(int(cu[r]), int(cu[r + 1])) for r in rows])

    def sample_values(self, per_sample: np.ndarray) -> Tensor:
        """A replicated per-sample array cut to the samples held here, fp32 `[local n]`."""
        return torch.from_numpy(np.ascontiguousarray(per_sample[self.indices])).float()

    def followed_by(self, other: RolloutBatch) -> RolloutBatch:
        """The samples of both batches, this one's first; columns that `other` does not have are zero there."""
        if self.placement.layout != other.placement.layout:
            raise ValueError("the batches are spread over different layouts")
        first = len(self.info)
        joined = {
            name: mine + theirs if isinstance(mine, list) else np.concatenate([mine, theirs])
            for name, mine in vars(self.info).items()
            for theirs in (getattr(other.info, name),)
        }
        placement = replace(self.placement, owner=np.concatenate([self.placement.owner, other.placement.owner]))
        more = int(other.cu_seqlens[-1])
        columns = {
            name: torch.cat([column, other.columns.get(name, column.new_zeros(more))])
            for name, column in self.columns.items()
        }
        indices = np.concatenate([self.indices, first + other.indices])
        return RolloutBatch(SampleInfo(**joined), placement, indices, columns)

    def only(self, *names: str) -> RolloutBatch:
        """The same batch with just these columns."""
        return replace(self, columns={name: self.columns[name] for name in names})

    def to(self, placement: Placement) -> RolloutBatch:
        """Move every column to where `placement` wants it. Collective; a no-op when nothing has to move."""
        if self.placement.same_as(placement):
            return replace(self, placement=placement, columns=dict(self.columns))
        return _exchange(self, placement)


def _transfers(info: SampleInfo, source: Placement, target: Placement, world: int):
    """`moves[src][dst]`: ascending sample indices that rank src sends to rank dst (src == dst: kept)."""
    source_ranks, target_ranks = source.holders(), target.holders()
    moves: list[list[list[int]]] = [[[] for _ in range(world)] for _ in range(world)]
    for i in range(len(info)):
        have = source_ranks[source.owner[i]]
        for n, rank in enumerate(target_ranks[target.owner[i]]):
            sender = rank if rank in have else have[(i + n) % len(have)]
            moves[sender][rank].append(i)
    return moves


def _exchange(batch: RolloutBatch, target: Placement) -> RolloutBatch:
    """One all-to-all for each element type."""
    rank, world = dist.get_rank(), dist.get_world_size()
    moves = _transfers(batch.info, batch.placement, target, world)
    length = batch.info.length
    outgoing = [batch.token_index(moves[rank][dst]) for dst in range(world)]
    incoming = [moves[src][rank] for src in range(world)]
    sizes_out = [len(index) for index in outgoing]
    sizes_in = [int(length[samples].sum()) if samples else 0 for samples in incoming]
    arrived = np.array([i for samples in incoming for i in samples], dtype=np.int64)
    order = np.argsort(arrived, kind="stable")
    starts = np.concatenate([[0], np.cumsum(length[arrived])]).astype(np.int64) if len(arrived) else [0]
    reorder = [torch.arange(int(starts[k]), int(starts[k]) + int(length[arrived[k]])) for k in order]
    restore = torch.cat(reorder) if reorder else torch.empty(0, dtype=torch.int64)
    columns = {}
    send_index = torch.cat(outgoing)
    for dtype in sorted({c.dtype for c in batch.columns.values()}, key=str):
        names = [name for name, column in batch.columns.items() if column.dtype == dtype]
        wire = torch.uint8 if dtype == torch.bool else dtype
        send = torch.stack([batch.columns[name][send_index].to(wire) for name in names], dim=1)
        received = torch.empty(sum(sizes_in), len(names), dtype=wire)
        dist.all_to_all_single(received, send.contiguous(), sizes_in, sizes_out)
        for i, name in enumerate(names):
            columns[name] = received[restore, i].to(dtype)
    return RolloutBatch(batch.info, target, arrived[order], {name: columns[name] for name in batch.columns})
