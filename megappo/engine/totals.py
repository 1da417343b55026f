"""Sums over what a role's replicas hold, the same on every rank of the run."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megappo.data.batch import RolloutBatch
from megappo.engine.engine import ModelEngine


def total(engine: ModelEngine, local: torch.Tensor) -> torch.Tensor:
    """Sum of `local` over a role's replicas, each counted once; the same on every rank of the run. Collective."""
    full = local if engine.primary else torch.zeros_like(local)
    dist.all_reduce(full)
    return full


def share_per_sample(engine: ModelEngine, batch: RolloutBatch, local: torch.Tensor) -> np.ndarray:
    """A number for each sample held here → the array of all samples, on every rank. Collective."""
    full = torch.zeros(len(batch.info), dtype=torch.float64)
    full[torch.from_numpy(batch.indices)] = local.double()
    return total(engine, full).numpy()
