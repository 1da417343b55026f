"""A checkpoint holds the state of the moment it was begun, however long its shards take to reach the disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import make_hf_model
from test_engine_layouts import MINIS, example_batch, losses, shard
from warm_ranks import on_ranks

from megappo.config.schema.optim import OptimConfig


def build(folder):
    from megappo.checkpoint.hf import HFReader
    from megappo.engine.engine import EngineOptions, ModelEngine
    from megappo.models.spec import load_spec
    from megappo.parallel.layout import ParallelLayout

    layout = ParallelLayout(world=2, tp=2)
    engine = ModelEngine(load_spec(folder), layout, EngineOptions(), optim=OptimConfig(lr=1e-2), total_steps=9)
    engine.load_hf(HFReader(folder))
    return engine


def step(engine) -> float:
    whole = example_batch(False)
    batch = shard(whole, engine.placement(np.zeros(len(whole.info), dtype=np.int64)), dist.get_rank())
    return engine.train_step(batch, np.array(MINIS[0]), [MINIS[0]], losses("actor"), agg_mode="token-mean").grad_norm


def weights(engine) -> dict:
    return {name: tensor.clone() for name, tensor in engine.stream_weights(torch.float32)}


def begun_then_trained(folder, out) -> dict:
    from megappo.checkpoint.distributed import load_engine, save_engine

    engine = build(folder)
    step(engine)
    for number in range(2):  # the second is copied into the memory of the first
        at_save = weights(engine)
        pending = save_engine(engine, out / str(number), background=True)
        uninterrupted = step(engine)  # training goes on while the shards are written
        pending.finish()
        resumed = build(folder)
        load_engine(resumed, out / str(number))
        assert all(torch.equal(tensor, at_save[name]) for name, tensor in weights(resumed).items())
        now = weights(engine)
        assert not any(torch.equal(tensor, at_save[name]) for name, tensor in now.items() if tensor.dim() > 1)
        assert step(resumed) == uninterrupted  # moments and step counts are those of the moment, too
        assert all(torch.equal(tensor, now[name]) for name, tensor in weights(resumed).items())
    return {"checked": len(at_save)}


def test_training_on_does_not_reach_the_checkpoint(tmp_path):
    make_hf_model(tmp_path / "model", "qwen2")
    assert on_ranks(2, begun_then_trained, tmp_path / "model", tmp_path / "out")["checked"] > 30


def two_under_way(folder, out) -> bool:
    from megappo.checkpoint.distributed import load_engine, save_engine

    engine, states, pending = build(folder), [], []
    for number in range(2):
        step(engine)
        states.append(weights(engine))
        pending.append(save_engine(engine, out / str(number), background=True))
    for save in pending:
        save.finish()
    resumed = build(folder)
    for number, state in enumerate(states):
        load_engine(resumed, out / str(number))
        assert all(torch.equal(tensor, state[name]) for name, tensor in weights(resumed).items())
    return True


def test_a_save_leaves_the_copy_of_an_unfinished_one_alone(tmp_path):
    make_hf_model(tmp_path / "model", "qwen2")
    assert on_ranks(2, two_under_way, tmp_path / "model", tmp_path / "out")


def failing_write(folder, out) -> str:
    from megappo.checkpoint.distributed import save_engine

    pending = save_engine(build(folder), out)
    pending._thread.join()
    pending._error = OSError("No space left on device")
    with pytest.raises(OSError, match="No space left"):
        pending.finish()
    return "raised"


def test_a_write_that_failed_in_the_background_is_raised(tmp_path):
    make_hf_model(tmp_path / "model", "qwen2")
    assert on_ranks(2, failing_write, tmp_path / "model", tmp_path / "out") == "raised"
