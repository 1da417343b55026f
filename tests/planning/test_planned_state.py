"""Planned bytes of weights, gradients and optimizer equal what megatron-core allocates, rank by rank."""

from __future__ import annotations

import pytest
import torch
from meta_models import allocated, fake_rank

from megappo.parallel.layout import ParallelLayout
from megappo.planning.parameters import frozen_bytes, total_parameters, trained_bytes
from megappo.planning.shape import PUBLISHED, ModelShape, published_shape, shape_of

TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 72,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 136,
    "vocab_size": 131,
    "head_dim": 10,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 44, "norm_topk_prob": True}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "tied": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **MOE},
}
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(world=3),  # shards that are no multiple of the alignment
    ParallelLayout(world=8, tp=2, pp=2, sequence_parallel=True),
    ParallelLayout(world=8, tp=2, pp=2, vpp=2),
    ParallelLayout(world=6, pp=3, first_stage_layers=1, last_stage_layers=1),
    ParallelLayout(world=8, tp=2, cp=2),
]


def planned(shape: ModelShape, layout, rank: int, element: int, *, critic: bool, trained: bool, distributed: bool):
    at = layout.coordinates(rank)
    if not trained:
        return frozen_bytes(shape, layout, at.pp, element, critic=critic)
    index = (at.cp + layout.cp * at.dp, layout.expert_coordinates(rank)[2])
    options = {"critic": critic, "distributed": distributed, "index": index}
    return trained_bytes(shape, layout, at.pp, element, **options)


def check(config, folder, layout, rank, *, dtype=torch.bfloat16, critic=False, trained=True, distributed=True):
    with fake_rank(layout.world, rank):
        real = allocated(config, folder, layout, dtype, critic=critic, trained=trained, distributed=distributed)
    plan = planned(
        shape_of(config, "test"),
        layout,
        rank,
        dtype.itemsize,
        critic=critic,
        trained=trained,
        distributed=distributed,
    )
    assert (plan.weights, plan.gradients, plan.optimizer) == real


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"tp{x.tp}pp{x.pp}vpp{x.vpp}cp{x.cp}dp{x.dp}")
@pytest.mark.parametrize("family", ["llama", "tied", "qwen2", "qwen3"])
def test_dense_families_in_every_kind_of_layout(family, layout, tmp_path):
    for rank in sorted({0, layout.world // 2, layout.world - 1}):
        check(TINY | FAMILIES[family], tmp_path / "m", layout, rank)


@pytest.mark.parametrize("options", [{"ep": 2}, {"ep": 4, "etp": 1}, {"ep": 2, "etp": 2, "tp": 2, "pp": 2}])
def test_experts_are_shared_out_over_their_own_groups(options, tmp_path):
    layout = ParallelLayout(world=8, **options)
    for rank in (0, 3, 7):
        check(TINY | FAMILIES["qwen3_moe"], tmp_path / "m", layout, rank)


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roles_formats_and_optimizers(critic, trained, distributed, dtype, tmp_path):
    layout = ParallelLayout(world=4, pp=2)
    for rank in (0, 3):
        options = {"dtype": dtype, "critic": critic, "trained": trained, "distributed": distributed}
        check(TINY | FAMILIES["tied"], tmp_path / "m", layout, rank, **options)


BIG = {
    "llama3-8b": ParallelLayout(world=64, tp=2, sequence_parallel=True),
    "llama3-70b": ParallelLayout(world=256, tp=8, pp=4, vpp=2, sequence_parallel=True),
    "llama3-405b": ParallelLayout(world=1008, tp=8, pp=14, vpp=3, sequence_parallel=True),
    "qwen2.5-0.5b": ParallelLayout(world=16, tp=2, pp=2),
    "qwen2.5-7b": ParallelLayout(world=32, tp=4),
    "qwen2.5-32b": ParallelLayout(world=128, tp=8, pp=2, cp=2, sequence_parallel=True),
    "qwen2.5-72b": ParallelLayout(world=1024, tp=8, pp=8, sequence_parallel=True),
    "qwen3-30b-a3b": ParallelLayout(world=64, tp=2, pp=2, ep=8, etp=1, sequence_parallel=True),
}


@pytest.mark.parametrize("name", BIG)
def test_published_models_at_scale(name, tmp_path):
    layout = BIG[name]
    for rank in (0, layout.world - 1):
        check(PUBLISHED[name], tmp_path / "m", layout, rank)


#: parameters as the model cards give them, to the digits that they give
CARDS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_those_of_the_model_cards(name):
    assert total_parameters(published_shape(name)) == CARDS[name]
