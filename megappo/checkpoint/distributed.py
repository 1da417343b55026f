"""Model and optimizer of one role as a Megatron distributed checkpoint: saved in one layout, loaded in any."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megappo.engine.engine import ModelEngine
from megappo.errors import UserError

_METADATA = {
    # Optimizer state is stored by model parameter, not by the buffers of one layout: loads in any other layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def _sharded_state(engine: ModelEngine, *, loading: bool) -> dict:
    metadata = {**_METADATA, "dp_cp_group": engine.context.dp_cp_group}
    chunks = engine.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
    if engine.optimizer is not None:
        model_state = dict(state) if len(chunks) > 1 else state["model"]
        state["optimizer"] = engine.optimizer.inner.sharded_state_dict(
            model_state, is_loading=loading, metadata=metadata
        )
    return state


@contextmanager
def _in_process_writes() -> Iterator[None]:
    """Megatron's file writer without its helper processes.

    It writes each file in a forked process and collects the results through a manager process. A save that waits
    for the files needs neither: they cost seconds, fork a process that has threads, and outlive a rank that is killed.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async, torch

    class Writer(filesystem_async.FileSystemWriterAsync):
        def get_save_function_and_args(self):
            save, preload, args = super().get_save_function_and_args()
            return save and self._write, preload, args

        def _write(self, rank: int, buckets: list, results: queue.Queue) -> None:
            transforms = [self.transforms] if hasattr(self, "transforms") else []
            done: queue.Queue = queue.Queue()
            pending: queue.Queue = queue.Queue()
            for number, bucket in enumerate(buckets):
                pending.put(number)
                self.write_preloaded_data(transforms, number, bucket, done, pending, True)
            outcomes = dict(done.get() for _ in buckets)
            failures = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
            results.put(failures[0] if failures else outcomes)

    real = torch.FileSystemWriterAsync, filesystem_async._get_write_results_queue
    torch.FileSystemWriterAsync, filesystem_async._get_write_results_queue = Writer, queue.Queue
    try:
        yield
    finally:
        torch.FileSystemWriterAsync, filesystem_async._get_write_results_queue = real


def save_engine(engine: ModelEngine, folder: Path) -> None:
    """Write the role into `folder`, every rank its part. Collective."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    folder.mkdir(parents=True, exist_ok=True)
    with engine.context, _in_process_writes():
        state = _sharded_state(engine, loading=False)
        strategy = get_default_save_sharded_strategy("torch_dist")
        strategy = FullyParallelSaveStrategyWrapper(strategy, engine.context.dp_cp_group)
        dist_checkpointing.save(state, str(folder), strategy, content_metadata=_METADATA)


def load_engine(engine: ModelEngine, folder: Path) -> None:
    """Read the role from `folder`, whatever layout wrote it. Collective.

    Raises:
        UserError: the checkpoint is of another model.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint import CheckpointException
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    with engine.context:
        state = _sharded_state(engine, loading=True)
        strategy = get_default_load_sharded_strategy(str(folder))
        strategy = FullyParallelLoadStrategyWrapper(strategy, engine.context.dp_cp_group)
        try:
            loaded = dist_checkpointing.load(state, str(folder), strategy)
        except (CheckpointingException, CheckpointException) as err:
            cause = str(err).strip().splitlines()[-1]
            raise UserError(f"{folder} does not fit the model ({cause}): use another trainer.output_dir") from None
        chunks = engine.chunks
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{i}"], strict=True)
        if engine.optimizer is not None:
            engine.optimizer.inner.load_state_dict(loaded["optimizer"])
