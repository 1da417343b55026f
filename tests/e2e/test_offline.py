"""Offline PPO: runs on recorded responses, from the YAML file to the trained model."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.config.load import load_config
from megappo.errors import UserError
from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo

WANTED = "9"
REWARD = f"""
def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == {WANTED!r})
"""
OFFLINE = {
    "rollout__engine": "recorded",
    "actor__use_kl_loss": False,
    "algorithm__use_kl_in_reward": False,
    "actor__ppo_mini_batch_size": 6,
    "actor__ppo_epochs": 1,
}
RECORDED = {"rewards": [{"type": "recorded"}], **OFFLINE}
LAYOUTS = {
    1: {"alone": {}},
    2: {
        "tp2": {"actor__parallel": {"tensor_model_parallel_size": 2}},
        "pp2": {"actor__parallel": {"pipeline_model_parallel_size": 2}},
        "dp2": {},
    },
}


def write_rows(folder, name: str, rows: list[dict]) -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The tiny experiment, with preference pairs (the answer 9 is preferred) and the same responses with scores."""
    folder = tmp_path_factory.mktemp("offline")
    file = write_case(folder, layers=2, prompts=24)
    (folder / "reward.py").write_text(REWARD)
    rng = random.Random(5)
    prompts = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    others = ["7", "2", "4 7", "2 2", "4", "9 9", "7 +"]
    pairs = [{**row, "chosen": WANTED, "rejected": rng.choice(others)} for row in prompts]
    write_rows(folder, "pairs.jsonl", pairs)
    scored = [
        {**prompt, "response": [pair["chosen"], pair["rejected"]], "score": [1.0, -1.0]}
        for prompt, pair in zip(prompts, pairs, strict=True)
    ]
    write_rows(folder, "scored.jsonl", scored)
    return file


def go(yaml_file, out: str, changes: dict) -> list[dict[str, float]]:
    folder = yaml_file.parent
    files = {"data__train_files": [str(folder / "pairs.jsonl")], "trainer__output_dir": str(folder / out)}
    run_ppo(config_of(yaml_file, dist.get_world_size(), **{**files, **changes}))
    return read_metrics(folder / out)


# --- it learns -------------------------------------------------------------------------------------------


def improve(yaml_file, out: str, changes: dict) -> list[dict[str, float]]:
    places = {"data__val_files": [str(yaml_file.parent / "val.jsonl")], "trainer__val_before_train": True}
    return go(yaml_file, out, OFFLINE | places | {"trainer__total_iterations": 12, "trainer__test_freq": 12} | changes)


@pytest.mark.parametrize("name", ["gae", "rebel"])
def test_preference_pairs_alone_raise_the_score_on_held_out_prompts(case, name):
    changes = {"actor__optim__lr": 3e-3, "critic__optim__lr": 3e-3}
    if name == "rebel":
        changes = {"algorithm__adv_estimator": "rloo", "actor__policy_loss": "rebel", "actor__optim__lr": 1e-3}
        changes |= {"actor__rebel_eta": 4.0}
        changes |= {"actor__loss_agg_mode": "seq-mean-token-sum", "trainer__total_iterations": 24}
        changes["trainer__test_freq"] = 24
    lines = on_ranks(1, improve, case, f"improve_{name}", changes, timeout=200)
    before, after = lines[0], lines[-1]
    assert before["val/task0/reward/mean"] <= 0.5
    assert after["val/task0/reward/mean"] == after["val/task1/reward/mean"] == 1.0
    assert after["rollout_corr/k3_kl"] > 0  # the policy has left the one that it started from


# --- what the loop is given ------------------------------------------------------------------------------


def watched(yaml_file, out: str, changes: dict) -> tuple[list[dict], list[dict[str, np.ndarray]]]:
    """Metrics, and tokens, masks, scores and behaviour log-probs of every iteration, sample after sample."""
    batches = []
    real = phases.batch_metrics

    def keep(run, batch):
        columns = {name: batch[name].numpy().copy() for name in ("tokens", "loss_mask", "rollout_logprobs")}
        batches.append(columns | {"score": batch.info.score, "old_logprobs": batch["old_logprobs"].numpy().copy()})
        return real(run, batch)

    phases.batch_metrics = keep
    try:
        return go(yaml_file, out, changes), batches
    finally:
        phases.batch_metrics = real


def test_behaviour_is_the_starting_policy_unless_recorded(case):
    lines, batches = on_ranks(1, watched, case, "behaviour", {**RECORDED, "trainer__total_iterations": 4})
    mask = batches[0]["loss_mask"]
    assert np.allclose(batches[0]["rollout_logprobs"][mask], batches[0]["old_logprobs"][mask], atol=1e-5)
    assert lines[0]["rollout_corr/k3_kl"] < 1e-9 < 1e-4 < lines[-1]["rollout_corr/k3_kl"]
    assert sorted(set(batches[0]["score"])) == [-1.0, 1.0]


def test_scored_responses_are_the_pairs_under_another_name(case):
    pairs, _ = on_ranks(1, watched, case, "as_pairs", RECORDED)
    files = {"data__train_files": [str(case.parent / "scored.jsonl")]}
    scored, _ = on_ranks(1, watched, case, "as_scored", RECORDED | files)
    assert [steady(line) for line in pairs] == [steady(line) for line in scored]


