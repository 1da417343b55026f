"""The planner's promises over random layouts of small models, checked element by element in plain numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.bridge.algebra import slices
from megappo.bridge.execute import buckets, execute_in_process, local_shapes, split, view
from megappo.bridge.inference import InferenceWeights
from megappo.bridge.megatron import MegatronWeights
from megappo.bridge.plan import Place, Route, plan
from megappo.models.spec import ModelSpec, MoESpec
from megappo.parallel.layout import ParallelLayout

quick = settings(deadline=None, derandomize=True, max_examples=40)
DENSE = ModelSpec(
    path=Path(),
    architecture="Qwen2ForCausalLM",
    num_layers=4,
    hidden_size=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    ffn_size=8,
    vocab_size=13,
    norm_eps=1e-5,
    max_positions=8,
    tied_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
    sliding_window=None,
)
TIED = replace(DENSE, tied_embeddings=True, architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True)
MIXTURE = replace(DENSE, architecture="Qwen3MoeForCausalLM", qkv_bias=False, moe=MoESpec(4, 2, 4, normalize=True))


@st.composite
def layouts(draw, spec: ModelSpec):
    """A Megatron or inference layout on at most 16 ranks that start anywhere."""
    first, tp = draw(st.integers(0, 3)), draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([1, 2, 4])) if spec.moe else 1
    if draw(st.booleans()):
        return InferenceWeights(spec, tp, min(ep, tp), draw(st.integers(1, 3)), first)
    etp = draw(st.sampled_from([1, tp])) if spec.moe else 1
    pp = draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if 1 < pp < 4 else 1
    stage = int(np.lcm(tp, ep * etp)) * draw(st.integers(1, 2))
    return MegatronWeights(spec, ParallelLayout(stage * pp, tp, pp, vpp=vpp, ep=ep, etp=etp, first_rank=first))


@st.composite
def cases(draw):
    spec = draw(st.sampled_from([DENSE, TIED, MIXTURE]))
    return draw(layouts(spec)), draw(layouts(spec)), draw(st.sampled_from([1, 2, 8]))


def real_elements(layout, rank: int) -> dict[tuple[int, str], torch.Tensor]:
    """1 where a rank's tensor holds a weight, 0 where it holds padding."""
    out = {key: torch.zeros(shape, dtype=torch.int) for key, shape in local_shapes(layout, rank).items()}
    for chunk, p in layout.pieces(rank):
        view(out, Place(chunk, p.local, p.entry, p.local_box)).fill_(1)
    return out


def filled(layout, hf: dict[str, torch.Tensor]) -> dict[int, dict]:
    """The tensors of every rank, holding the model `hf`."""
    out = {}
    for rank in layout.ranks:
        tensors = {key: torch.zeros(shape) for key, shape in local_shapes(layout, rank).items()}
        for chunk, p in layout.pieces(rank):
            view(tensors, Place(chunk, p.local, p.entry, p.local_box)).copy_(hf[p.hf][slices(p.hf_box)])
        out[rank] = tensors
    return out


