"""Pure rank arithmetic: which rank holds which coordinates and which layers. No torch.distributed.

Megatron-core orders ranks `tp-cp-dp-pp`, tensor parallel fastest:
`rank = tp + TP·(cp + CP·(dp + DP·pp))`. Experts divide the same ranks of a stage anew, expert-tensor parallel
fastest: `rank = etp + ETP·(ep + EP·(edp + EDP·pp))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits in the grid."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """The grid of one role.

    Attributes:
        world: number of ranks in the grid; they are the global ranks `first_rank` to `first_rank + world - 1`.
        tp, pp, cp: tensor-, pipeline- and context-parallel sizes.
        vpp: virtual pipeline chunks per stage (1 = not interleaved).
        sequence_parallel: sequence-parallel norms; only meaningful with tp > 1.
        first_stage_layers, last_stage_layers: explicit layer counts of uneven pipelines.
        ep, etp: expert- and expert-tensor-parallel sizes; only meaningful for mixtures of experts.
    """

    world: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    ep: int = 1
    etp: int = 1
    first_rank: int = 0

    def __post_init__(self):
        if self.world % (self.tp * self.pp * self.cp):
            raise ValueError(
                f"{self.world} ranks cannot be divided into tp {self.tp} x pp {self.pp} x cp {self.cp}: "
                f"use a multiple of {self.tp * self.pp * self.cp} ranks"
            )
        if (self.world // self.pp) % (self.ep * self.etp):
            raise ValueError(
                f"the {self.world // self.pp} ranks of a pipeline stage cannot be divided into "
                f"ep {self.ep} x etp {self.etp}"
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def ranks(self) -> range:
        """The global ranks of the grid."""
        return range(self.first_rank, self.first_rank + self.world)

    def coordinates(self, rank: int) -> Coordinates:
        """Place of a global rank in the grid.

        Raises:
            ValueError: the rank is not part of it.
        """
        rest, tp = divmod(self._index(rank), self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Global rank at these coordinates."""
        return self.first_rank + tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def _index(self, rank: int) -> int:
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not among the ranks {self.ranks} of this layout")
        return rank - self.first_rank

    def expert_coordinates(self, rank: int) -> tuple[int, int, int]:
        """`(etp, ep, edp)`: slice of an expert's matrices, share of the experts, replica of both."""
        rest, etp = divmod(self._index(rank) % (self.world // self.pp), self.etp)
        edp, ep = divmod(rest, self.ep)
        return etp, ep, edp

    def replica_ranks(self, dp: int) -> list[int]:
        """Every rank (all tp, cp, pp) of one data-parallel replica, ascending."""
        grid = product(range(self.pp), range(self.cp), range(self.tp))
        return sorted(self.rank(tp=t, cp=c, dp=dp, pp=p) for p, c, t in grid)

    def layers(self, num_layers: int, pp: int, chunk: int = 0) -> range:
        """Global indices of the decoder layers in virtual chunk `chunk` of pipeline stage `pp`.

        Raises:
            ValueError: as `stage_layers`.
        """
        counts = [count // self.vpp for count in self.stage_layers(num_layers)]
        start = chunk * sum(counts) + sum(counts[:pp])
        return range(start, start + counts[pp])

    def stage_layers(self, num_layers: int) -> list[int]:
        """Number of layers on each pipeline stage, a multiple of `vpp`.

        Raises:
            ValueError: the layers cannot be divided evenly over the stages left to divide, or over a stage's chunks.
        """
        counts: list[int | None] = [None] * self.pp
        if self.first_stage_layers is not None:
            counts[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            counts[-1] = self.last_stage_layers
        open_stages = [i for i, count in enumerate(counts) if count is None]
        rest = num_layers - sum(count for count in counts if count is not None)
        if (rest and not open_stages) or (open_stages and (rest <= 0 or rest % len(open_stages))):
            raise ValueError(f"{num_layers} layers cannot be divided over {self.pp} pipeline stages ({counts})")
        filled = [rest // len(open_stages) if count is None else count for count in counts]
        if any(count % self.vpp for count in filled):
            raise ValueError(f"{num_layers} layers, {filled} a stage, cannot be divided into {self.vpp} chunks a stage")
        return filled

    def chunks(self, num_layers: int, rank: int) -> Iterator[tuple[int, range]]:
        """`(chunk, layers)` of each model chunk that `rank` holds."""
        pp = self.coordinates(rank).pp
        for chunk in range(self.vpp):
            yield chunk, self.layers(num_layers, pp, chunk)

    def is_first(self, rank: int, chunk: int = 0) -> bool:
        """Does this chunk hold the embedding?"""
        return self.coordinates(rank).pp == 0 and chunk == 0

    def is_last(self, rank: int, chunk: int = 0) -> bool:
        """Does this chunk hold the final norm and the head?"""
        return self.coordinates(rank).pp == self.pp - 1 and chunk == self.vpp - 1
