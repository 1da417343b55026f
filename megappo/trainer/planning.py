"""Which samples a role trains on together, on which replica, in which micro-batch: one plan a role and iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megappo.config.schema import ActorConfig
from megappo.data.batch import Placement
from megappo.data.schedule import Budget, MicroBatches, Schedule, mini_batches, plan, plan_forward
from megappo.engine.engine import ModelEngine

Step = tuple[np.ndarray, MicroBatches]  # indices of an optimizer step's samples, this rank's micro-batches


@dataclass
class RolePlan:
    """The schedule of one role for one batch.

    The mini-batches are drawn once an iteration, from the seed alone; each PPO epoch visits them in a new order.
    So a sample stays on one rank for the whole iteration, and every mini-batch is balanced over the ranks.
    """

    minis: list[np.ndarray]
    schedule: Schedule
    placement: Placement
    dp_rank: int | None
    seed: tuple[int, ...]
    shuffle: bool

    def micro_batches(self, mini: int) -> MicroBatches:
        """This rank's micro-batches of a mini-batch; none outside the role's layout."""
        return [] if self.dp_rank is None else self.schedule.micro_batches[mini][self.dp_rank]

    def steps(self, epochs: int) -> Iterator[int]:
        """Mini-batch of every optimizer step of the iteration."""
        for epoch in range(epochs):
            order = np.arange(len(self.minis))
            if self.shuffle:
                order = np.random.RandomState((*self.seed, epoch)).permutation(len(self.minis))
            yield from order.tolist()


def plan_steps(engine: ModelEngine, lengths: np.ndarray, steps: list[np.ndarray], budget: Budget) -> Schedule:
    """Plan samples that are used once each, in steps of given composition."""
    return plan(lengths, steps, engine.layout.dp, budget, multiple_of=_multiple(engine))


def role_plan(
    engine: ModelEngine,
    lengths: np.ndarray,
    mini_batch_size: int,
    budget: Budget,
    *,
    seed: tuple[int, ...],
    shuffle: bool,
    unit: int = 1,
) -> RolePlan:
    """Plan a role's update. The same on every rank, without communication.

    Args:
        mini_batch_size: in samples.
        unit: so many neighbouring samples (the responses of one prompt) stay in one mini-batch.
    """
    drawn = mini_batches(len(lengths) // unit, mini_batch_size // unit, seed, shuffle)
    minis = [(units[:, None] * unit + np.arange(unit)).ravel() for units in drawn]
    layout = engine.layout
    schedule = plan(lengths, minis, layout.dp, budget, multiple_of=_multiple(engine))
    placement = engine.placement(schedule.owner)
    return RolePlan(minis, schedule, placement, engine.dp_rank, seed, shuffle)


def even_placement(engine: ModelEngine, lengths: np.ndarray, budget: Budget) -> Placement:
    """All samples spread evenly over a role's replicas, for a forward-only pass."""
    schedule = plan(lengths, [np.arange(len(lengths))], engine.layout.dp, budget, multiple_of=_multiple(engine))
    return engine.placement(schedule.owner)


def forward_micro_batches(engine: ModelEngine, lengths: np.ndarray, owner: np.ndarray, budget: Budget) -> MicroBatches:
    """This rank's micro-batches of a forward-only pass over the samples that its replica owns."""
    ranks = plan_forward(lengths, owner, engine.layout.dp, budget, multiple_of=_multiple(engine))
    return [] if engine.dp_rank is None else ranks[engine.dp_rank]


def _multiple(engine: ModelEngine) -> int:
    """The interleaved pipeline runs micro-batches in groups as large as the pipeline."""
    return engine.layout.pp if engine.layout.vpp > 1 else 1


def budget(dynamic: bool, samples: int, tokens: int) -> Budget:
    """Micro-batches by token budget (`use_dynamic_bsz`) or by number of samples."""
    return Budget(tokens=tokens) if dynamic else Budget(samples=samples)


def log_prob_budget(actor: ActorConfig) -> Budget:
    """Micro-batches of the actor's forward-only passes."""
    return budget(actor.use_dynamic_bsz, actor.log_prob_micro_batch_size_per_gpu, actor.log_prob_max_token_len_per_gpu)
