"""Whole runs with several rewards: routing, clipping, standardising, responses that cannot be scored, resuming."""

from __future__ import annotations

import json
import math
import os
import signal

import numpy as np
import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.errors import Interrupted, UserError
from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo

FUNCTIONS = """
def close(data_source, solution_str, ground_truth, extra_info):
    total = sum(int(c) for c in solution_str if c.isdigit())
    return 3 / (1 + abs(total - int(ground_truth))) - 0.1 * len(solution_str)


def flaky(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "5":
        raise ValueError("nobody knows")
    return 0.01 * len(solution_str)
"""
CLIP = (-0.5, 0.5)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Data sources task0 and task1; of the 12 prompts two have an answer that `flaky` cannot score."""
    file = write_case(tmp_path_factory.mktemp("rewards"), layers=2)
    (file.parent / "two.py").write_text(FUNCTIONS)
    return file


def settings(yaml_file, out: str, **changes):
    two = yaml_file.parent / "two.py"
    close = {"path": f"{two}:close", "sources": ["task0"], "clip": CLIP, "standardize": True, "weight": 2.0}
    flaky = {"path": f"{two}:flaky", "on_error": "drop"}
    rewards = [{"type": "function", **close}, {"type": "function", **flaky}]
    places = {"trainer__output_dir": str(yaml_file.parent / out)}
    return config_of(yaml_file, dist.get_world_size(), **{"rewards": rewards, **places, **changes})


def seen_batches(yaml_file, out: str, changes: dict) -> list[dict]:
    """Run; what every iteration's batch held, by sample."""
    real, seen = phases.score, []

    def score(run, samples, rows):
        batch, metrics = real(run, samples, rows)
        trained = [int(part.sum()) for part in batch["loss_mask"].split(batch.cu_seqlens.diff().tolist())]
        info = batch.info
        seen.append(
            {name: getattr(info, name) for name in ("score", "reward", "dropped", "source", "trainable")}
            | {"trained": trained, "mine": batch.indices}
        )
        return batch, metrics

    phases.score = score
    try:
        run_ppo(settings(yaml_file, out, **changes))
    finally:
        phases.score = real
    return seen


def test_rewards_are_routed_clipped_standardised_and_dropped(case):
    batches = on_ranks(1, seen_batches, case, "two", {"trainer__total_iterations": 2})
    lines = read_metrics(case.parent / "two")
    assert sum(batch["dropped"].sum() for batch in batches) == 4  # one epoch: two prompts, two responses each
    for batch, line in zip(batches, lines, strict=True):
        dropped, score = batch["dropped"], batch["score"]
        assert (batch["trainable"][dropped] == 0).all() and (batch["trainable"][~dropped] > 0).all()
        assert batch["trained"] == batch["trainable"].tolist()  # the loss mask says the same
        assert line["reward/dropped"] == line["reward/flaky/dropped"] == line["reward/flaky/errors"] == dropped.sum()
        assert line["reward/flaky/failed_share"] == pytest.approx(dropped.mean())
        assert line["critic/score/mean"] == pytest.approx(score[~dropped].mean())
        routed = np.array(batch["source"]) == "task0"
        for source, chosen in (("task0", routed), ("task1", ~routed)):
            assert line[f"critic/score/{source}/mean"] == pytest.approx(score[chosen & ~dropped].mean())
        # task1 has the one reward, which is not standardised; task0 has both.
        assert np.array_equal(batch["reward"][~routed], score[~routed])
        assert not np.allclose(batch["reward"][routed & ~dropped], score[routed & ~dropped])
        assert abs(score[routed]).max() <= 2 * CLIP[1] + 0.3 and 0 < line["reward/close/clip_share"] <= 1
        assert line["reward/stable"] in (0, 1) and math.isfinite(line["hacking/distinct_4"])
        assert line["timing_s/hacking"] >= 0 and all(math.isfinite(value) for value in line.values())
    first = lines[0]
    assert first["reward/close/mean"] == pytest.approx(first["reward/close/running_mean"])
    assert first["reward/close/running_std"] > 0


def test_two_ranks_agree_on_the_statistics(case):
    one = {"trainer__total_iterations": 1}
    on_ranks(1, seen_batches, case, "alone", one)
    on_ranks(2, seen_batches, case, "both", one, timeout=200)
    (alone,), (both,) = read_metrics(case.parent / "alone"), read_metrics(case.parent / "both")
    names = [name for name in alone if name.startswith(("reward/", "hacking/", "critic/score/"))]
    assert len(names) > 25
    for name in names:
        assert both[name] == pytest.approx(alone[name], rel=1e-9, abs=1e-12), name


def interrupted(yaml_file, out: str, changes: dict) -> None:
    """Ask the run to stop while it generates for its second iteration."""
    real = phases.generate

    def generate(run, *args):
        if run.iteration == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, *args)

    phases.generate = generate
    try:
        run_ppo(settings(yaml_file, out, **changes))
    except Interrupted:
        return
    finally:
        phases.generate = real
    raise AssertionError("the run was not interrupted")


def steady(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


def test_a_resumed_run_keeps_the_statistics(case):
    changes = {"trainer__total_iterations": 3, "trainer__save_freq": 10}
    on_ranks(1, seen_batches, case, "straight", changes)
    on_ranks(1, interrupted, case, "resumed", changes)
    state = json.loads((case.parent / "resumed/checkpoints/iter_000002/state.json").read_text())
    on_ranks(1, seen_batches, case, "resumed", changes)
    lines, again = read_metrics(case.parent / "straight"), read_metrics(case.parent / "resumed")
    assert state["reward"]["running"]["close"]["mean"] == lines[1]["reward/close/running_mean"]
    assert len({line["reward/close/running_mean"] for line in lines}) == 3
    assert [steady(line) for line in again] == [steady(line) for line in lines]


def test_every_response_dropped_trains_on_nothing_and_goes_on(case):
    path = case.parent / "broken.py"
    path.write_text("def score(data_source, solution_str, ground_truth, extra_info):\n    raise ValueError\n")
    rewards = [{"type": "function", "path": f"{path}:score", "on_error": "drop"}]
    on_ranks(1, seen_batches, case, "nothing", {"rewards": rewards, "trainer__total_iterations": 2})
    for line in read_metrics(case.parent / "nothing"):
        assert line["reward/dropped"] == 12 and line["actor/pg_loss"] == 0
        assert line["actor/reward_kl_penalty"] == 0


def refused(yaml_file) -> str:
    path = yaml_file.parent / "two.py"
    rewards = [{"type": "function", "path": f"{path}:close", "sources": ["task0"]}]
    try:
        run_ppo(settings(yaml_file, "refused", rewards=rewards))
    except UserError as error:
        return str(error)
    raise AssertionError("it started")


def test_a_source_without_a_reward_is_refused_before_models_are_loaded(case):
    assert "no reward covers data_source 'task1'" in on_ranks(1, refused, case)
