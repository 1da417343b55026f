"""Whole runs with schedules and a guard: the way back from a blow-up, values that follow their schedule, resuming."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
import torch
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.checkpoint.distributed import load_engine, load_moments
from megappo.checkpoint.store import CheckpointStore
from megappo.errors import Interrupted
from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo
from megappo.trainer.setup import build_engine

SPIKE = {"schedules": {"actor.optim.lr": {"shape": "stages", "stages": [[0.5, 1e-3], [0.625, 1.0], [1.0, 1e-3]]}}}
BACK = {
    "stable_after": 1,
    "rules": [
        {
            "name": "kl_jump",
            "metric": "actor/reward_kl_penalty",
            "above": 1.0,
            "actions": [{"scale": {"key": "actor.optim.lr", "by": 0.5}}, "rollback"],
        },
    ],
}
SAVING = {"trainer__save_freq": 1, "trainer__max_ckpt_to_keep": 1}
EIGHT = {"trainer__total_iterations": 8, "actor__ppo_epochs": 1}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case(tmp_path_factory.mktemp("guard"), layers=2)


def settings(yaml_file, out: str, sections: dict, **changes):
    """`sections`: whole sections of the configuration, such as guard and schedules."""
    whole = {f"{name}__{key}": value for name, keys in sections.items() for key, value in keys.items()}
    places = {"trainer__output_dir": str(yaml_file.parent / out)}
    return config_of(yaml_file, dist.get_world_size(), **{**places, **whole, **changes})


def go(yaml_file, out: str, sections: dict, changes: dict) -> None:
    run_ppo(settings(yaml_file, out, sections, **changes))


def read_events(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def steady(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


# --- the way back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_blow_up_is_rolled_back_and_the_lower_rate_stays(case, world):
    """A learning rate of 1 in iteration 5 shows in the KL of iteration 6, from which the guard goes back."""
    guarded, left = case.parent / f"guarded{world}", case.parent / f"left{world}"
    on_ranks(world, go, case, guarded.name, {"guard": BACK, **SPIKE}, {**EIGHT, **SAVING}, timeout=200)
    lines = read_metrics(guarded)
    (event,) = read_events(guarded)
    assert (event["step"], event["rule"], event["metric"]) == (6, "kl_jump", "actor/reward_kl_penalty")
    scale, back = event["actions"]
    assert scale == {"scale": "actor.optim.lr", "from": 1e-3, "to": 5e-4}
    assert back == {"rollback": "stable", "skip_data": True}
    assert [line["guard/rollbacks"] for line in lines] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert [line["schedule/actor.optim.lr"] for line in lines] == [1e-3] * 4 + [1.0, 1e-3, 5e-4, 5e-4]
    assert lines[4]["actor/lr"] == 1.0 and lines[6]["actor/lr"] == pytest.approx(5e-4)
    assert [line["step"] for line in lines] == list(range(1, 9))  # the clock never goes back
    assert lines[5]["actor/reward_kl_penalty"] > 1 > 0.3 > abs(lines[6]["actor/reward_kl_penalty"])
    assert all(math.isfinite(value) for line in lines[6:] for value in line.values())
    assert "timing_s/guard" in lines[5]
    if world == 1:
        on_ranks(1, go, case, left.name, SPIKE, EIGHT, timeout=200)
        unguarded = read_metrics(left)
        assert unguarded[4]["actor/reward_kl_penalty"] == lines[4]["actor/reward_kl_penalty"]
        # Left alone, the policy has collapsed to one answer; rolled back, it is alive and better than it was then.
        assert unguarded[7]["actor/entropy"] < 1e-6 and lines[7]["actor/entropy"] > 1
        assert lines[7]["critic/score/mean"] > max(lines[5]["critic/score/mean"], unguarded[7]["critic/score/mean"])
        assert not (left / "events.jsonl").exists()


def test_the_stable_checkpoint_outlives_newer_ones(case):
    rule = {"name": "late", "metric": "training/global_step", "above": 1, "unhealthy": True, "actions": ["warn"]}
    guard = {"stable_after": 1, "rules": [*BACK["rules"], rule]}
    on_ranks(1, go, case, "kept", {"guard": guard}, SAVING)
    store = CheckpointStore(case.parent / "kept/checkpoints")
    assert store.iterations() == [0, 3] and store.stable_iteration() == 0
    assert store.stable() == store.folder(0) and store.latest() == store.folder(3)


# --- other actions ---------------------------------------------------------------------------------------


def stopped(yaml_file, out: str, sections: dict, changes: dict) -> tuple[int, str]:
    try:
        go(yaml_file, out, sections, changes)
    except Interrupted as stop:
        return stop.code, str(stop)
    raise AssertionError("the run went on")


def test_updates_are_skipped_and_a_run_is_stopped(case):
    rules = [
        {"name": "skip", "metric": "critic/score/mean", "above": -100, "after": 1, "actions": ["skip_update"]},
        {"name": "enough", "metric": "training/global_step", "above": 2, "message": "of it", "actions": ["stop"]},
    ]
    changes = {"trainer__total_iterations": 5, "trainer__save_freq": 4}
    code, text = on_ranks(1, stopped, case, "stopped", {"guard": {"rules": rules}}, changes)
    assert code == 3 and "guard enough" in text and "of it" in text and "iter_000003" in text
    first, second, third = read_metrics(case.parent / "stopped")
    assert [line["training/update_skipped"] for line in (first, second, third)] == [0, 1, 1]
    assert first["actor/lr"] > 0 and "actor/lr" not in second and "critic/lr" not in second
    assert first["sync/version"] == 1 and "sync/version" not in second
    assert [event["rule"] for event in read_events(case.parent / "stopped")] == ["skip", "skip", "enough"]


def moments_then_weights(yaml_file) -> None:
    """`load_moments` beside `load_engine`, from a checkpoint whose weights differ."""
    folder = yaml_file.parent / "kept/checkpoints/iter_000003/actor"
    config = config_of(yaml_file)
    part, whole = (
        build_engine(config.model.path, config.actor.parallel, config.model, optim=config.actor.optim) for _ in range(2)
    )
    before = {name: tensor.clone() for name, tensor in part.stream_weights(torch.float32)}
    with torch.no_grad():
        load_moments(part, folder)
    load_engine(whole, folder)
    after = dict(part.stream_weights(torch.float32))
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = dict(whole.stream_weights(torch.float32))
    assert not all(torch.equal(before[name], other[name]) for name in before)
    got, want = list(part.optimizer.tensors()), list(whole.optimizer.tensors())
    assert got and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert any(bool(tensor.any()) for tensor in got)


def test_moments_are_restored_without_the_weights(case):
    on_ranks(1, moments_then_weights, case)


def test_a_rule_restores_the_moments_and_training_goes_on(case):
    rule = {"name": "calm", "metric": "critic/vf_loss", "above": -1, "after": 1, "actions": ["restore_optimizer"]}
    on_ranks(1, go, case, "restored", {"guard": {"rules": [rule], "stable_after": 1}}, SAVING)
    lines = read_metrics(case.parent / "restored")
    assert [line["guard/events"] for line in lines] == [0, 1, 1] and lines[2]["actor/lr"] > 0


def test_recorded_rollouts_are_left_on_drift(case):
    """After the switch answers come from the policy itself: their log-probs agree with the trainer's."""
    record = {"rollout__record_dir": str(case.parent / "recorded/rollouts")}
    on_ranks(1, go, case, "recorded", {}, record)
    rule = {"name": "off", "metric": "rollout_corr/k3_kl", "above": 1e-4, "actions": ["on_policy"]}
    replay = {"rollout__engine": "recorded", "rollout__replay_dir": record["rollout__record_dir"]}
    other = {"actor__optim__lr": 0.03, "critic__optim__lr": 1e-3}
    on_ranks(1, go, case, "replayed", {"guard": {"rules": [rule]}}, {**replay, **other})
    lines = read_metrics(case.parent / "replayed")
    assert [event["step"] for event in read_events(case.parent / "replayed")] == [2]
    assert lines[1]["rollout_corr/k3_kl"] > 1e-4 > lines[2]["rollout_corr/k3_kl"]


