"""Generation one batch ahead (`trainer.rollout_lag: 1`): while batch k is trained on, batch k + 1 is generated.

The weights that generate batch k + 1 are those before the update on batch k: one update old when it is trained on,
never more. Importance weights (`algorithm.correction`) make up for it. The data order is that of a run without lag; a
batch that was under way when a run ended is generated anew when it is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megappo.data.prompts import PromptRow
from megappo.rollout.base import GeneratedSample
from megappo.trainer import phases
from megappo.trainer.effective import effective_config
from megappo.trainer.setup import PPORun


@dataclass(frozen=True)
class NextBatch:
    """What is under way: this rank's rows, and where in the data it ends."""

    rows: list[PromptRow]
    data_position: int


def generate(run: PPORun) -> tuple[list[GeneratedSample], list[PromptRow]]:
    """This rank's share of the batch that was begun an iteration ago (of a fresh one, if none was). Collective."""
    ahead, run.ahead = run.ahead, None
    if ahead is None:
        catch_up(run)
        return phases.generate(run)
    samples = run.rollout.finish(run.weight_version)
    run.data_position = ahead.data_position
    phases.record(run, samples)
    return samples, ahead.rows


def go_on(run: PPORun) -> phases.Metrics:
    """Send the newest weights and begin the next batch, if there will be one. Collective."""
    metrics = catch_up(run)
    following = run.iteration + 1
    if following < run.total_iterations:
        config = effective_config(run.base, following, run.total_iterations, run.guard.adjustments)
        here = run.data_position
        requests, rows = phases.draw_requests(run, config.data.train_batch_size, following)
        run.ahead = NextBatch(rows, run.data_position)
        run.data_position = here  # a checkpoint holds what has been trained on
        run.rollout.start(requests, replace(run.sampling, temperature=config.rollout.temperature))
    return metrics


def catch_up(run: PPORun) -> phases.Metrics:
    """Give the engine the newest weights, unless it has them. Collective."""
    if run.rollout.weight_version == run.weight_version:
        return {}
    return phases.sync_weights(run)


def discard(run: PPORun) -> None:
    """What is under way is not wanted any more: the run goes back."""
    if run.ahead is not None:
        run.rollout.drop()
        run.ahead = None
