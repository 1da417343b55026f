"""A run's numbers do not depend on how it is divided: recorded rollouts, replayed in every layout."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.trainer.ppo import run_ppo

TP = "actor__parallel__tensor_model_parallel_size"
PP = "actor__parallel__pipeline_model_parallel_size"
SP = "actor__parallel__sequence_parallel"
DYNAMIC = {"actor__use_dynamic_bsz": True, "actor__ppo_max_token_len_per_gpu": 40}
ONE_RANK = {
    "one": {},
    "one_by_one": {"actor__ppo_micro_batch_size_per_gpu": 1},
    "packed": DYNAMIC,
    "recompute": {"actor__parallel__recompute": "full", "actor__parallel__use_distributed_optimizer": False},
}
TWO_RANKS = {
    "tp2": {TP: 2},
    "tp2_sp": {TP: 2, SP: True},
    "pp2": {PP: 2},
    "dp2": {},
    "dp2_packed": DYNAMIC,
    "roles_apart": {TP: 2, "critic__parallel": {"pipeline_model_parallel_size": 2}, "reference__parallel": {}},
    "cp2": {"actor__parallel__context_parallel_size": 2},
    "own_ranks": {
        "actor__parallel": {"num_ranks": 1, "offload": "all"},
        "critic__parallel": {"first_rank": 1, "offload": "optimizer"},
        "reference__parallel": {"first_rank": 1, "offload": "all"},
    },
}
FOUR_RANKS = {
    "tp2_pp2": {TP: 2, PP: 2},
    "dp2_pp2_packed": {PP: 2, **DYNAMIC},
    "own_ranks_tp2_pp2": {
        "actor__parallel": {"num_ranks": 2, "tensor_model_parallel_size": 2},
        "critic__parallel": {"first_rank": 2, "pipeline_model_parallel_size": 2},
        "reference__parallel": {"first_rank": 1, "num_ranks": 2},
    },
}
# What a replay cannot have: it generates nothing.
NOT_COMPARED = ("timing_s/", "perf/", "sync/", "rollout_corr/")


def replay(yaml_file, cases: dict) -> None:
    for name, changes in cases.items():
        run_ppo(
            config_of(
                yaml_file,
                world=dist.get_world_size(),
                rollout__engine="recorded",
                rollout__replay_dir=str(yaml_file.parent / "recorded"),
                trainer__output_dir=str(yaml_file.parent / name),
                **changes,
            )
        )


def record(yaml_file) -> None:
    folder = yaml_file.parent
    run_ppo(
        config_of(
            yaml_file,
            trainer__output_dir=str(folder / "live"),
            rollout__record_dir=str(folder / "recorded"),
            trainer__val_before_train=True,
            trainer__test_freq=2,
            data__val_files=[str(folder / "val.jsonl")],
        )
    )


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """The YAML file and the metrics of the run whose rollouts are recorded."""
    yaml_file = write_case(tmp_path_factory.mktemp("layouts"))
    on_ranks(1, record, yaml_file)
    return yaml_file, read_metrics(yaml_file.parent / "live")


def check_same(yaml_file, name: str, want: list[dict]) -> None:
    got = read_metrics(yaml_file.parent / name)
    assert [line["step"] for line in got] == [1, 2, 3]
    for line, expected in zip(got, want, strict=True):
        # How far training is from the rollouts is rounding and nothing else, so only its size can be compared.
        assert line["rollout_corr/logprob_abs_diff_mean"] < 1e-4
        for key, value in expected.items():
            if not key.startswith((*NOT_COMPARED, "val/")):
                assert line[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, line["step"], key)


@pytest.mark.parametrize(("world", "cases"), [(1, ONE_RANK), (2, TWO_RANKS), (4, FOUR_RANKS)])
def test_logged_numbers_agree_in_every_layout(live, world, cases):
    yaml_file, want = live
    on_ranks(world, replay, yaml_file, cases)
    for name in cases:
        check_same(yaml_file, name, want[1:])


def test_the_comparison_would_notice(live):
    """The recorded run learns: its numbers move from one iteration to the next by far more than the tolerance."""
    _, (_, first, second, third) = live
    for key in ("actor/loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "critic/vf_loss"):
        assert len({round(line[key], 5) for line in (first, second, third)}) == 3, key
    assert first["actor/kl_loss"] > 1e-3 and abs(second["actor/reward_kl_penalty"]) > 1e-3
    assert second["critic/values/mean"] > 0.01 and first["actor/pg_clipfrac"] > 0.01


def test_every_iteration_logs_finite_numbers_and_times(live):
    _, (before, *iterations) = live
    assert before["step"] == 0 and 0 <= before["val/task0/acc"] <= 1
    phases = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "step")
    for line in iterations:
        assert all(math.isfinite(value) for value in line.values())
        assert all(line[f"timing_s/{phase}"] >= 0 for phase in phases)
        assert line["perf/throughput"] == pytest.approx(line["perf/total_num_tokens"] / line["perf/time_per_step"])
        assert line["perf/total_num_tokens"] == 12 * (line["prompt_length/mean"] + line["response_length/mean"])
        assert line["rollout_corr/logprob_abs_diff_mean"] < 1e-4
    assert ["val/task0/acc" in line for line in iterations] == [False, True, True]  # every second, and at the end


def test_kl_controller_follows_the_measured_kl(live):
    _, (_, *iterations) = live
    coefficient = 0.1
    for line in iterations:
        assert line["actor/reward_kl_penalty_coeff"] == pytest.approx(coefficient)
        error = min(max(line["actor/reward_kl_penalty"] / 0.1 - 1, -0.2), 0.2)
        coefficient *= 1 + error * 12 / 100
