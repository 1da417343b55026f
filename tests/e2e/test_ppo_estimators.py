"""Every advantage estimator and policy loss in a run of its own, checked against its formula on the batch it saw."""

from __future__ import annotations

import numpy as np
import pytest
from ppo_case import config_of, read_metrics, write_case
from safetensors.numpy import load_file
from warm_ranks import on_ranks

from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo

PLAIN = {  # nothing but the estimator between score and advantage
    "trainer__total_iterations": 2,
    "actor__use_kl_loss": False,
    "actor__entropy_coeff": 0.0,
    "algorithm__use_kl_in_reward": False,
}
ONE_STEP = {"actor__ppo_epochs": 1, "actor__ppo_mini_batch_size": 6}  # the ratio is 1: the loss is known
REBEL = {"algorithm__adv_estimator": "rloo", "actor__policy_loss": "rebel", "actor__rebel_eta": 2.0}
REBEL |= {"actor__loss_agg_mode": "seq-mean-token-sum", "actor__optim__lr": 1e-5}
CASES = {
    "gae": {},
    "grpo": {"algorithm__adv_estimator": "grpo"},
    "dr_grpo": {"algorithm__adv_estimator": "grpo", "algorithm__norm_adv_by_std_in_grpo": False},
    "rloo": {"algorithm__adv_estimator": "rloo"},
    "reinforce_plus_plus": {"algorithm__adv_estimator": "reinforce_plus_plus", "algorithm__gamma": 0.9},
    "reinforce_plus_plus_baseline": {"algorithm__adv_estimator": "reinforce_plus_plus_baseline"},
    "remax": {"algorithm__adv_estimator": "remax"},
    "ppo": {"algorithm__adv_estimator": "grpo", **ONE_STEP},
    "gspo": {"algorithm__adv_estimator": "grpo", "actor__policy_loss": "gspo", **ONE_STEP},
    "cispo": {"algorithm__adv_estimator": "grpo", "actor__policy_loss": "cispo", **ONE_STEP},
    "reinforce": {"algorithm__adv_estimator": "grpo", "actor__policy_loss": "reinforce", **ONE_STEP},
    "rebel": {**REBEL, **ONE_STEP},
    "rebel_steps": REBEL,
    "sequence_means": {"algorithm__adv_estimator": "rloo", **ONE_STEP}
    | {"actor__loss_agg_mode": "seq-mean-token-mean", "actor__policy_loss": "gspo"},
    "shaped": {
        "algorithm__reward_shaping__clip": [0.05, 0.3],
        "algorithm__reward_shaping__overlong": {"enabled": True, "buffer_len": 3, "penalty_factor": 0.5},
        "algorithm__adv_estimator": "remax",
    },
}


def run_cases(yaml_file, cases: dict) -> dict:
    """For each case: metrics, what the first actor update saw, and whether its step favoured the advantages."""
    results = {}
    real = phases.update_actor
    for name, changes in cases.items():
        seen = []

        def update(run, batch, plan, seen=seen):
            metrics = real(run, batch, plan)
            before = batch["old_logprobs"].clone()
            phases.add_logprobs(run, batch)
            rows = np.repeat(np.arange(len(batch.info)), batch.info.length)
            columns = {key: column.numpy().copy() for key, column in batch.columns.items()}
            columns |= {"new_logprobs": columns["old_logprobs"], "old_logprobs": before.numpy(), "row": rows}
            seen.append((vars(batch.info), columns))
            return metrics

        phases.update_actor = update
        try:
            out = yaml_file.parent / name
            run_ppo(config_of(yaml_file, trainer__output_dir=str(out), **PLAIN | changes))
        finally:
            phases.update_actor = real
        results[name] = (read_metrics(out), *seen[0])
    return results


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case(tmp_path_factory.mktemp("estimators"), layers=2)


@pytest.fixture(scope="module")
def runs(case):
    return on_ranks(1, run_cases, case, CASES)


def per_sample(columns: dict, name: str) -> np.ndarray:
    """The one value that a column has on all trained tokens of a sample."""
    out = []
    for row in range(columns["row"].max() + 1):
        values = columns[name][(columns["row"] == row) & columns["loss_mask"]]
        assert np.allclose(values, values[0])
        out.append(values[0])
    return np.array(out)


@pytest.mark.parametrize("name", CASES)
def test_a_run_learns_something_finite(runs, case, name):
    metrics, _, columns = runs[name]
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert np.isfinite(list(line.values())).all()
        assert line["actor/skipped_steps"] == 0 and line["actor/grad_norm"] > 0
        assert ("critic/vf_loss" in line) == (name == "gae") and "actor/kl_loss" not in line
    # One update raises the probability of what was better than expected.
    gain = columns["new_logprobs"] - columns["old_logprobs"]
    assert (gain * columns["advantages"])[columns["loss_mask"]].sum() > 0
    before = load_file(case.parent / "model/model.safetensors")
    after = load_file(case.parent / name / "final_hf/model.safetensors")
    assert before.keys() == after.keys()
    assert all(not np.array_equal(before[key], after[key]) for key in before)


