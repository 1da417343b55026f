"""Rank arithmetic agrees with megatron-core's own: who sits where, and who holds which layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.parallel import backend
from megappo.parallel.layout import ParallelLayout

backend.install()
from megatron.core.parallel_state import RankGenerator  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

# A busy machine must not fail a test, and every run looks at the same examples.
quick = settings(deadline=None, derandomize=True)
SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def grids(draw) -> ParallelLayout:
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    return ParallelLayout(world=tp * cp * dp * pp, tp=tp, cp=cp, pp=pp)


@quick
@given(grids())
def test_ranks_and_coordinates_are_a_bijection(layout):
    seen = set()
    for rank in range(layout.world):
        c = layout.coordinates(rank)
        assert 0 <= c.tp < layout.tp and 0 <= c.cp < layout.cp
        assert 0 <= c.dp < layout.dp and 0 <= c.pp < layout.pp
        assert layout.rank(tp=c.tp, cp=c.cp, dp=c.dp, pp=c.pp) == rank
        seen.add(c)
    assert len(seen) == layout.world


@quick
@given(grids())
def test_replicas_partition_the_world(layout):
    replicas = [layout.replica_ranks(dp) for dp in range(layout.dp)]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(layout.world))
    for dp, ranks in enumerate(replicas):
        assert ranks == sorted(ranks) and len(ranks) == layout.world // layout.dp
        assert {layout.coordinates(rank).dp for rank in ranks} == {dp}


@quick
@given(grids())
def test_groups_are_those_of_megatron(layout):
    generator = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order="tp-cp-ep-dp-pp")
    for axis in ("tp", "cp", "dp", "pp"):
        groups = {}
        for rank in range(layout.world):
            c = layout.coordinates(rank)
            others = tuple(value for name, value in vars(c).items() if name != axis)
            groups.setdefault(others, []).append(rank)
        assert sorted(groups.values()) == sorted(generator.get_ranks(axis)), axis


@quick
@given(grids(), st.data())
def test_expert_groups_are_those_of_megatron(layout, data):
    stage = layout.world // layout.pp
    etp = data.draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = data.draw(st.sampled_from([n for n in range(1, stage + 1) if stage % (n * etp) == 0]))
    layout = ParallelLayout(world=layout.world, tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=ep, etp=etp)
    edp = stage // (ep * etp)
    generator = RankGenerator(tp=etp, ep=ep, dp=edp, pp=layout.pp, cp=1, order="tp-cp-ep-dp-pp")
    for axis, name in enumerate(("tp", "ep", "dp")):
        groups = {}
        for rank in range(layout.world):
            where = layout.expert_coordinates(rank)
            others = (layout.coordinates(rank).pp, *where[:axis], *where[axis + 1 :])
            groups.setdefault(others, []).append(rank)
        assert sorted(groups.values()) == sorted(generator.get_ranks(name)), name


def test_ten_thousand_ranks():
    layout = ParallelLayout(world=10_000, tp=5, cp=2, pp=10)
    seen = {layout.coordinates(rank) for rank in range(10_000)}
    assert len(seen) == 10_000 and layout.dp == 100
    assert sum(len(layout.replica_ranks(dp)) for dp in range(100)) == 10_000
    assert [layout.layers(120, pp) for pp in (0, 9)] == [range(12), range(108, 120)]


# (layers, pp, vpp, first, last)
PIPELINES = [
    (8, 1, 1, None, None),
    (8, 2, 1, None, None),
    (12, 4, 1, None, None),
    (8, 2, 2, None, None),
    (24, 4, 3, None, None),
    (7, 2, 1, 3, None),
    (7, 2, 1, None, 2),
    (7, 2, 1, 3, 4),
    (11, 4, 1, 2, 1),
    (10, 3, 1, None, 2),
    (10, 3, 1, 4, None),
    (6, 2, 2, 2, None),
    (6, 2, 2, None, 2),
    (14, 4, 2, 2, 4),
]


@pytest.mark.parametrize(("layers", "pp", "vpp", "first", "last"), PIPELINES)
def test_layers_of_a_stage_are_those_of_megatron(layers, pp, vpp, first, last):
    layout = ParallelLayout(world=pp, pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    held = []
    for rank in range(pp):
        for chunk, mine in layout.chunks(layers, rank):
            vp_stage = chunk if vpp > 1 else None
            assert len(mine) == get_num_layers_to_build(config, vp_stage, rank), (rank, chunk)
            assert mine.start == get_transformer_layer_offset(config, vp_stage, rank), (rank, chunk)
            held += mine
    assert sorted(held) == list(range(layers)), "every layer is held once"


@settings(quick, max_examples=200)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_pipeline_holds_every_layer_once_or_is_refused(layers, pp, vpp, data):
    ends = st.one_of(st.none(), st.integers(0, 6))
    layout = ParallelLayout(
        world=pp, pp=pp, vpp=vpp, first_stage_layers=data.draw(ends), last_stage_layers=data.draw(ends)
    )
    try:
        held = [layer for rank in range(pp) for _, mine in layout.chunks(layers, rank) for layer in mine]
    except ValueError as err:
        assert "layers" in str(err)
    else:
        assert sorted(held) == list(range(layers))


def test_embedding_and_head_are_on_one_chunk_each():
    layout = ParallelLayout(world=24, tp=2, pp=3, vpp=2)
    for tp in range(2):
        for dp in range(layout.dp):
            pipeline = [(layout.rank(tp=tp, dp=dp, pp=pp), chunk) for pp in range(3) for chunk in range(2)]
            assert [at for at in pipeline if layout.is_first(*at)] == [(layout.rank(tp=tp, dp=dp), 0)]
            assert [at for at in pipeline if layout.is_last(*at)] == [(layout.rank(tp=tp, dp=dp, pp=2), 1)]


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"tp": 2, "pp": 3}, {"cp": 5}, {"ep": 3}, {"pp": 4, "ep": 2, "etp": 2}])
def test_a_grid_that_does_not_divide_the_ranks_is_refused(sizes):
    with pytest.raises(ValueError, match="cannot be divided"):
        ParallelLayout(world=8, **sizes)