# --- schedules -------------------------------------------------------------------------------------------

CHANGING = {
    "schedules": {
        "data.train_batch_size": {"start": 3, "end": 6, "fraction": 0.5},
        "rollout.temperature": {"start": 1.2, "end": 0.9},
        "algorithm.kl_ctrl.kl_coef": {"start": 0.0, "end": 0.1, "shape": "constant", "delay": 2},
    },
    "guard": {
        "rules": [
            {
                "name": "cut",
                "metric": "critic/lr",
                "above": 0,
                "patience": 3,
                "actions": [{"scale": {"key": "critic.optim.lr", "by": 0.5}}],
            }
        ]
    },
}
FIVE = {"trainer__total_iterations": 5, "trainer__save_freq": 10, "actor__ppo_epochs": 1}


def interrupted(yaml_file, out: str, sections: dict, changes: dict, during: int) -> None:
    """Ask the run to stop while it generates for iteration `during` (1-based)."""
    real = phases.generate

    def generate(run, *args):
        if run.iteration == during - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, *args)

    phases.generate = generate
    try:
        go(yaml_file, out, sections, changes)
    except Interrupted:
        return
    finally:
        phases.generate = real
    raise AssertionError("the run was not interrupted")


def test_schedules_are_followed_and_a_resumed_run_continues_them(case):
    folder = case.parent / "changing"
    record = {"rollout__record_dir": str(folder / "rollouts")}
    on_ranks(1, go, case, "changing", CHANGING, {**FIVE, **record})
    lines = read_metrics(folder)
    sizes = [len((folder / f"rollouts/rollouts_{i:06d}.jsonl").read_text().splitlines()) for i in range(5)]
    prompts = [line["schedule/data.train_batch_size"] for line in lines]
    assert sizes == [2 * size for size in prompts] and prompts[0] == 3 and prompts[-1] == 6 and len(set(prompts)) == 2
    temperatures = [line["schedule/rollout.temperature"] for line in lines]
    assert temperatures[0] == 1.2 and temperatures[-1] == 0.9 and sorted(temperatures, reverse=True) == temperatures
    # Rollout and training divide by the same temperature, or their log-probs would differ.
    assert all(line["rollout_corr/logprob_abs_diff_mean"] < 1e-4 for line in lines)
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in lines]
    assert coefficients[:3] == [0, 0, 0.1] and coefficients[3] != 0.1  # at 0 the controller rests
    rates = [line["critic/lr"] for line in lines]
    assert rates == pytest.approx([1e-3] * 3 + [5e-4] * 2)  # the guard saw the third one

    on_ranks(1, interrupted, case, "changing_resumed", CHANGING, FIVE, 2)
    on_ranks(1, go, case, "changing_resumed", CHANGING, FIVE)
    again = read_metrics(case.parent / "changing_resumed")
    assert [steady(line) for line in again] == [steady(line) for line in lines]
    (event,) = read_events(case.parent / "changing_resumed")
    assert event["step"] == 3 and event["actions"] == [{"scale": "critic.optim.lr", "from": 1e-3, "to": 5e-4}]
