"""The critic's head is a copy on every tensor-parallel rank, and stays one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ppo_case import write_case
from warm_ranks import on_ranks

from megappo.checkpoint.hf import HFReader
from megappo.config.schema import OptimConfig
from megappo.data.batch import RolloutBatch, SampleInfo
from megappo.data.schedule import Budget, plan
from megappo.engine.engine import EngineOptions, ModelEngine
from megappo.engine.losses import ValueLoss
from megappo.models.spec import load_spec
from megappo.parallel.layout import ParallelLayout

STEPS = 20


def train_head(model: str, layout: dict) -> tuple[list[list[float]], list[list[float]]]:
    """Head weights of every rank before and after 20 steps on random returns."""
    import numpy as np

    world = dist.get_world_size()
    grid = ParallelLayout(world=world, **layout)
    engine = ModelEngine(
        load_spec(model), grid, EngineOptions(critic=True), optim=OptimConfig(lr=1e-2), total_steps=STEPS
    )
    engine.load_hf(HFReader(model))
    length = np.array([5, 9, 7, 4])
    zeros = np.zeros(4, dtype=np.int64)
    info = SampleInfo(np.arange(4), np.arange(4), zeros + 2, length, length - 2, zeros + 0.0, zeros, zeros, ["s"] * 4)
    everything = np.arange(4)
    schedule = plan(length, [everything], grid.dp, Budget(samples=2))
    placement = engine.placement(schedule.owner)
    mine = placement.samples_of(dist.get_rank())
    total = int(length[mine].sum())
    generator = torch.Generator().manual_seed(3)
    mask = torch.cat([torch.arange(n) >= 2 for n in length[mine]])
    columns = {
        "tokens": torch.randint(3, 10, (total,), generator=generator),
        "loss_mask": mask,
        "values": torch.zeros(total),
        "returns": torch.randn(total, generator=generator),
    }
    batch = RolloutBatch(info, placement, mine, columns)

    def heads() -> list[list[float]]:
        head = engine.chunks[-1].output_layer if engine.context.is_last_stage else None
        own = [] if head is None else [*head.weight.flatten().tolist(), *head.bias.tolist()]
        out: list = [None] * world
        dist.all_gather_object(out, own)
        return [weights for weights in out if weights]

    before = heads()
    for _ in range(STEPS):
        micro = schedule.micro_batches[0][engine.dp_rank]
        stats = engine.train_step(batch, everything, micro, ValueLoss(0.5), agg_mode="token-mean")
        assert stats.applied and stats.grad_norm > 0
    return before, heads()


def test_head_weights_are_equal_on_all_ranks_after_many_steps_with_sequence_parallelism(tmp_path):
    file = write_case(tmp_path / "case", layers=2)
    model = str(file.parent / "model")
    for world, layout in (
        (2, {"tp": 2, "sequence_parallel": True}),
        (2, {"tp": 2}),
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    ):
        before, after = on_ranks(world, train_head, model, layout)
        assert len(after) == 2 and after[0] == after[1], layout
        assert all(weight == 0 for weight in before[0]) and any(abs(w) > 1e-2 for w in after[0])