def numbered(spec: ModelSpec) -> dict[str, torch.Tensor]:
    out, start = {}, 1
    for name, shape in MegatronWeights(spec, ParallelLayout()).hf_shapes().items():
        count = torch.Size(shape).numel()
        out[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return out


@quick
@given(cases())
def test_every_destination_element_is_written_exactly_once(case):
    source, destination, node_size = case
    written = {
        rank: {k: torch.zeros(s, dtype=torch.int) for k, s in local_shapes(destination, rank).items()}
        for rank in destination.ranks
    }
    for route in plan(source, destination, node_size=node_size).routes:
        view(written[route.dst], route.target).add_(1)
    for rank in destination.ranks:
        want = real_elements(destination, rank)
        assert want.keys() == written[rank].keys()
        assert all(torch.equal(written[rank][key], want[key]) for key in want)


@quick
@given(cases())
def test_it_moves_what_it_must_and_no_more(case):
    """The bound from element masks: what a rank will hold of each tensor, less what it holds before."""
    source, destination, node_size = case
    found = plan(source, destination, node_size=node_size)
    shapes = MegatronWeights(source.spec, ParallelLayout()).hf_shapes()
    bound = needed = 0
    for rank in destination.ranks:
        before = {name: np.zeros(shape, bool) for name, shape in shapes.items()}
        for _, p in source.pieces(rank) if rank in source.ranks else ():
            before[p.hf][slices(p.hf_box)] = True
        for _, p in destination.pieces(rank):
            bound += int((~before[p.hf][slices(p.hf_box)]).sum())
            needed += p.numel
    assert (found.moved, found.lower_bound, found.needed) == (bound, bound, needed)
    assert found.moved == sum(found.sent().values())


@quick
@given(cases())
def test_it_is_the_same_every_time(case):
    source, destination, node_size = case
    assert plan(source, destination, node_size=node_size) == plan(source, destination, node_size=node_size)


@quick
@given(cases(), st.sampled_from([4, 20, 64, 4096]))
def test_carried_out_in_buckets_of_any_size_it_gives_the_destination(case, bucket_bytes):
    source, destination, node_size = case
    hf = numbered(source.spec)
    want, targets = filled(destination, hf), filled(destination, {name: t * 0 - 1 for name, t in hf.items()})
    found = plan(source, destination, node_size=node_size)
    report = execute_in_process(found, filled(source, hf), targets, dtype=torch.float32, bucket_bytes=bucket_bytes)
    for rank, tensors in want.items():
        assert all(torch.equal(targets[rank][key], tensor) for key, tensor in tensors.items())
    assert report.sent == report.lower_bound and report.extra_memory <= bucket_bytes
    assert report.local + report.received == found.needed * 4


@quick
@given(cases(), st.sampled_from([4, 64]))
def test_buckets_keep_the_order_that_cannot_deadlock(case, bucket_bytes):
    source, destination, _ = case
    found = buckets(plan(source, destination), 4, bucket_bytes)
    assert [bucket.number for bucket in found] == list(range(len(found)))
    assert all(0 < bucket.numel * 4 <= bucket_bytes and bucket.src != bucket.dst for bucket in found)


def test_six_rows_from_two_ranks_to_three():
    """The example of the design: d0 gets s0[0:2]; d1 s0[2:3] and s1[0:1]; d2 s1[1:3]."""
    one = replace(DENSE, num_heads=6, num_kv_heads=6, head_dim=1, ffn_size=6, num_layers=1)
    source = MegatronWeights(one, ParallelLayout(world=2, tp=2))
    destination = MegatronWeights(one, ParallelLayout(world=3, tp=3, first_rank=2))
    routes = [r for r in plan(source, destination).routes if r.hf.endswith("o_proj.weight")]
    got = [(r.src, r.source.box[1], r.dst - 2, r.target.box[1]) for r in routes]
    assert got == [
        (0, (0, 2), 0, (0, 2)),
        (0, (2, 3), 1, (0, 1)),
        (1, (0, 1), 1, (1, 2)),
        (1, (1, 3), 2, (0, 2)),
    ]


def test_replicas_share_the_sending_and_neighbours_come_first():
    source = MegatronWeights(DENSE, ParallelLayout(world=8))
    far = plan(source, InferenceWeights(DENSE, replicas=8, first_rank=8), node_size=8)
    sent = far.sent()
    assert sorted(sent) == list(range(8)) and max(sent.values()) <= 1.1 * min(sent.values())
    near = plan(source, InferenceWeights(DENSE, replicas=4, first_rank=4), node_size=2)
    assert near.moved == 0 and all(route.src == route.dst for route in near.routes)
    half = plan(MegatronWeights(DENSE, ParallelLayout(world=4)), InferenceWeights(DENSE, first_rank=5), node_size=3)
    assert {route.src for route in half.routes} == {3}


def test_a_source_that_lacks_something_is_refused():
    with pytest.raises(ValueError, match=r"elements of model\.layers\.\d\.self_attn\.q_proj\.bias .* are nowhere"):
        plan(MegatronWeights(replace(DENSE, qkv_bias=False), ParallelLayout()), InferenceWeights(DENSE))


@quick
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 40))
def test_parts_of_a_route_cover_it_once(shape, limit):
    box = tuple((2, 2 + n) for n in shape)
    whole = Route(0, 1, "w", Place(0, "a", None, box), Place(0, "b", 1, box), int(np.prod(shape)))
    count = np.zeros([n + 2 for n in shape], dtype=int)
    for part in split(whole, limit):
        assert part.numel <= limit and part.source.box == part.target.box
        count[slices(part.source.box)] += 1
        assert count[slices(part.source.box)].size == part.numel
    assert (count[slices(box)] == 1).all() and count.sum() == whole.numel
