"""Dynamic sampling in the loop: rounds of generating and scoring until enough groups carry signal (`rewards.dynamic`).

What is drawn is a pure function of the data position and of scores that all ranks hold, so a resumed run, and one on
another number of ranks, draws the same prompts.
"""

from __future__ import annotations

import numpy as np

from megappo.data.batch import RolloutBatch
from megappo.data.prompts import PromptRow
from megappo.observe.timing import Timer
from megappo.parallel.reduce import gather_objects
from megappo.rewards import dynamic
from megappo.rollout.base import GeneratedSample
from megappo.trainer import phases
from megappo.trainer.phases import Metrics, Part
from megappo.trainer.setup import PPORun


def collect(run: PPORun, timer: Timer) -> tuple[list[GeneratedSample], list[PromptRow], RolloutBatch, Metrics]:
    """This rank's share of the groups that are kept, and the batch of all ranks' with groups 0 to n − 1. Collective.

    The rewards' statistics, running and reported, count every response that was scored, kept or not: what is left out
    depends on the scores.

    Raises:
        UserError: too few groups carry signal, with `shortfall: fail`.
    """
    settings = run.config.algorithm.dynamic_sampling
    wanted = run.config.data.train_batch_size
    parts: list[Part] = []
    seen = (np.empty(0, np.int64), np.empty(0), np.empty(0, bool))
    draw = wanted
    while True:
        with timer("gen"):
            samples, rows = phases.draw(run, draw, len(parts))
        with timer("reward"):
            parts.append(Part(samples, rows, phases.measure(run, samples, rows)))
            seen = tuple(np.concatenate(pair) for pair in zip(seen, _everyones(parts[-1]), strict=True))
        ids, scores, valid = seen
        groups = dynamic.find_signal(scores, ids, valid, signal=settings.signal)
        plan = dynamic.plan_refill(groups, wanted, len(parts), settings.max_rounds, settings.shortfall)
        if plan.finished:
            break
        draw = plan.draw
    phases.record(run, [sample for part in parts for sample in part.samples])
    with timer("reward"):
        batch, metrics = phases.score_parts(run, parts, keep=plan.keep)
    metrics |= dynamic.metrics(groups, plan, len(parts))
    if valid.any():
        metrics["dynamic_sampling/score_mean"] = float(scores[valid].mean())
    kept = [pair for part in parts for pair in zip(part.samples, part.rows, strict=True) if pair[0].group_id >= 0]
    return [sample for sample, _ in kept], [row for _, row in kept], batch, metrics


def _everyones(part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups, raw scores and whether they count, of all ranks' samples of a round. Collective."""
    groups = np.array([sample.group_id for sample in part.samples], np.int64)
    mine = (groups, part.scored.scores, part.finished & ~part.scored.dropped)
    return tuple(np.concatenate(columns) for columns in zip(*gather_objects(mine), strict=True))
