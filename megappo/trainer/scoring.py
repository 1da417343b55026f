"""Scores of responses: first from the reward models, which all ranks run together, then from everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megappo.data.batch import RolloutBatch
from megappo.data.offline import OfflineRow
from megappo.data.prompts import PromptRow
from megappo.data.schedule import Budget
from megappo.engine.engine import ModelEngine
from megappo.engine.totals import share_per_sample
from megappo.rewards.combine import Scored
from megappo.rewards.model import RewardScale
from megappo.rollout.base import GeneratedSample
from megappo.rollout.collect import assemble, reward_samples
from megappo.rollout.offline import OfflineEngine, recorded_scores
from megappo.trainer.planning import even_placement, forward_micro_batches

if TYPE_CHECKING:
    from megappo.trainer.setup import PPORun


@dataclass
class RewardModel:
    """A frozen scalar model in its own layout, the scale of its scores, and the size of its micro-batches."""

    engine: ModelEngine
    scale: RewardScale
    sizes: Budget

    def rewards(self, batch: RolloutBatch) -> np.ndarray:
        """Rewards of all samples of `batch`, on every rank: the head's output at the last token, scaled. Collective.

        A response that was cut has no end token and is scored at its last one.
        """
        length = batch.info.length
        placement = even_placement(self.engine, length, self.sizes)
        there = batch.only("tokens", "loss_mask").to(placement)
        micro = forward_micro_batches(self.engine, length, placement.owner, self.sizes)
        lasts = self.engine.forward(there, micro, "values")["last_values"]
        scores = share_per_sample(self.engine, there, lasts)
        self.engine.sleep()
        return self.scale(scores)


def measure(run: PPORun, samples: Sequence[GeneratedSample], rows: Sequence[PromptRow]) -> Scored:
    """Score this rank's samples with all rewards. Collective where a reward model is among them."""
    given = model_rewards(run.reward_models, samples, rows)
    if isinstance(run.rollout, OfflineEngine) and all(isinstance(row, OfflineRow) for row in rows):
        recorded = recorded_scores(samples, rows)
        given |= {name: recorded for name, component in run.reward.components.items() if component.recorded}
    return run.reward.measure(reward_samples(samples, rows, run.tokenizer), given)


def model_rewards(
    models: dict[str, RewardModel], samples: Sequence[GeneratedSample], rows: Sequence[PromptRow]
) -> dict[str, np.ndarray]:
    """Rewards of this rank's samples from each reward model. Collective."""
    if not models:
        return {}
    nothing = [0.0] * len(samples)
    batch = assemble(samples, rows, nothing, nothing, [False] * len(samples))
    place = {int(sample_id): i for i, sample_id in enumerate(batch.info.sample_id)}
    mine = np.array([place[s.sample_id] for s in samples], dtype=np.int64)
    return {name: model.rewards(batch)[mine] for name, model in models.items()}