def test_group_estimators_follow_their_formulas(runs):
    for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"):
        _, info, columns = runs[name]
        advantages, scores = per_sample(columns, "advantages"), info["score"].reshape(6, 2)
        assert (info["group_id"] == np.repeat(np.arange(6), 2)).all()
        centred = scores - scores.mean(1, keepdims=True)
        want = {
            "grpo": centred / (scores.std(1, ddof=1, keepdims=True) + 1e-6),
            "dr_grpo": centred,
            "rloo": scores - scores[:, ::-1],
            "reinforce_plus_plus_baseline": centred,
        }[name].reshape(-1)
        if name == "reinforce_plus_plus_baseline":  # whitened over tokens
            tokens = want[columns["row"]][columns["loss_mask"]]
            want = (want - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
        assert np.allclose(advantages, want, rtol=1e-4, atol=1e-5), name


def test_rewards_to_go_are_discounted_and_whitened(runs):
    _, info, columns = runs["reinforce_plus_plus"]
    tokens = []
    for row, score in enumerate(info["score"]):
        count = int(((columns["row"] == row) & columns["loss_mask"]).sum())
        tokens += [score * 0.9**k for k in reversed(range(count))]
    want = (np.array(tokens) - np.mean(tokens)) / np.sqrt(np.var(tokens, ddof=1) + 1e-8)
    assert np.allclose(columns["advantages"][columns["loss_mask"]], want, rtol=1e-4, atol=1e-5)


def test_remax_subtracts_the_shaped_score_of_the_greedy_answer(runs):
    for name, shaped in (("remax", False), ("shaped", True)):
        _, info, columns = runs[name]
        scores, lengths = info["score"], info["length"] - info["prompt_len"]
        if shaped:
            scores = np.clip(scores, 0.05, 0.3) - 0.5 * np.clip((lengths - 3) / 3, 0, None)
        baseline = (scores - per_sample(columns, "advantages")).reshape(6, 2)
        assert np.allclose(baseline[:, 0], baseline[:, 1], atol=1e-6), name  # one greedy answer a prompt
        if shaped:
            assert baseline.min() >= 0.05 - 0.5 - 1e-6 and baseline.max() <= 0.3 + 1e-6


def test_policy_losses_at_ratio_one(runs):
    for name in ("ppo", "gspo", "cispo", "reinforce", "sequence_means"):
        metrics, _, columns = runs[name]
        mask = columns["loss_mask"]
        advantages, logprobs = columns["advantages"][mask], columns["old_logprobs"][mask]
        terms = -advantages * (logprobs if name in ("cispo", "reinforce") else 1.0)
        want = terms.mean()
        if name == "sequence_means":
            rows = columns["row"][mask]
            want = np.mean([terms[rows == row].mean() for row in np.unique(rows)])
        assert metrics[0]["actor/pg_loss"] == pytest.approx(want, rel=1e-4, abs=1e-6), name


def test_rebel_regresses_on_the_difference_of_the_rewards(runs):
    """At the old policy all log-ratios are 0: the objective is half the mean squared difference of the rewards."""
    metrics, info, columns = runs["rebel"]
    scores = info["score"].reshape(6, 2)
    differences = scores[:, 0] - scores[:, 1]
    assert metrics[0]["actor/rebel_loss"] == pytest.approx(0.5 * np.mean(differences**2), rel=1e-5)
    want = 4 * (scores - scores.mean(1, keepdims=True)) / 2.0  # eta is 2
    assert np.allclose(per_sample(columns, "advantages"), want.reshape(-1), atol=1e-6)
    later = runs["rebel_steps"][0][0]  # four steps on the same differences
    assert later["actor/rebel_loss"] < metrics[0]["actor/rebel_loss"]


RECORDED = ("remax", "grpo", "reinforce_plus_plus_baseline", "rebel_steps")


def record(yaml_file) -> dict[str, list[dict]]:
    metrics = {}
    for name in RECORDED:
        out = yaml_file.parent / f"{name}_recording"
        places = {"trainer__output_dir": str(out), "rollout__record_dir": str(out / "rollouts")}
        run_ppo(config_of(yaml_file, **PLAIN | CASES[name] | places))
        metrics[name] = read_metrics(out)
    return metrics


def replay(yaml_file) -> dict[str, list[dict]]:
    metrics = {}
    for name in RECORDED:
        out, recorded = yaml_file.parent / f"{name}_replay", yaml_file.parent / f"{name}_recording/rollouts"
        places = {"trainer__output_dir": str(out), "rollout__replay_dir": str(recorded)}
        run_ppo(config_of(yaml_file, 2, rollout__engine="recorded", **PLAIN | CASES[name] | places))
        metrics[name] = read_metrics(out)
    return metrics


def test_groups_spread_over_replicas_are_compared_all_the_same(case):
    """Two answers to a prompt may be trained on different replicas; greedy baselines are recorded, too."""
    recorded, replayed = on_ranks(1, record, case), on_ranks(2, replay, case)
    for name in RECORDED:
        for line, expected in zip(replayed[name], recorded[name], strict=True):
            for key, value in expected.items():
                if not key.startswith(("timing_s/", "perf/", "sync/")):
                    assert line[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, line["step"], key)
