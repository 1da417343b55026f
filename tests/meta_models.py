"""Real models of any size and layout, as one rank of many sees them: on the meta device, with fake process groups."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megappo.parallel import backend, cpu_patches


@contextlib.contextmanager
def fake_rank(world: int, rank: int, *, meta: bool = True) -> Iterator[None]:
    """This process as `rank` of `world` ranks that do not exist. Collectives return at once, without meaning."""
    backend.install()
    meta_device = torch.device("meta")
    real = dist.new_group, backend.device, cpu_patches._CPU
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    dist.new_group = lambda ranks=None, **_: real[0](ranks, backend="fake")
    if meta:
        backend.device, cpu_patches._CPU = (lambda: meta_device), meta_device
    try:
        with meta_device if meta else contextlib.nullcontext():
            yield
    finally:
        dist.new_group, backend.device, cpu_patches._CPU = real
        dist.destroy_process_group()


def allocated(config: dict, folder: Path, layout, dtype, *, critic: bool, trained: bool, distributed: bool = True):
    """What megatron-core allocates for this rank: `(weights, gradients, optimizer)` in bytes."""
    from megatron.core import optimizer as optimizer_module
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megappo.config.schema.optim import OptimConfig
    from megappo.engine.optimizer import RoleOptimizer
    from megappo.models.build import build_model
    from megappo.models.spec import load_spec
    from megappo.parallel.groups import ParallelContext

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, **config}))
    context = ParallelContext(layout)
    with context:
        chunks = build_model(load_spec(folder), context, dtype, critic=critic)
        if not trained:
            return _bytes(p for chunk in chunks for p in chunk.parameters()), 0, 0
        # As ModelEngine._wrap.
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, check_for_nan_in_grad=False
        )
        models = [
            DistributedDataParallel(chunks[0].config, ddp, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(chunks)
        ]
        with context.as_world(optimizer_module):
            optimizer = RoleOptimizer(OptimConfig(), models, dtype=dtype, distributed=distributed, total_steps=1)
    buffers = [b for model in models for b in (*model.buffers, *model.expert_parallel_buffers)]
    weights = [b.param_data for b in buffers] if distributed else [p for c in chunks for p in c.parameters()]
    masters = sum(master.numel() for master in optimizer.masters())
    # AdamW makes its two fp32 moments with the first step; in fp32 the masters are the model's own weights.
    state = masters * (8 if dtype == torch.float32 else 12)
    return _bytes(weights), _bytes(b.grad_data for b in buffers), state


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
