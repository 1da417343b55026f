"""Metrics mean the same whatever the split of the data over calls and ranks."""

import math
import multiprocessing
import os
import traceback

import pytest
import torch
import torch.distributed as dist

from megappo.observe.metrics import MetricAccumulator, non_finite, summarize


def run_ranks(function, world, tmp_path):
    """Run function(rank) on `world` gloo ranks; their results in rank order. Bounded."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    store = f"file://{tmp_path}/store"
    processes = [context.Process(target=_one_rank, args=(function, rank, world, store, queue)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
    results = {}
    while not queue.empty():
        rank, value, error = queue.get()
        assert error is None, error
        results[rank] = value
    assert sorted(results) == list(range(world))
    return [results[rank] for rank in range(world)]


def _one_rank(function, rank, world, store, queue):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        queue.put((rank, function(rank), None))
    except Exception:
        queue.put((rank, None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


# --- one process ---------------------------------------------------------------------------------------


def test_sums_are_divided_by_the_global_count_however_they_are_split():
    whole, parts = MetricAccumulator(), MetricAccumulator()
    whole.add_sum("loss", 6.0, 4)
    for part in (torch.tensor(1.0), 2.0, torch.tensor(3)):
        parts.add_sum("loss", part, torch.tensor(4))
    assert whole.reduce() == parts.reduce() == {"loss": 1.5}


def test_a_zero_denominator_contributes_zero_even_of_nan():
    metrics = MetricAccumulator()
    metrics.add_sum("a", torch.tensor(math.nan), 0)
    metrics.add_sum("a", 0.0, torch.tensor(0))
    metrics.add_sum("a", math.nan, 0)
    assert metrics.reduce() == {"a": 0.0}


def test_large_counts_keep_their_precision():
    metrics = MetricAccumulator()
    metrics.add_sum("a", torch.tensor(2.0**24 + 1, dtype=torch.float64), 2**24 + 1)
    metrics.add_mean("b", torch.ones(3, dtype=torch.float32), weight=2**24 + 1)
    assert metrics.reduce() == {"a": 1.0, "b": 1.0}


def test_means_weigh_every_element_alike():
    metrics = MetricAccumulator()
    metrics.add_mean("m", torch.tensor([1.0, 2.0, 3.0]))
    metrics.add_mean("m", 10)
    metrics.add_mean("w", 1.0, weight=3)
    metrics.add_mean("w", 5.0, weight=1)
    assert metrics.reduce() == {"m": 4.0, "w": 2.0}


def test_extremes_keep_nan_and_infinities():
    metrics = MetricAccumulator()
    metrics.add_max("max", [1.0, math.nan])
    metrics.add_max("max", 7.0)
    metrics.add_min("min", torch.tensor([3.0, -math.inf]))
    metrics.add_min("low", [2, -1, 5])
    out = metrics.reduce()
    assert math.isnan(out["max"]) and out["min"] == -math.inf and out["low"] == -1.0
    assert non_finite(out) == ["max", "min"]


def test_metrics_without_any_element_are_left_out():
    metrics = MetricAccumulator()
    metrics.add_stats("adv", torch.empty(0))
    metrics.add_sum("loss", 0.0, 3)
    assert metrics.reduce() == {"loss": 0.0}


def test_reduce_starts_afresh_and_sorts_by_name():
    metrics = MetricAccumulator()
    metrics.add_mean("b", 1.0)
    metrics.add_sum("a", 1.0, 1)
    assert list(metrics.reduce()) == ["a", "b"]
    assert metrics.reduce() == {}
    metrics.add_max("a", 3.0)  # another kind is fine now
    assert metrics.reduce() == {"a": 3.0}


def test_one_name_has_one_kind():
    metrics = MetricAccumulator()
    metrics.add_sum("a", 1.0, 1)
    with pytest.raises(ValueError, match="a is a sum, not a max"):
        metrics.add_max("a", 1.0)


def test_contributions_keep_no_graph():
    weight = torch.ones(3, requires_grad=True)
    metrics = MetricAccumulator()
    metrics.add_sum("loss", (weight * 2).sum(), 3)
    metrics.add_stats("w", weight)
    out = metrics.reduce()
    assert out["loss"] == 2.0 and out["w/max"] == 1.0
    assert weight.grad is None


def test_summarize_describes_replicated_numbers():
    assert summarize("score", [1, 2, 3, 10]) == {
        "score/mean": 4.0,
        "score/std": pytest.approx(4.0824829),
        "score/median": 2.5,
        "score/max": 10.0,
        "score/min": 1.0,
    }
    assert summarize("score", [2])["score/std"] == 0.0
    assert summarize("score", []) == {}


# --- several ranks -------------------------------------------------------------------------------------


def _uneven_data(rank):
    """Rank 0 owns three numbers, rank 1 none, rank 2 one; rank 2 names them in another order."""
    calls = []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append((str(kwargs.get("op", dist.ReduceOp.SUM)), tensor.dtype))
        return all_reduce(tensor, *args, **kwargs)

    mine = [torch.tensor([1.0, 2.0, math.nan]), torch.empty(0), torch.tensor([6.0])][rank]
    metrics = MetricAccumulator()
    for name in ("x", "y") if rank < 2 else ("y", "x"):
        metrics.add_stats(name, mine.nan_to_num(3.0) if name == "y" else mine)
    metrics.add_sum("loss", mine.nan_to_num(0.0).sum(), 4)
    metrics.add_stats("none", torch.empty(0))
    dist.all_reduce = counting
    try:
        return metrics.reduce(), calls
    finally:
        dist.all_reduce = all_reduce


def _different_names(rank):
    metrics = MetricAccumulator()
    metrics.add_sum("a", 1.0, 2)
    if rank == 1:
        metrics.add_max("b", 1.0)
    try:
        metrics.reduce()
    except RuntimeError as err:
        return str(err)
    return None


def _one_of_two_groups(rank):
    """Ranks 0 and 1 share their data, rank 2 is on its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    metrics = MetricAccumulator()
    metrics.add_mean("rank", rank)
    return metrics.reduce(groups[rank // 2])


def _everything(rank):
    return _uneven_data(rank), _different_names(rank), _one_of_two_groups(rank)


@pytest.fixture(scope="module")
def on_three_ranks(tmp_path_factory):
    return list(zip(*run_ranks(_everything, 3, tmp_path_factory.mktemp("ranks")), strict=True))


def test_ranks_agree_on_global_values_with_one_collective_a_kind(on_three_ranks):
    for out, calls in on_three_ranks[0]:
        assert out["y/mean"] == 3.0 and out["y/max"] == 6.0 and out["y/min"] == 1.0
        assert math.isnan(out["x/mean"]) and math.isnan(out["x/max"]) and math.isnan(out["x/min"])
        assert out["loss"] == 9.0 / 4.0
        assert not any(name.startswith("none") for name in out)
        assert [dtype for _, dtype in calls] == [torch.float64] * 2
        assert len({op for op, _ in calls}) == 2


def test_ranks_that_named_different_metrics_all_learn_it(on_three_ranks):
    assert on_three_ranks[1] == (
        "ranks named different metrics; this one named: a",
        "ranks named different metrics; this one named: a, b",
        "ranks named different metrics; this one named: a",
    )


def test_only_the_given_group_is_reduced_over(on_three_ranks):
    assert on_three_ranks[2] == ({"rank": 0.5}, {"rank": 0.5}, {"rank": 2.0})
