"""REBEL in the PPO loop: what the actor regresses on, mini-batch by mini-batch."""

from __future__ import annotations

import numpy as np
import torch

from megappo.algorithms import advantages as adv
from megappo.algorithms.rebel import rebel_coefficients
from megappo.algorithms.segments import segment_sum, zero_outside
from megappo.data.batch import RolloutBatch
from megappo.engine.totals import share_per_sample
from megappo.trainer.planning import RolePlan
from megappo.trainer.setup import PPORun


class RebelTarget:
    """Before every optimizer step, writes REBEL's coefficients into the column `advantages`.

    The objective compares whole responses of a prompt, which need not be on one rank: one forward pass over the
    mini-batch gives all log-ratios; the step itself is then `−advantages · log-prob`, token by token.
    """

    def __init__(self, run: PPORun, batch: RolloutBatch, plan: RolePlan):
        self.run, self.batch, self.plan = run, batch, plan
        self.rewards = share_per_sample(run.actor, batch, segment_sum(batch["rewards"], batch.cu_seqlens))
        self.values: list[float] = []

    def __call__(self, mini: int) -> None:
        """Collective over all ranks of the run."""
        run, batch = self.run, self.batch
        mask, cu, info = batch["loss_mask"], batch.cu_seqlens, batch.info
        logprobs = run.actor.forward(batch, self.plan.micro_batches(mini), "logprobs")["logprobs"]
        changes = zero_outside(logprobs - batch["old_logprobs"], mask)
        log_ratios = share_per_sample(run.actor, batch, segment_sum(changes, cu))
        members = self.plan.minis[mini]
        members = members[info.trainable[members] > 0]
        coefficients, values = rebel_coefficients(
            torch.from_numpy(log_ratios[members]),
            torch.from_numpy(self.rewards[members]),
            torch.from_numpy(info.group_id[members]),
            run.config.actor.rebel_eta,
        )
        advantages = np.zeros(len(info))
        advantages[members] = -coefficients.numpy()
        batch["advantages"] = adv.broadcast_to_tokens(batch.sample_values(advantages), mask, cu)
        self.values.append(float(values.mean()) if len(members) else 0.0)

    def metrics(self) -> dict[str, float]:
        """`actor/rebel_loss`: the objective, mean over the iteration's optimizer steps."""
        return {"actor/rebel_loss": float(np.mean(self.values))}
