"""What a user can get wrong: one clear line each, exit code 2, nothing half-written."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
from ppo_case import config_of, write_case
from safetensors.torch import load_file, save_file
from warm_ranks import on_ranks

from megappo.trainer.ppo import run_ppo


def command(arguments: list[str], missing: str = "") -> tuple[int, str, str]:
    """(exit code, standard error, standard output) of `megappo ARGUMENTS`, here, as if `missing` were not installed."""
    from megappo.observe.failures import run_app
    from megappo_cli.main import app

    out, err = io.StringIO(), io.StringIO()
    hidden = mock.patch.dict(sys.modules, {missing: None} if missing else {})
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out), hidden:
        code = run_app(app, arguments)
    return code, err.getvalue(), out.getvalue()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case(tmp_path_factory.mktemp("bad"), layers=2)


def refused(yaml_file: Path, *overrides: str, missing: str = "") -> str:
    """The one line that a run with these overrides ends with; its output folder must not exist afterwards."""
    out = yaml_file.parent / "refused"
    code, err, printed = on_ranks(
        1, command, ["train", str(yaml_file), f"trainer.output_dir={out}", *overrides], missing
    )
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert printed == "" and not out.exists()
    return err.removeprefix("error: ").rstrip("\n")


def copy_of_the_model(yaml_file: Path, name: str) -> Path:
    return Path(shutil.copytree(yaml_file.parent / "model", yaml_file.parent / name))


# --- model, data, configuration --------------------------------------------------------------------------


def test_a_missing_model_folder(case):
    line = refused(case, f"model.path={case.parent / 'nowhere'}")
    assert "model.path" in line and "nowhere" in line


def test_a_safetensors_file_cut_short(case):
    model = copy_of_the_model(case, "cut")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    line = refused(case, f"model.path={model}")
    assert str(file) in line and "cut short" in line


def test_a_missing_tensor(case):
    model = copy_of_the_model(case, "incomplete")
    tensors = load_file(model / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    line = refused(case, f"model.path={model}")
    assert "model.layers.1.mlp.up_proj.weight" in line and "missing" in line


def test_a_size_that_is_no_number(case):
    model = copy_of_the_model(case, "wordy")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"hidden_size": "big"}))
    line = refused(case, f"model.path={model}")
    assert f"{model}/config.json: hidden_size is 'big'" in line


def test_weights_that_are_not_numbers(case):
    model = copy_of_the_model(case, "nan")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = case.parent / "nan_out"
    code, err, _ = on_ranks(1, command, ["train", str(case), f"model.path={model}", f"trainer.output_dir={out}"])
    assert code == 2 and err.count("\n") == 1 and "NaN" in err and "model.path" in err


def test_a_tokenizer_that_is_not_there(case):
    model = copy_of_the_model(case, "mute")
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refused(case, f"model.path={model}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ('{"prompt": "7 + 2"}\n{"prompt": ', "line 2: broken JSON"),
        ('{"question": "7 + 2"}\n', "no column 'prompt'"),
        ('{"prompt": "7 + 2"}\n', "cannot fill one batch of 6"),
        ('{"prompt": [{"role": "user", "content": "7"}]}\n' * 6, "no chat template"),
    ],
)
def test_a_data_file_that_cannot_be_used(case, text, message):
    file = case.parent / "bad.jsonl"
    file.write_text(text)
    assert message in refused(case, f"data.train_files=[{file}]")


def test_a_prompt_that_is_too_long(case):
    line = refused(case, "data.filter_overlong_prompts=false", "data.max_prompt_length=3")
    assert "train.jsonl" in line and "data.max_prompt_length is 3" in line
    assert "no prompt is left" in refused(case, "data.max_prompt_length=1", f"data.train_files=[{long_file(case)}]")


def long_file(yaml_file: Path) -> Path:
    file = yaml_file.parent / "long.jsonl"
    file.write_text('{"prompt": "7 + 2 = 9"}\n' * 6)
    return file


def test_a_misspelled_key(case):
    bad = case.parent / "misspelled.yaml"
    bad.write_text(case.read_text().replace("ppo_epochs", "ppo_epoch"))
    line = refused(bad)
    assert "actor.ppo_epoch" in line and "ppo_epochs" in line and "misspelled.yaml" in line


def test_output_folders_that_cannot_be_written(case):
    blocked = case.parent / "blocked"
    blocked.write_text("a file")
    for key in ("trainer.output_dir", "rollout.record_dir"):
        for folder in (blocked, blocked / "below"):
            line = refused(case, f"{key}={folder}")
            assert key in line and "is a file" in line


def test_a_logger_that_is_not_installed_shows_before_the_models_are_loaded(case):
    model = copy_of_the_model(case, "never_read")
    (model / "model.safetensors").write_bytes(b"")
    line = refused(case, "trainer.logger=[mlflow]", f"model.path={model}", missing="mlflow")
    assert "mlflow" in line and "pip install" in line


# --- rewards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('missing')", r"reward 'score': sample \d+ \(data_source 'task\d', response .*KeyError"),
        ("return float('nan')", r"reward 'score': sample \d+ .*returned nan, not a finite number"),
        ("return 'good'", r"reward 'score': sample \d+ .*returned str, not a number"),
        ("import time; time.sleep(60)", r"reward 'score': sample \d+ .*not scored after 0\.5 s"),
        ("import os; os._exit(3)", r"reward 'score': sample \d+ .*died with exit code 3"),
    ],
)
def test_a_reward_that_fails_names_the_sample(case, body, message):
    file = case.parent / "failing.py"
    file.write_text(f"def score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    reward = json.dumps([{"type": "function", "path": f"{file}:score", "timeout_s": 0.5}])
    assert re.search(message, refused(case, f"rewards={reward}"))


def test_a_reward_that_cannot_be_loaded(case):
    file = case.parent / "broken.py"
    file.write_text("def score(:\n")
    assert "SyntaxError" in refused(case, f"rewards.0.path={file}:score")
    file.write_text("points = 3\n")
    assert "score" in refused(case, f"rewards.0.path={file}:score")


# --- recorded rollouts -----------------------------------------------------------------------------------


def record(yaml_file: Path) -> None:
    folder = str(yaml_file.parent / "recorded")
    run_ppo(config_of(yaml_file, trainer__total_iterations=1, rollout__record_dir=folder))


@pytest.fixture(scope="module")
def recorded(case):
    on_ranks(1, record, case)
    return case.parent / "recorded"


def replayed(folder: Path) -> list[str]:
    return ["rollout.engine=recorded", f"rollout.replay_dir={folder}"]


def test_a_replay_folder_without_files(case, tmp_path):
    line = refused(case, *replayed(tmp_path))
    assert f"{tmp_path / 'rollouts_000000.jsonl'} does not exist" in line and "replay_dir" in line


def test_a_replay_that_is_shorter_than_the_run(case, recorded):
    """Iteration 1 can be replayed, iteration 2 cannot: what was done is kept, the error is told."""
    out = case.parent / "short"
    code, err, _ = on_ranks(1, command, ["train", str(case), f"trainer.output_dir={out}", *replayed(recorded)])
    assert code == 2 and "rollouts_000001.jsonl does not exist" in err and err.count("\n") == 1
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_replay_of_other_prompts(case, recorded):
    assert "another prompt than the data set" in refused(case, "trainer.seed=2", *replayed(recorded))
    assert "has no sample" in refused(case, "data.train_batch_size=12", *replayed(recorded))
    assert "greedy_000000.jsonl" in refused(case, "algorithm.adv_estimator=remax", *replayed(recorded))
    assert "more than data.max_response_length=2" in refused(case, "data.max_response_length=2", *replayed(recorded))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("logprobs"), "not a recorded rollout"),
        (lambda s: s["logprobs"].pop(), "logprobs for"),
        (lambda s: s.update(finish_reason="eos"), "finish_reason 'eos'"),
        (lambda s: s["response_ids"].__setitem__(0, "7"), "token ids"),
        (lambda s: s["response_ids"].__setitem__(0, 10**6), "outside the model's vocabulary"),
        (lambda s: s["logprobs"].__setitem__(0, None), "logprobs must be numbers"),
    ],
)
def test_a_damaged_recording(case, recorded, tmp_path, change, message):
    samples = [json.loads(line) for line in (recorded / "rollouts_000000.jsonl").read_text().splitlines()]
    change(samples[4])
    (tmp_path / "rollouts_000000.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    line = refused(case, *replayed(tmp_path))
    assert message in line and "rollouts_000000.jsonl" in line and ("line 5" in line or "sample 4" in line)


# --- checkpoints -----------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_told_and_the_previous_one_continues(case):
    out = case.parent / "saved"
    base = ["train", str(case), f"trainer.output_dir={out}", "trainer.save_freq=1"]
    assert on_ranks(1, command, [*base, "trainer.total_iterations=2"])[0] == 0
    newest = out / "checkpoints/iter_000002"
    shard = next(newest.glob("actor/*.distcp"))
    for harm in (lambda: shard.write_bytes(shard.read_bytes()[:-5]), shard.unlink):
        harm()
        code, err, _ = on_ranks(1, command, [*base, "trainer.total_iterations=3"])
        assert code == 2 and err.count("\n") == 1
        assert f"checkpoint {newest} is damaged: actor/{shard.name}" in err and "iteration 1" in err
    shutil.rmtree(newest)
    older = out / "checkpoints/iter_000001"
    for name in (f"actor/{shard.name}", "critic/common.pt"):  # of the right size, but of other contents
        whole = (older / name).read_bytes()
        (older / name).write_bytes(b"x" * len(whole))
        code, err, _ = on_ranks(1, command, [*base, "trainer.total_iterations=3"])
        assert code == 2 and err.count("\n") == 1, err
        assert f"{(older / name).parent} cannot be read" in err and f"delete {older}" in err
        (older / name).write_bytes(whole)
    code, err, _ = on_ranks(1, command, [*base, "trainer.total_iterations=3"])
    assert code == 0 and "resumed after iteration 1" in err
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
