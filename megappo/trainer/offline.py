"""Offline PPO: what a run on recorded responses needs beside the loop that all runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megappo.data.batch import RolloutBatch
from megappo.data.offline import OfflineDataset, OfflineRow
from megappo.parallel.reduce import gather_objects
from megappo.rollout.collect import assemble, my_share
from megappo.rollout.offline import BehaviourFile, OfflineEngine, recorded_sample
from megappo.trainer.planning import even_placement, forward_micro_batches, log_prob_budget
from megappo.trainer.setup import PPORun
from megappo.trainer.watch import Watch

_CHUNK = 256  # rows scored at a time


def prepare_offline(run: PPORun, watch: Watch) -> None:
    """Have the behaviour policy's log-probs at hand: recorded ones, or the starting policy's, computed once.

    They are computed before the first update and kept in `trainer.output_dir`, where a resumed run finds them.
    Collective.

    Raises:
        UserError: the run resumes and the file is missing, damaged or of other data.
    """
    engine, data = run.rollout, run.train_data
    if not isinstance(engine, OfflineEngine) or (data.has_logprobs and run.config.offline.behaviour == "auto"):
        return
    file = BehaviourFile(Path(run.config.trainer.output_dir) / "behaviour_logprobs.safetensors", data)
    if run.iteration == 0:
        watch.say(f"log-probs of {file.tokens} recorded tokens under the starting policy")
        parts = [part for chunk in _scored(run, data) for part in chunk]
        if dist.get_rank() == 0:
            file.write(parts)
        dist.barrier()
    file.check()
    engine.behaviour = file


def _scored(run: PPORun, data: OfflineDataset) -> Iterator[list[np.ndarray]]:
    """Log-probs of the tokens of every response, in order, `_CHUNK` rows at a time."""
    sizes = log_prob_budget(run.config.actor)
    for start in range(0, len(data), _CHUNK):
        batch = _batch(data[start : start + _CHUNK])
        batch = batch.to(even_placement(run.actor, batch.info.length, sizes))
        micro = forward_micro_batches(run.actor, batch.info.length, batch.placement.owner, sizes)
        logprobs = run.actor.forward(batch, micro, "logprobs")["logprobs"].numpy()
        mine: dict[int, np.ndarray] = {}
        if run.actor.primary:
            ends = batch.cu_seqlens[1:].tolist()
            for sample, end in zip(batch.indices.tolist(), ends, strict=True):
                mine[sample] = logprobs[end - batch.info.response_len[sample] : end]
        everyone = {sample: part for held in gather_objects(mine) for sample, part in held.items()}
        yield [everyone[sample] for sample in range(len(batch.info))]


def _batch(rows: list[OfflineRow]) -> RolloutBatch:
    """All responses of some rows, unscored, spread over the ranks."""
    n = len(rows[0].responses)
    items = my_share([(i * n + k, i, row, row.responses[k]) for i, row in enumerate(rows) for k in range(n)])
    samples = [recorded_sample(sample, group, row, response, None) for sample, group, row, response in items]
    zeros = [0.0] * len(samples)
    return assemble(samples, [row for _, _, row, _ in items], zeros, zeros, [False] * len(samples))
