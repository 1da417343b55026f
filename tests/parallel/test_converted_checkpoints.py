"""Converted checkpoints are what Megatron's own code reads and writes: engines load them, and save what converts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import make_hf_model
from warm_ranks import on_ranks

from checkpoints_tools.convert import Options, Request, convert
from checkpoints_tools.inspect_model import describe
from checkpoints_tools.verify import verify
from megappo.checkpoint.distributed import load_engine, save_engine
from megappo.checkpoint.hf import HFReader
from megappo.config.schema.optim import OptimConfig
from megappo.engine.engine import EngineOptions, ModelEngine
from megappo.models.spec import load_spec
from megappo.parallel.layout import ParallelLayout


def load_converted(model: Path, checkpoint: Path, layout: dict) -> None:
    """An engine that loads the checkpoint through megatron-core holds the Hugging Face folder's weights."""
    spec = load_spec(model)
    engine = ModelEngine(spec, ParallelLayout(**layout), EngineOptions())
    load_engine(engine, checkpoint)
    want = load_file(model / "model.safetensors")
    for name, tensor in engine.stream_weights(torch.float32):
        assert torch.equal(tensor, want.pop(name)), name
    assert not want


def save_engines(model: Path, out: Path, layout: dict, options: dict) -> None:
    trained = {"optim": OptimConfig(lr=1e-3), "total_steps": 3} if options.pop("trained", False) else {}
    engine = ModelEngine(load_spec(model), ParallelLayout(**layout), EngineOptions(**options), **trained)
    engine.load_hf(HFReader(model))
    save_engine(engine, out).finish()


@pytest.mark.parametrize(
    ("family", "written", "read"),
    [
        ("llama", {"tp": 4, "pp": 2}, {"tp": 2}),
        ("qwen2_tied", {"tp": 2}, {"pp": 2}),
        ("qwen3", {"pp": 2, "vpp": 2}, {"pp": 2, "vpp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}, {"ep": 2}),
        ("mixtral", {"ep": 4}, {"pp": 2}),
    ],
)
def test_an_engine_loads_what_was_converted(tmp_path, family, written, read):
    make_hf_model(tmp_path / "hf", family)
    convert(tmp_path / "hf", tmp_path / "megatron", Request("megatron", **written))
    on_ranks(2, load_converted, tmp_path / "hf", tmp_path / "megatron" / "release", {"world": 2, **read})


@pytest.mark.parametrize(
    ("family", "layout", "trained"),
    [
        ("qwen2_tied", {"pp": 2}, True),
        ("qwen3_moe", {"ep": 2}, False),
        ("llama", {"tp": 2}, True),
    ],
)
def test_what_an_engine_saves_converts(tmp_path, family, layout, trained):
    make_hf_model(tmp_path / "hf", family)
    on_ranks(2, save_engines, tmp_path / "hf", tmp_path / "role", {"world": 2, **layout}, {"trained": trained})
    convert(tmp_path / "role", tmp_path / "back", Request("hf"), Options(model=tmp_path / "hf"))
    report, same = verify(tmp_path / "hf", tmp_path / "back")
    assert same, report
    text = describe(tmp_path / "role")
    assert ("; 0 of optimizer state" in text) != trained
