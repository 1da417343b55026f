"""Weights that move between live ranks arrive bit for bit as the golden reference (gather everything, cut) says."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import make_hf_model
from warm_ranks import on_ranks

from megappo.bridge.algebra import slices
from megappo.bridge.execute import (
    DiskTransport,
    PeerTransport,
    execute,
    gather_all,
    local_shapes,
    view,
    zero_padding,
)
from megappo.bridge.inference import InferenceWeights
from megappo.bridge.megatron import MegatronWeights
from megappo.bridge.plan import Place, plan
from megappo.models.spec import load_spec
from megappo.parallel.layout import ParallelLayout

SMALL = 20_000  # bytes a bucket: several buckets a pair, tensors that are split
LAYOUTS = {
    "TP1": {},
    "TP2": {"tp": 2},
    "TP4": {"tp": 4},
    "PP2": {"pp": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "EP2": {"ep": 2},
}


def holding(layout, rank: int, hf: dict, dtype: torch.dtype) -> dict:
    """The tensors of a rank in a layout, cut from the whole model; none outside the layout."""
    if rank not in layout.ranks:
        return {}
    tensors = empty(layout, rank, dtype)
    for chunk, p in layout.pieces(rank):
        box = view(tensors, Place(chunk, p.local, p.entry, p.local_box))
        box.copy_(hf[p.hf][slices(p.hf_box)])
    return tensors


def empty(layout, rank: int, dtype: torch.dtype) -> dict:
    """Tensors full of NaN, padding cleared."""
    if rank not in layout.ranks:
        return {}
    out = {key: torch.full(shape, torch.nan, dtype=dtype) for key, shape in local_shapes(layout, rank).items()}
    zero_padding(layout, rank, out)
    return out


def check_move(source, destination, hf: dict, dtype: torch.dtype, transport=None) -> tuple[int, int, int]:
    """`(bytes received on all ranks, lower bound, bytes of gather-all)` after comparing every element."""
    rank = dist.get_rank()
    tensors = holding(source, rank, hf, torch.float32)
    got, want = empty(destination, rank, dtype), empty(destination, rank, dtype)
    found = plan(source, destination, node_size=2)
    options = {"dtype": dtype, "bucket_bytes": SMALL}
    if transport is None:
        report = execute(found, rank, tensors, got, PeerTransport(), **options)
    else:
        execute(found, rank, tensors, got, transport, phase="send", **options)
        dist.barrier()
        report = execute(found, rank, tensors, got, transport, phase="receive", **options)
    gathered = gather_all(source, destination, rank, tensors, want, dtype=dtype)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert not tensor.isnan().any()
        assert torch.equal(got[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert report.extra_memory <= 2 * SMALL
    total = torch.tensor([report.received])
    dist.all_reduce(total)
    return total.item(), report.lower_bound, gathered


def all_pairs(folder: Path) -> int:
    spec, hf = load_spec(folder), load_file(folder / "model.safetensors")
    world, moves = dist.get_world_size(), 0
    known = [x for x in LAYOUTS.values() if x.get("tp", 1) * x.get("pp", 1) <= world and (spec.moe or "ep" not in x)]
    layouts = [MegatronWeights(spec, ParallelLayout(world=world, **x)) for x in known]
    targets = [InferenceWeights(spec, tp, replicas=world // tp) for tp in (1, 2, 4) if tp <= world]
    for source, destination in product(layouts, [*layouts, *targets]):
        received, bound, _ = check_move(source, destination, hf, torch.float32)
        assert received == bound
        moves += 1
    return moves


@pytest.mark.parametrize(
    ("world", "family", "moves"), [(2, "qwen2", 15), (2, "mixtral", 24), (4, "qwen3", 40), (4, "qwen3_moe", 54)]
)
def test_every_layout_into_every_other(tmp_path, world, family, moves):
    make_hf_model(tmp_path, family)
    assert on_ranks(world, all_pairs, tmp_path) == moves


def other_cases(folder: Path, scratch: Path) -> None:
    spec, hf = load_spec(folder), load_file(folder / "model.safetensors")
    trainer = MegatronWeights(spec, ParallelLayout(world=2, pp=2))
    engine = InferenceWeights(spec, 2, first_rank=2)
    received, bound, gathered = check_move(trainer, engine, hf, torch.bfloat16)  # apart, and to bf16 on the way
    assert received == bound < 2 * gathered
    whole = MegatronWeights(spec, ParallelLayout(world=4, tp=2))
    check_move(whole, engine, hf, torch.bfloat16, DiskTransport(scratch))
    check_move(engine, whole, hf, torch.float32)


def test_apart_in_another_dtype_and_through_files(tmp_path):
    make_hf_model(tmp_path / "hf", "qwen2_tied", num_key_value_heads=1)
    (tmp_path / "scratch").mkdir()
    on_ranks(4, other_cases, tmp_path / "hf", tmp_path / "scratch")


def from_an_engine(folder: Path) -> None:
    """Real parameters of an engine, sent to inference shards."""
    from megappo.checkpoint.hf import HFReader
    from megappo.engine.engine import EngineOptions, ModelEngine

    spec, hf = load_spec(folder), load_file(folder / "model.safetensors")
    engine = ModelEngine(spec, ParallelLayout(world=2, pp=2), EngineOptions())
    engine.load_hf(HFReader(folder))
    rank, destination = dist.get_rank(), InferenceWeights(spec, 2)
    tensors = {(i, n): p for i, chunk in enumerate(engine.chunks) for n, p in chunk.named_parameters()}
    got = empty(destination, rank, torch.float32)
    execute(plan(engine.weights, destination), rank, tensors, got, PeerTransport(), dtype=torch.float32)
    want = holding(destination, rank, hf, torch.float32)
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_from_an_engine_to_inference_shards(tmp_path):
    make_hf_model(tmp_path, "qwen2")
    on_ranks(2, from_an_engine, tmp_path)
