"""Supervised examples in the actor's update, against forgetting: a few more samples in every optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from megappo.data.batch import RolloutBatch
from megappo.data.sft_rows import row_batch
from megappo.trainer.planning import Step, budget, plan_steps

if TYPE_CHECKING:
    from megappo.trainer.setup import PPORun


def mixed_in(run: PPORun, batch: RolloutBatch, minis: list[np.ndarray]) -> tuple[RolloutBatch, list[Step]]:
    """The actor's batch with examples behind its samples, and those of every step (`minis`: the policy's samples).

    The examples are planned like all samples, in micro-batches of their own: the policy's stay what they are.
    """
    actor, engine = run.config.actor, run.actor
    counts = [examples_per_step(actor.sft_mix.fraction, len(mini)) for mini in minis]
    chosen = draw(len(run.sft_data), sum(counts), (run.config.trainer.seed, run.iteration))
    rows = [run.sft_data[i] for i in chosen]
    steps = np.split(np.arange(len(rows)), np.cumsum(counts)[:-1])
    sizes = budget(actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu)
    schedule = plan_steps(engine, np.array([len(row) for row in rows]), steps, sizes)
    examples = row_batch(rows, engine.placement(schedule.owner), dist.get_rank())
    examples.info.sft[:] = True
    examples.info.sample_id = -1 - np.array(chosen)  # in messages: no sample of the policy
    first, out = len(batch.info), []
    for step, ranks in zip(steps, schedule.micro_batches, strict=True):
        mine = [] if engine.dp_rank is None else ranks[engine.dp_rank]
        out.append((first + step, [[first + sample for sample in micro] for micro in mine]))
    return batch.followed_by(examples), out


def examples_per_step(fraction: float, samples: int) -> int:
    """Examples beside so many samples of the policy: at least one."""
    return max(1, math.ceil(fraction * samples - 1e-9))


def draw(n: int, count: int, seed: tuple[int, int]) -> list[int]:
    """`count` of n examples, from (seed, iteration) alone; none comes twice before all have come."""
    random = np.random.RandomState((*seed, 0x5F7))  # RandomState: its stream is frozen across numpy releases
    rounds = [random.permutation(n) for _ in range(-(-count // n))]
    return np.concatenate(rounds)[:count].tolist()
