"""The rollout batch: columns stay with their samples wherever these are placed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from warm_ranks import on_ranks

from megappo.data import batch as batch_module
from megappo.data.batch import Placement, RolloutBatch, SampleInfo, _transfers
from megappo.parallel.layout import ParallelLayout

LENGTHS = np.array([3, 1, 7, 2, 5, 4, 1, 6])
LAYOUTS = {
    1: [{}],
    2: [{}, {"tp": 2}, {"pp": 2}, {"world": 1, "first_rank": 1}],
    4: [{}, {"tp": 2}, {"tp": 2, "pp": 2}, {"world": 2, "first_rank": 2}, {"world": 2, "first_rank": 1, "cp": 2}],
}


def make_info(lengths: np.ndarray) -> SampleInfo:
    n = len(lengths)
    zeros = np.zeros(n, dtype=np.int64)
    return SampleInfo(
        sample_id=np.arange(n) + 100,
        group_id=np.arange(n) // 2,
        prompt_len=np.ones(n, dtype=np.int64),
        length=lengths,
        trainable=lengths - 1,
        score=np.linspace(0, 1, n),
        finish_reason=np.arange(n) % 3,
        weight_version=zeros,
        source=["test"] * n,
    )


def owners(n: int, dp: int) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(0)
    return {
        "round robin": np.arange(n) % dp,
        "blocks": np.arange(n) * dp // max(n, 1),
        "random": rng.randint(dp, size=n),
        "all on the last": np.full(n, dp - 1),
    }


def placements(world: int, n: int) -> list[Placement]:
    out = []
    for sizes in LAYOUTS[world]:
        layout = ParallelLayout(**{"world": world, **sizes})
        out += [Placement(layout, owner) for owner in owners(n, layout.dp).values()]
    return out


def content(info: SampleInfo, sample: int) -> dict[str, torch.Tensor]:
    """What the columns of a sample hold, recognisable by sample and position."""
    at = torch.arange(int(info.length[sample]))
    ids = sample * 1000 + at
    return {
        "tokens": ids,
        "loss_mask": at % 2 == sample % 2,
        "logprobs": -ids.float() / 7,
        "values": torch.where(at == 0, torch.nan, ids.float()),  # what nobody reads may be NaN
    }


def place(info: SampleInfo, placement: Placement) -> RolloutBatch:
    mine = placement.samples_of(dist.get_rank())
    parts = [content(info, sample) for sample in mine]
    dtypes = {name: column.dtype for name, column in content(info, 0).items()} if len(info) else {}
    columns = {
        name: torch.cat([part[name] for part in parts]) if parts else torch.empty(0, dtype=dtype)
        for name, dtype in dtypes.items()
    }
    return RolloutBatch(info, placement, mine, columns)


def check_content(batch: RolloutBatch, placement: Placement) -> None:
    assert batch.placement.same_as(placement)
    assert batch.indices.tolist() == placement.samples_of(dist.get_rank()).tolist()
    expected = place(batch.info, placement)
    assert list(batch.columns) == list(expected.columns)
    for name, column in expected.columns.items():
        assert batch[name].dtype == column.dtype and torch.equal(
            torch.nan_to_num(batch[name].float(), nan=-1), torch.nan_to_num(column.float(), nan=-1)
        ), name
    assert torch.equal(batch.cu_seqlens, expected.cu_seqlens)


def move_everywhere(world: int) -> int:
    info = make_info(LENGTHS)
    places = placements(world, len(info))
    moves = 0
    for i, source in enumerate(places):
        batch = place(info, source)
        for target in places[i % 5 :: 5]:  # 5 has no factor in common with 4 owners: every pair of layouts meets
            moved = batch.to(target)
            check_content(moved, target)
            check_content(moved.to(source), source)
            moves += 1
        check_content(batch, source)  # the original is untouched
    return moves


@pytest.fixture(scope="module", params=[1, 2, 4])
def world(request) -> int:
    """Number of ranks; tests of the same number follow each other."""
    return request.param


def test_columns_follow_their_samples_between_all_placements_and_back(world):
    assert on_ranks(world, move_everywhere, world) >= 3 * len(LAYOUTS[world])


def move_little(world: int) -> None:
    """Fewer samples than ranks, and one sample only."""
    for n in (1, 3):
        info = make_info(LENGTHS[:n])
        places = placements(world, n)
        for source, target in itertools.product(places[:6], places[-6:]):
            check_content(place(info, source).to(target), target)


def test_ranks_that_own_nothing_take_part(world):
    on_ranks(world, move_little, world)


def move_nowhere(world: int) -> None:
    def forbidden(*args):
        raise AssertionError("something was sent")

    real, batch_module._exchange = batch_module._exchange, forbidden
    try:
        for placement in placements(world, len(LENGTHS)):
            batch = place(make_info(LENGTHS), placement)
            same = Placement(placement.layout, placement.owner.copy())
            moved = batch.to(same)
            check_content(moved, placement)
            moved["extra"] = torch.zeros(len(moved["tokens"]))
            assert "extra" not in batch.columns  # a batch of its own, sharing columns
            assert all(moved[name] is column for name, column in batch.columns.items())
    finally:
        batch_module._exchange = real


def test_an_equal_placement_sends_nothing(world):
    on_ranks(world, move_nowhere, world)


def test_every_holder_gets_each_sample_once_and_keeps_what_it_has(world):
    info = make_info(LENGTHS)
    for source, target in itertools.product(placements(world, len(info)), repeat=2):
        moves = _transfers(info, source, target, world)
        for rank in range(world):
            received = sorted(i for sender in range(world) for i in moves[sender][rank])
            assert received == target.samples_of(rank).tolist()
            held = set(source.samples_of(rank))
            assert set(moves[rank][rank]) == held & set(received)
            assert all(set(moves[rank][other]) <= held for other in range(world))


def test_columns_of_the_wrong_length_are_refused():
    placement = Placement(ParallelLayout(world=1), np.zeros(len(LENGTHS), dtype=np.int64))
    info = make_info(LENGTHS)
    total = int(LENGTHS.sum())
    batch = RolloutBatch(info, placement, np.arange(len(info)), {"tokens": torch.zeros(total, dtype=torch.int64)})
    with pytest.raises(ValueError, match=f"the batch {total} tokens"):
        batch["values"] = torch.zeros(total - 1)
    with pytest.raises(ValueError, match="column tokens"):
        RolloutBatch(info, placement, np.arange(2), batch.columns)


def test_token_index_and_sample_values_address_local_samples():
    placement = Placement(ParallelLayout(world=2), np.arange(len(LENGTHS)) % 2)
    mine = placement.samples_of(1)
    total = int(LENGTHS[mine].sum())
    batch = RolloutBatch(make_info(LENGTHS), placement, mine, {"tokens": torch.arange(total)})
    assert batch.token_index([3, 1]).tolist() == [1, 2, 0]  # samples 1, 3, 5, 7 lie one after the other
    assert batch.token_index([]).tolist() == []
    assert torch.allclose(batch.sample_values(np.arange(8.0)), torch.tensor([1.0, 3.0, 5.0, 7.0]))


def test_finish_reasons_are_told_apart():
    info = make_info(LENGTHS)
    assert info.truncated.tolist() == [False, True, False] * 2 + [False, True]
    assert info.aborted.tolist() == [False, False, True] * 2 + [False, False]
    assert info.response_len.tolist() == (LENGTHS - 1).tolist()
