"""Model and optimizer of one role as a Megatron distributed checkpoint: saved in one layout, loaded in any."""

from __future__ import annotations

from pathlib import Path

from megappo.engine.engine import ModelEngine

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


def save_engine(engine: ModelEngine, folder: Path) -> None:
    """Write the role into `folder`, every rank its part. Collective."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    folder.mkdir(parents=True, exist_ok=True)
    with engine.context:
        state = _sharded_state(engine, loading=False)
        strategy = get_default_save_sharded_strategy("torch_dist")
        strategy = FullyParallelSaveStrategyWrapper(strategy, engine.context.dp_cp_group)
        dist_checkpointing.save(state, str(folder), strategy, content_metadata=_METADATA)


def load_engine(engine: ModelEngine, folder: Path) -> None:
    """Read the role from `folder`, whatever layout wrote it. Collective."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    with engine.context:
        state = _sharded_state(engine, loading=True)
        strategy = get_default_load_sharded_strategy(str(folder))
        strategy = FullyParallelLoadStrategyWrapper(strategy, engine.context.dp_cp_group)
        loaded = dist_checkpointing.load(state, str(folder), strategy)
        chunks = engine.chunks
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{i}"], strict=True)
        if engine.optimizer is not None:
            engine.optimizer.inner.load_state_dict(loaded["optimizer"])
