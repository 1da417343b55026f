"""Whole models in whole grids: the ranks together hold every tensor of the checkpoint, and send each element once."""

from __future__ import annotations

import pytest
import torch
from support import FAMILIES

from megappo.bridge.algebra import local_shape, pieces, slices
from megappo.bridge.megatron import MegatronWeights, _sources
from megappo.checkpoint.hf import HFReader
from megappo.models.spec import load_spec
from megappo.parallel.layout import ParallelLayout

MOE = ("mixtral", "qwen3_moe")
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(world=2, tp=2),
    ParallelLayout(world=4, tp=4),  # more than the two key/value heads
    ParallelLayout(world=2, pp=2),
    ParallelLayout(world=4, pp=4),
    ParallelLayout(world=2, pp=2, vpp=2),
    ParallelLayout(world=2, pp=2, first_stage_layers=1),
    ParallelLayout(world=3, pp=3, last_stage_layers=2),
    ParallelLayout(world=8, tp=2, pp=2),
    ParallelLayout(world=4, tp=2, cp=2),
]
MOE_LAYOUTS = [
    ParallelLayout(world=2, ep=2),
    ParallelLayout(world=4, ep=4),
    ParallelLayout(world=4, tp=2, etp=2, ep=2),
    ParallelLayout(world=4, tp=2, ep=4),
    ParallelLayout(world=4, etp=2),
    ParallelLayout(world=4, pp=2, ep=2),
    ParallelLayout(world=8, tp=2, pp=2, vpp=2, ep=2),
    ParallelLayout(world=4, cp=2, ep=2),
]
GRID = [(f, layout) for f in (*FAMILIES, *MOE) for layout in LAYOUTS] + [(f, x) for f in MOE for x in MOE_LAYOUTS]


def name_of(value) -> str | None:
    if isinstance(value, ParallelLayout):
        default = ParallelLayout()
        return " ".join(f"{k}{v}" for k, v in vars(value).items() if v != vars(default)[k]) or "one rank"
    return None


@pytest.mark.parametrize("family", [*FAMILIES, "llama3_rope", *MOE])
@pytest.mark.parametrize("fused", [False, True])
def test_the_table_names_exactly_the_tensors_that_transformers_saves(hf_folder, family, fused):
    folder = hf_folder(family)
    shapes = MegatronWeights(load_spec(folder), ParallelLayout(), fused=fused).hf_shapes()
    reader = HFReader(folder)
    reader.check(shapes)
    assert shapes.keys() == reader.where.keys()


@pytest.mark.parametrize(("family", "layout"), GRID, ids=name_of)
@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
def test_ranks_hold_every_element_and_send_each_once(hf_folder, family, layout, critic):
    weights = MegatronWeights(load_spec(hf_folder(family)), layout, critic=critic)
    shapes = weights.hf_shapes()
    held = {name: torch.zeros(shape, dtype=torch.int) for name, shape in shapes.items()}
    for rank in range(layout.world):
        for _, piece in weights.pieces(rank):
            held[piece.hf][slices(piece.hf_box)] += 1
    for name, count in held.items():
        assert (count > 0).all(), f"{name} is held nowhere in part"
        assert (count == count.flatten()[0]).all(), f"{name} is held more often in one part than in another"
    sent = {name: torch.zeros(shape, dtype=torch.int) for name, shape in shapes.items()}
    for name, parts in _sources(weights).items():
        for part in parts:
            sent[name][slices(part.piece.hf_box)] += 1
    assert all((count == 1).all() for count in sent.values())


@pytest.mark.parametrize(("family", "layout"), GRID, ids=name_of)
def test_each_parameter_is_filled_whole(hf_folder, family, layout):
    """What a rank holds, less the padded vocabulary rows, is what its pieces read."""
    spec = load_spec(hf_folder(family))
    weights = MegatronWeights(spec, layout)
    for rank in range(layout.world):
        names = set()
        for chunk, rule in weights.rules(rank):
            index, count = weights.shard(rule, rank)
            filled = sum(piece.numel for piece in pieces(rule, index, count))
            rows, padding = local_shape(rule, count)[0], 0
            if any(span.hf is None for group in rule.groups for span in group):
                real = min(max(spec.vocab_size - index * rows, 0), rows)
                padding = (rows - real) * spec.hidden_size
            assert filled + padding == torch.Size(local_shape(rule, count)).numel(), rule.local
            assert (chunk, rule.local) not in names, f"{rule.local} appears twice"
            names.add((chunk, rule.local))


def test_tied_embeddings_are_held_at_both_ends_of_a_pipeline_and_sent_from_the_first(hf_folder):
    weights = MegatronWeights(load_spec(hf_folder("qwen2_tied")), ParallelLayout(world=2, pp=2))
    names = [{(p.local, p.hf) for _, p in weights.pieces(rank)} for rank in (0, 1)]
    assert ("embedding.word_embeddings.weight", "model.embed_tokens.weight") in names[0]
    assert ("output_layer.weight", "model.embed_tokens.weight") in names[1]
    assert "lm_head.weight" not in weights.hf_shapes()
    assert {part.rank for part in _sources(weights)["model.embed_tokens.weight"]} == {0}


def test_a_critic_of_a_tied_model_has_a_head_of_its_own(hf_folder):
    shapes = MegatronWeights(load_spec(hf_folder("qwen2_tied")), ParallelLayout(world=2, pp=2), critic=True).hf_shapes()
    assert shapes["score.weight"] == (1, 64) and shapes["score.bias"] == (1,)
    assert "lm_head.weight" not in shapes and "model.embed_tokens.weight" in shapes