def steady(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


def test_recorded_log_probs_are_taken_as_they_are(case):
    folder = case.parent
    rows = [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]
    rows = [row | {"response": [WANTED, "7"], "logprobs": [[-0.5, -0.25], [-1.0, -2.0]]} for row in rows]
    files = {"data__train_files": [write_rows(folder, "known.jsonl", rows)]}
    changes = {**RECORDED, **files, "trainer__total_iterations": 1}
    _, (batch,) = on_ranks(1, watched, case, "known", changes)
    values = batch["rollout_logprobs"][batch["loss_mask"]].reshape(-1, 4)
    assert (values == np.array([-0.5, -0.25, -1.0, -2.0], dtype=np.float32)).all()
    assert not (folder / "known/behaviour_logprobs.safetensors").exists()
    # or computed all the same
    _, (batch,) = on_ranks(1, watched, case, "unknown", {**changes, "offline__behaviour": "policy"})
    assert not np.isin(batch["rollout_logprobs"][batch["loss_mask"]], values).any()


# --- layouts and resuming --------------------------------------------------------------------------------


def everywhere(yaml_file, world: int, changes: dict) -> dict[str, list[dict]]:
    return {name: go(yaml_file, f"layout_{name}", changes | more) for name, more in LAYOUTS[world].items()}


def test_every_layout_gives_the_same_numbers(case):
    want = on_ranks(1, everywhere, case, 1, RECORDED)["alone"]
    for name, lines in on_ranks(2, everywhere, case, 2, RECORDED, timeout=200).items():
        for line, expected in zip(lines, want, strict=True):
            for key, value in steady(expected).items():
                if not key.startswith("sync/"):
                    assert line[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, line["step"], key)


def test_a_resumed_run_is_the_uninterrupted_one(case):
    changes = {**RECORDED, "trainer__save_freq": 2, "trainer__total_iterations": 4}
    whole = on_ranks(1, go, case, "whole", changes)
    on_ranks(1, go, case, "parts", {**changes, "trainer__total_iterations": 2})
    parts = on_ranks(1, go, case, "parts", changes)
    assert [steady(line) for line in parts] == [steady(line) for line in whole]


def failure(yaml_file, out: str, changes: dict) -> str:
    try:
        go(yaml_file, out, changes)
    except UserError as err:
        return str(err)
    raise AssertionError("no error")


def test_a_resumed_run_wants_its_behaviour_log_probs_back(case):
    changes = {**RECORDED, "trainer__save_freq": 1, "trainer__total_iterations": 1}
    on_ranks(1, go, case, "bereft", changes)
    file = case.parent / "bereft/behaviour_logprobs.safetensors"
    spare = shutil.copy(file, case.parent / "spare")
    file.write_bytes(file.read_bytes()[:-8])
    again = {**changes, "trainer__total_iterations": 2}
    said = on_ranks(1, failure, case, "bereft", again)
    assert str(file) in said and "damaged" in said and "\n" not in said
    file.unlink()
    said = on_ranks(1, failure, case, "bereft", again)
    assert "are missing" in said and "trainer.resume=never" in said
    shutil.copy(spare, file)
    assert len(on_ranks(1, go, case, "bereft", again)) == 2


# --- drift -----------------------------------------------------------------------------------------------


def test_a_policy_that_drifts_too_far_goes_on_policy(case):
    changes = {**OFFLINE, "offline__fallback": "embedded", "offline__max_drift": 0.001, "actor__optim__lr": 3e-3}
    lines, batches = on_ranks(1, watched, case, "drift", {**changes, "trainer__total_iterations": 5})
    (event,) = [json.loads(line) for line in (case.parent / "drift/events.jsonl").read_text().splitlines()]
    assert event["rule"] == "off_policy_drift" and event["metric"] == "rollout_corr/k3_kl"
    switch = event["step"]
    assert 1 < switch < 5
    assert lines[switch - 1]["rollout_corr/k3_kl"] > 0.001
    for line in lines[switch:]:  # sampled by the policy itself
        assert line["rollout_corr/logprob_abs_diff_mean"] < 1e-4
    recorded = {tuple(batch["tokens"].tolist()) for batch in batches[:switch]}
    assert not {tuple(batch["tokens"].tolist()) for batch in batches[switch:]} & recorded


# --- bad input -------------------------------------------------------------------------------------------


def test_noisy_pairs_are_refused_with_their_share(case):
    folder = case.parent
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:2]]
    files = {"data__train_files": [write_rows(folder, "noisy.jsonl", rows + turned)]}
    said = on_ranks(1, failure, case, "noisy", RECORDED | files)
    assert "data.max_noise=0.12" in said and "contradicted" in said and "\n" not in said
    on_ranks(1, go, case, "tolerated", RECORDED | files | {"data__max_noise": 0.5, "trainer__total_iterations": 1})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["rewards=[{type: recorded}]"], "rollout.engine=recorded"),
        (["rollout.engine=recorded", "algorithm.adv_estimator=remax"], "remax needs greedy answers"),
        (
            ["rollout.engine=recorded", "rewards=[{type: recorded}]", "offline.fallback=embedded"],
            "generated responses have no recorded score",
        ),
        (
            ["rollout.engine=recorded", "rewards=[{type: recorded}]", "data.val_files=[val.jsonl]"],
            "no reward can score the answers",
        ),
        (["rollout.engine=recorded", "offline.fallbak=embedded"], "did you mean offline.fallback?"),
        (["actor.policy_loss=rebel", "rollout.n=1"], "policy_loss rebel compares responses"),
        (["actor.policy_loss=rebel"], "policy_loss rebel has no use for a critic"),
    ],
)
def test_settings_that_do_not_fit_are_found_before_anything_starts(case, monkeypatch, changes, said):
    monkeypatch.chdir(case.parent)
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        load_config(case, changes)
