"""Reward models: trained on preference pairs, exported, loaded by transformers, used as reward and as critic."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from ppo_case import config_of, read_metrics
from safetensors.torch import load_file, save_file
from warm_ranks import on_ranks

from megappo.data.prepare.tiny_model import write_tiny_model
from megappo.errors import Interrupted, UserError
from megappo.trainer import reward_model
from megappo.trainer.ppo import run_ppo
from megappo.trainer.reward_model import run_reward_model

LENGTH = 6


def make_pairs(n: int, seed: int) -> list[dict]:
    """The better response has more sevens: something that a tiny model can learn."""
    rng = random.Random(seed)
    rows = []
    while len(rows) < n:
        one, two = ("".join(rng.choice("0777123456") for _ in range(rng.randint(2, LENGTH))) for _ in range(2))
        if one.count("7") != two.count("7"):
            better, worse = sorted((one, two), key=lambda text: -text.count("7"))
            gap = float(better.count("7") - worse.count("7"))
            rows.append({"prompt": rng.choice("1234"), "chosen": better, "rejected": worse, "margin": gap / 4})
    return rows


def write_jsonl(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A YAML file beside its data and model: 512 pairs, 48 steps of 32."""
    folder = tmp_path_factory.mktemp("reward_model")
    write_jsonl(folder / "train.jsonl", make_pairs(512, 0))
    write_jsonl(folder / "val.jsonl", make_pairs(128, 1))
    write_jsonl(folder / "prompts.jsonl", [{"prompt": p, "data_source": "digits"} for p in "123412341234"])
    write_tiny_model(folder / "model", ["0123456789"], hidden=48, layers=2, heads=4)
    settings = {
        "trainer": {"output_dir": "out", "logger": ["jsonl"]}
        | {"total_iterations": 3, "save_freq": -1, "test_freq": -1, "val_before_train": False},
        "model": {"path": "model"},
        "reward_model": {"train_files": ["train.jsonl"], "val_files": ["val.jsonl"], "batch_size": 32}
        | {"micro_batch_size_per_gpu": 8, "max_length": 16, "total_epochs": 3, "test_freq": 16}
        | {"optim": {"lr": 3e-3, "lr_scheduler": "linear"}},
        "data": {"train_files": ["prompts.jsonl"], "train_batch_size": 12, "max_prompt_length": 4}
        | {"max_response_length": LENGTH},
        "rewards": [{"type": "model", "path": "reward"}],
        "rollout": {"n": 2},
        "actor": {"ppo_epochs": 2, "ppo_mini_batch_size": 12, "ppo_micro_batch_size_per_gpu": 12}
        | {"optim": {"lr": 1e-2}},
        "critic": {"optim": {"lr": 1e-3}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def config(yaml_file: Path, out: str, kind: str = "reward-model", **changes):
    folder = yaml_file.parent / out
    places = {"trainer__output_dir": str(folder)}
    if kind == "reward-model":
        places |= {"reward_model__export_path": str(folder / "model")}
    return config_of(yaml_file, dist.get_world_size(), kind=kind, **{**places, **changes})


def run_each(yaml_file: Path, cases: dict) -> None:
    for out, changes in cases.items():
        run_reward_model(config(yaml_file, out, **changes))


def ppo(yaml_file: Path, out: str, changes: dict) -> None:
    run_ppo(config(yaml_file, out, "train", **changes))


@pytest.fixture(scope="module")
def trained(case):
    """The exported folder; a copy is where `rewards.0.path` expects it."""
    on_ranks(1, run_each, case, {"alone": {}})
    shutil.copytree(case.parent / "alone/model", case.parent / "reward")
    return case.parent / "reward"


def hf_scores(folder: Path, rows: list[dict]) -> np.ndarray:
    """Scores `[rows, 2]` by transformers; its head has no bias, which is added here."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    bias = float(load_file(folder / "model.safetensors")["score.bias"])
    out = []
    for row in rows:
        texts = [row["prompt"] + row[side] for side in ("chosen", "rejected")]
        ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        with torch.no_grad():
            out.append([float(model(torch.tensor([i])).logits) + bias for i in ids])
    return np.array(out)


def test_it_learns_a_preference_and_transformers_gives_the_same_scores(case, trained):
    lines = read_metrics(case.parent / "alone")
    assert [line["step"] for line in lines if "val/loss" in line] == [16, 32, 48]
    last = lines[-1]
    assert last["val/accuracy"] > 0.9 and last["train/accuracy"] > 0.9 and last["val/calibration_error"] < 0.15
    scores = hf_scores(trained, make_pairs(128, 1))
    gap = scores[:, 0] - scores[:, 1]
    assert last["val/accuracy"] == pytest.approx((gap > 0).mean())
    assert last["val/margin"] == pytest.approx(gap.mean(), rel=1e-3)
    assert last["val/loss"] == pytest.approx(np.log1p(np.exp(-gap)).mean(), rel=1e-3)
    stored = json.loads((trained / "megappo_reward.json").read_text())
    assert stored["mean"] == pytest.approx(scores.mean(), rel=1e-3, abs=1e-3)
    assert stored["std"] == pytest.approx(scores.std(ddof=1), rel=1e-3)
    assert stored["clip"] == [-2.0, 2.0] and stored["accuracy"] == last["val/accuracy"] and stored["held_out"]


def same_but_for_time(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


FEW = {"reward_model__total_steps": 4, "reward_model__test_freq": 2, "reward_model__margin": "data"}
FEW |= {"reward_model__center_coef": 0.05, "reward_model__optim__lr": 1e-3}
LAYOUTS = {
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
}


def test_every_layout_learns_the_same(case):
    packed = {"reward_model__use_dynamic_bsz": True, "reward_model__max_token_len_per_gpu": 100}
    on_ranks(1, run_each, case, {"few": FEW})
    runs = {
        name: FEW | packed | {f"reward_model__parallel__{k}": v for k, v in o.items()} for name, o in LAYOUTS.items()
    }
    on_ranks(2, run_each, case, runs)
    for name in LAYOUTS:
        for line, expected in zip(read_metrics(case.parent / name), read_metrics(case.parent / "few"), strict=True):
            assert same_but_for_time(line) == pytest.approx(same_but_for_time(expected), rel=1e-3, abs=1e-4), name


def interrupt_after(yaml_file: Path, out: str, step: int, changes: dict) -> tuple[str, int] | None:
    """Ask the run to stop while it works on `step` (1-based)."""
    real = reward_model._RewardModel._train_step

    def train_step(self):
        if self.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    reward_model._RewardModel._train_step = train_step
    try:
        run_reward_model(config(yaml_file, out, **changes))
    except Interrupted as stopped:
        return str(stopped), stopped.code
    finally:
        reward_model._RewardModel._train_step = real
    return None


def test_a_resumed_run_is_bit_equal(case):
    changes = FEW | {"reward_model__save_freq": 10}
    on_ranks(1, run_each, case, {"straight": changes})
    message, code = on_ranks(1, interrupt_after, case, "resumed", 2, changes)
    assert code == 130 and "interrupted after step 2; the newest checkpoint is" in message
    on_ranks(1, run_each, case, {"resumed": changes})
    lines, again = read_metrics(case.parent / "straight"), read_metrics(case.parent / "resumed")
    assert [same_but_for_time(line) for line in again] == [same_but_for_time(line) for line in lines]
    weights = load_file(case.parent / "straight/model/model.safetensors")
    others = load_file(case.parent / "resumed/model/model.safetensors")
    assert all(torch.equal(weights[name], others[name]) for name in weights)


# --- in PPO --------------------------------------------------------------------------------------------


def test_ppo_raises_the_reward_of_the_model(case, trained):
    changes = {"trainer__total_iterations": 12, "rollout__n": 4, "critic__path": str(trained)}
    on_ranks(1, ppo, case, "ppo", changes)
    lines = read_metrics(case.parent / "ppo")
    rewards = [line["reward/model/mean"] for line in lines]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.3
    assert all(-2 <= reward <= 2 for reward in rewards)


def first_scores(yaml_file: Path, out: str, changes: dict) -> dict:
    """Scores by sample id of the first batch of a run, its responses, and the critic's first parameters."""
    from megappo.trainer import phases

    seen = {}
    real = phases.score

    def score(run, samples, rows):
        batch, metrics = real(run, samples, rows)
        seen["scores"] = dict(zip(batch.info.sample_id.tolist(), batch.info.score.tolist(), strict=True))
        seen["ids"] = {s.sample_id: [*s.prompt_ids, *s.response_ids] for s in samples}
        if run.critic is not None:
            seen["critic"] = {name: t.clone() for name, t in run.critic.stream_weights(torch.float32)}
        return batch, metrics

    phases.score = score
    try:
        run_ppo(config(yaml_file, out, "train", **{"trainer__total_iterations": 1, **changes}))
    finally:
        phases.score = real
    return seen


def test_the_score_is_the_scaled_output_at_the_last_token_and_the_critic_begins_as_the_model(case, trained):
    from transformers import AutoModelForSequenceClassification

    seen = on_ranks(1, first_scores, case, "scores", {"critic__path": str(trained)})
    model = AutoModelForSequenceClassification.from_pretrained(trained, dtype=torch.float32).eval()
    tensors = load_file(trained / "model.safetensors")
    stored = json.loads((trained / "megappo_reward.json").read_text())
    for sample_id, ids in seen["ids"].items():
        with torch.no_grad():
            # Not its logits: it would skip a sampled pad token at the end.
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        raw = float(hidden @ tensors["score.weight"][0] + tensors["score.bias"][0])
        expected = np.clip((raw - stored["mean"]) / stored["std"], *stored["clip"])
        assert seen["scores"][sample_id] == pytest.approx(expected, abs=2e-3)
    tensors["score.weight"] /= stored["std"]
    tensors["score.bias"] = (tensors["score.bias"] - stored["mean"]) / stored["std"]
    assert seen["critic"].keys() == tensors.keys() and tensors["score.weight"].abs().max() > 0
    for name, tensor in tensors.items():
        torch.testing.assert_close(seen["critic"][name], tensor, rtol=1e-6 if name.startswith("score.") else 0, atol=0)


REWARD_LAYOUTS = {
    "tp2": {"parallel": {"tensor_model_parallel_size": 2}},
    "second_rank": {"parallel": {"first_rank": 1, "num_ranks": 1, "offload": "all"}, "micro_batch_size_per_gpu": 5},
    "pp2": {"parallel": {"pipeline_model_parallel_size": 2}},
}


def scores_in_layouts(yaml_file: Path) -> dict:
    reward = {"type": "model", "path": str(yaml_file.parent / "reward")}
    grpo = {"algorithm__adv_estimator": "grpo"}
    return {
        name: first_scores(yaml_file, f"score_{name}", grpo | {"rewards": [reward | options]})["scores"]
        for name, options in REWARD_LAYOUTS.items()
    }


def test_scores_do_not_depend_on_the_models_layout(case, trained):
    alone = on_ranks(1, first_scores, case, "score_alone", {"algorithm__adv_estimator": "grpo"})["scores"]
    for name, scores in on_ranks(2, scores_in_layouts, case).items():
        assert scores == pytest.approx(alone, abs=1e-4), name


def test_validation_scores_with_the_model(case, trained):
    changes = {"data__val_files": [str(case.parent / "prompts.jsonl")], "trainer__val_before_train": True}
    changes |= {"trainer__total_iterations": 1, "algorithm__adv_estimator": "grpo"}
    on_ranks(1, ppo, case, "validated", changes)
    assert -2 <= read_metrics(case.parent / "validated")[0]["val/digits/reward/mean"] <= 2


def test_recorded_pairs_are_scored_by_the_model(case, trained):
    """Offline PPO on the pairs themselves: the chosen responses get the higher rewards."""
    changes = {"rollout__engine": "recorded", "data__train_files": [str(case.parent / "train.jsonl")]}
    seen = on_ranks(1, first_scores, case, "recorded", changes)
    scores = [score for _, score in sorted(seen["scores"].items())]
    assert len(scores) == 24
    assert np.mean(np.array(scores[::2]) > np.array(scores[1::2])) > 0.9


# --- what is refused -----------------------------------------------------------------------------------


def told(kind: str, yaml_file: Path, out: str, changes: dict) -> str:
    """What a run says before it ends, its error last."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            if kind == "train":
                ppo(yaml_file, out, changes)
            else:
                run_reward_model(config(yaml_file, out, **changes))
        except UserError as err:
            return f"{text.getvalue()}error: {err}"
    return text.getvalue()


def broken(trained: Path, name: str) -> Path:
    folder = trained.parent / name
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    return folder


def refused_reward(case, folder: Path, **more) -> str:
    text = on_ranks(1, told, "train", case, "refused", {"rewards": [{"type": "model", "path": str(folder)} | more]})
    assert text.startswith("error: ") and not (case.parent / "refused/final_hf").exists()
    return text


def test_a_model_without_its_head_is_refused(case, trained):
    folder = broken(trained, "headless")
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "tensor score.weight is missing" in refused_reward(case, folder)
    text = on_ranks(1, told, "train", case, "refused", {"critic__path": str(folder)})
    assert "tensor score.weight is missing" in text


def test_a_language_model_is_no_reward_and_a_reward_model_no_policy(case, trained):
    text = refused_reward(case, case.parent / "model")
    assert "rewards.0.path" in text and "without a scalar head" in text
    text = on_ranks(1, told, "train", case, "refused", {"model__path": str(trained)})
    assert "model.path" in text and "cannot generate" in text


def test_another_tokenizer_is_refused(case, trained):
    folder = broken(trained, "other_tokenizer")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = refused_reward(case, folder)
    assert "its tokenizer is not the policy's" in text and "type: remote" in text


def test_a_cut_file_damaged_numbers_and_unknown_keys_are_one_line(case, trained):
    folder = broken(trained, "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "damaged or cut short" in refused_reward(case, folder)
    folder = broken(trained, "numbers")
    (folder / "megappo_reward.json").write_text('{"mean": 0, "std": 0, "clip": null}')
    text = refused_reward(case, folder)
    assert "megappo_reward.json is damaged" in text and text.count("\n") == 0
    assert "did you mean" in refused_reward(case, trained, micro_batch_size_per_gpus=1)
    text = on_ranks(1, told, "reward-model", case, "refused", {"reward_model__center_coeff": 1.0})
    assert "did you mean reward_model.center_coef?" in text


def test_noise_above_the_limit_is_refused_and_below_it_reported(case):
    clean = make_pairs(64, 3)
    flipped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in clean[:6]]
    write_jsonl(case.parent / "noisy.jsonl", clean + flipped)
    noisy = {"reward_model__train_files": [str(case.parent / "noisy.jsonl")], "reward_model__total_steps": 1}
    text = on_ranks(1, told, "reward-model", case, "noisy", noisy)
    assert text.startswith("error: reward_model.train_files: 70 pairs: 17.1% inconsistent")
    assert "reward_model.max_noise=0.12" in text and not (case.parent / "noisy").exists()
    text = on_ranks(1, told, "reward-model", case, "noisy", noisy | {"reward_model__max_noise": 0.2})
    assert "reward_model.train_files: 70 pairs: 17.1% inconsistent" in text and "reward model: " in text


def test_a_missing_margin_and_too_few_pairs_are_refused(case):
    rows = make_pairs(40, 4)
    del rows[7]["margin"]
    write_jsonl(case.parent / "bare.jsonl", rows)
    bare = {"reward_model__train_files": [str(case.parent / "bare.jsonl")]}
    text = on_ranks(1, told, "reward-model", case, "bare", bare | {"reward_model__margin": "data"})
    assert "bare.jsonl, row 8: no margin" in text
    text = on_ranks(1, told, "reward-model", case, "bare", bare | {"reward_model__batch_size": 41})
    assert "reward_model.batch_size is 41 but reward_model.train_files hold 40 pairs" in text
