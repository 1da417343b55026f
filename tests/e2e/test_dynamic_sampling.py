"""Dynamic sampling in whole runs: which groups are trained on, ids, other numbers of ranks, resuming, failing."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.errors import Interrupted, UserError
from megappo.rewards.dynamic import find_signal
from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo

# task1 has a constant reward: half of the prompts never carry signal.
REWARD = """
def half(data_source, solution_str, ground_truth, extra_info):
    if data_source == "task1":
        return 0.25
    return float(sum(map(ord, solution_str)) % 97) / 97 + 0.001 * len(solution_str)
"""
DYNAMIC = {"algorithm__dynamic_sampling__enabled": True, "data__train_batch_size": 4, "actor__ppo_mini_batch_size": 2}
SMALL = {"trainer__total_iterations": 3, "actor__ppo_epochs": 1}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    file = write_case(tmp_path_factory.mktemp("dynamic"), layers=2)
    (file.parent / "half.py").write_text(REWARD)
    return file


def settings(yaml_file, out: str, **changes):
    rewards = [{"type": "function", "path": f"{yaml_file.parent / 'half.py'}:half", "standardize": True}]
    places = {"trainer__output_dir": str(yaml_file.parent / out)}
    return config_of(yaml_file, dist.get_world_size(), **{"rewards": rewards, **places, **DYNAMIC, **SMALL, **changes})


def seen_batches(yaml_file, out: str, changes: dict) -> list[dict]:
    """Run; the metadata of every iteration's batch, and the data position after it."""
    real, seen = phases.score_parts, []

    def score_parts(run, parts, keep=None):
        batch, metrics = real(run, parts, keep)
        info = batch.info
        names = ("sample_id", "group_id", "score", "source", "length")
        seen.append({name: np.array(getattr(info, name)) for name in names} | {"position": run.data_position})
        return batch, metrics

    phases.score_parts = score_parts
    try:
        run_ppo(settings(yaml_file, out, **changes))
    finally:
        phases.score_parts = real
    return seen


def steady(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


def test_only_groups_with_signal_are_trained_on(case):
    batches = on_ranks(1, seen_batches, case, "one", {})
    lines = read_metrics(case.parent / "one")
    assert all(batch["group_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] for batch in batches)
    ids = np.concatenate([batch["sample_id"] for batch in batches])
    assert len(set(ids.tolist())) == len(ids)
    position, more = 0, 0
    for batch, line in zip(batches, lines, strict=True):
        filled = int(line["dynamic_sampling/filled"])
        found = find_signal(batch["score"], batch["group_id"])
        assert (~found.signal).sum() == filled and line["dynamic_sampling/kept"] == 4 - filled
        assert set(batch["source"][np.repeat(found.signal, 2)]) == {"task0"}
        assert (np.diff(batch["sample_id"].reshape(4, 2)[:, 0]) > 0).all()  # the earliest first
        drawn = line["dynamic_sampling/drawn"]
        assert batch["position"] - position >= drawn > 4 or filled == 0
        assert 1 <= line["dynamic_sampling/rounds"] <= 3 and 0 < line["dynamic_sampling/no_signal_share"] < 1
        # Statistics count all that was drawn: with 0.25 for task1 their mean is not the batch's.
        assert line["reward/half/mean"] == pytest.approx(line["dynamic_sampling/score_mean"])
        assert line["critic/score/mean"] == pytest.approx(batch["score"].mean())
        position, more = batch["position"], more + (line["dynamic_sampling/rounds"] > 1)
    assert more >= 2 and sum(line["dynamic_sampling/filled"] for line in lines) == 0


def test_two_ranks_keep_the_same_groups(case):
    changes = {"trainer__total_iterations": 2}
    alone = on_ranks(1, seen_batches, case, "alone", changes)
    both = on_ranks(2, seen_batches, case, "both", changes, timeout=200)
    for a, b in zip(alone, both, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    for a, b in zip(read_metrics(case.parent / "alone"), read_metrics(case.parent / "both"), strict=True):
        for name in steady(a):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name


def interrupted(yaml_file, out: str, changes: dict) -> None:
    """Ask the run to stop in the second round of its second iteration."""
    real = phases.draw

    def draw(run, prompts, rounds=0):
        if run.iteration == 1 and rounds == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, prompts, rounds)

    phases.draw = draw
    try:
        run_ppo(settings(yaml_file, out, **changes))
    except Interrupted:
        return
    finally:
        phases.draw = real
    raise AssertionError("the run was not interrupted")


def test_a_resumed_run_draws_the_same(case):
    changes = {"trainer__save_freq": 10, "trainer__total_iterations": 3}
    straight = on_ranks(1, seen_batches, case, "straight", changes)
    on_ranks(1, interrupted, case, "resumed", changes)
    (last,) = on_ranks(1, seen_batches, case, "resumed", changes)
    assert np.array_equal(last["sample_id"], straight[2]["sample_id"]) and last["position"] == straight[2]["position"]
    lines, again = read_metrics(case.parent / "straight"), read_metrics(case.parent / "resumed")
    assert [steady(line) for line in again] == [steady(line) for line in lines]


def test_recorded_rounds_replay_and_remax_finds_its_baselines(case):
    folder = case.parent / "rollouts"
    remax = {"algorithm__adv_estimator": "remax", "trainer__total_iterations": 2, "trainer__seed": 5}
    first = on_ranks(1, seen_batches, case, "recorded", {**remax, "rollout__record_dir": str(folder)})
    replay = {"rollout__engine": "recorded", "rollout__replay_dir": str(folder)}
    second = on_ranks(2, seen_batches, case, "replayed", {**remax, **replay}, timeout=200)
    assert any(line["dynamic_sampling/rounds"] > 1 for line in read_metrics(case.parent / "recorded"))
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a["sample_id"], b["sample_id"])
    pairs = zip(read_metrics(case.parent / "recorded"), read_metrics(case.parent / "replayed"), strict=True)
    for a, b in pairs:
        assert b["critic/advantages/max"] == pytest.approx(a["critic/advantages/max"], rel=1e-3)


def refused(yaml_file, changes: dict) -> str:
    try:
        run_ppo(settings(yaml_file, "refused", **changes))
    except UserError as error:
        return str(error)
    raise AssertionError("it went on")


def test_too_few_groups_fail_with_one_line_or_fill_the_batch(case):
    path = case.parent / "flat.py"
    path.write_text("def flat(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    flat = {"rewards": [{"type": "function", "path": f"{path}:flat"}], "trainer__total_iterations": 1}
    said = on_ranks(2, refused, case, {**flat, "algorithm__dynamic_sampling__shortfall": "fail"}, timeout=200)
    assert said.startswith("algorithm.dynamic_sampling: only 0 of 4 prompts") and "\n" not in said
    on_ranks(2, seen_batches, case, "filled", flat, timeout=200)
    (line,) = read_metrics(case.parent / "filled")
    assert line["dynamic_sampling/filled"] == 4 and line["dynamic_sampling/rounds"] == 3
    assert line["dynamic_sampling/all_success_share"] == 1
    assert line["training/epoch"] == 0 and line["dynamic_sampling/drawn"] == 12


def test_one_response_a_prompt_is_refused(case):
    with pytest.raises(UserError, match="dynamic_sampling compares"):
        config_of(case, rollout__n=1, **DYNAMIC)
