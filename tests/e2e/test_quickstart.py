"""The quickstart's script, from nothing to the table, with a few steps instead of many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.errors import UserError
from megappo_cli import demo_table

ROOT = Path(__file__).parents[2]


def quickstart(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "MEGAPPO_DEMO_DIR": str(folder)} | settings
    command = ["bash", str(ROOT / "launch" / "quickstart.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "ppo").mkdir()
    (folder / "ppo" / "of an earlier demo").touch()
    done = quickstart(
        folder,
        MEGAPPO_DEMO_SFT="sft.total_steps=3",
        MEGAPPO_DEMO_PPO="trainer.total_iterations=2 data.train_batch_size=64 actor.ppo_mini_batch_size=32 "
        "data.val_max_samples=32",
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_every_step_leaves_its_files(finished):
    folder, _ = finished
    for name in (
        "data/train.parquet",
        "data/test.parquet",
        "model/tokenizer.json",
        "sft/metrics.jsonl",
        "sft_model/model.safetensors",
        "ppo/samples.jsonl",
        "ppo/checkpoints/iter_000002/manifest.json",
        "ppo/final_hf/model.safetensors",
        "ppo/final_hf/tokenizer.json",
    ):
        assert (folder / name).is_file(), name
    assert list((folder / "ppo" / "tensorboard").glob("**/events.*"))
    assert not (folder / "ppo" / "of an earlier demo").exists()


def test_it_trains_with_ppo_and_tensor_parallelism(finished):
    folder, _ = finished
    state = json.loads((folder / "ppo/checkpoints/iter_000002/state.json").read_text())
    config = state["config"]
    assert config["actor"]["parallel"]["tensor_model_parallel_size"] == 2
    assert config["critic"]["parallel"]["tensor_model_parallel_size"] == 2
    assert config["algorithm"]["adv_estimator"] == "gae" and config["actor"]["policy_loss"] == "ppo"


def test_it_ends_with_the_table_and_the_places(finished):
    folder, done = finished
    last = done.stdout[done.stdout.index("== 5/5") :]
    for text in (
        "before PPO",
        "after 2 iterations",
        "held-out accuracy, greedy",
        "held-out accuracy, sampled",
        "response length",
        "KL to the warm start",
        "entropy",
        f"tensorboard --logdir {folder}",
        f"{folder}/ppo/metrics.jsonl",
        f"{folder}/ppo/checkpoints",
        f"{folder}/ppo/final_hf",
    ):
        assert text in last, text


def test_the_demo_stops_at_the_step_that_fails_and_names_it(tmp_path):
    done = quickstart(tmp_path, MEGAPPO_DEMO_SFT="sft.total_stepz=3")
    assert done.returncode == 2
    assert "sft.total_stepz" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the quickstart stopped in the step: 3/5 warm start")
    assert "4/5" not in done.stdout


def test_the_table_compares_the_first_with_the_last_evaluation():
    def evaluation(greedy: float, sampled: float) -> dict[str, float]:
        return {"val/a/acc": greedy, "val/b/acc": greedy + 0.2, "val/a/acc_sampled": sampled}

    records = [
        {"step": 0} | evaluation(0.3, 0.25),
        {"step": 1, "actor/entropy": 0.5, "critic/score/mean": 0.125, "response_length/mean": 3.5},
        {"step": 2, "actor/entropy": 0.4} | evaluation(0.5, 0.45),
        {"step": 3, "actor/entropy": 0.25, "critic/score/mean": 0.75, "response_length/mean": 3.25}
        | evaluation(0.7, 0.65),
    ]
    lines = [line.split() for line in demo_table.table(records).splitlines()]
    assert lines[0][-3:] == ["after", "3", "iterations"]
    numbers = {line[0] + line[-3]: line[-2:] for line in lines[1:]}
    assert ["0.400", "0.800"] in numbers.values() and ["0.250", "0.650"] in numbers.values()
    assert ["0.125", "0.750"] in numbers.values() and ["0.500", "0.250"] in numbers.values()
    assert not any("KL" in line for line in lines)  # a run without a reference


@pytest.mark.parametrize("records", [[], [{"step": 0, "val/a/acc": 0.5}], [{"step": 1, "actor/entropy": 0.5}]])
def test_a_run_without_two_evaluations_has_no_table(records):
    with pytest.raises(UserError, match="nothing to compare"):
        demo_table.table(records)


def test_a_missing_or_damaged_metrics_file_is_one_line(tmp_path, capsys):
    (tmp_path / "damaged.jsonl").write_text('{"step": 1}\n{"st')
    for name in ("missing.jsonl", "damaged.jsonl"):
        with pytest.raises(SystemExit) as ended:
            demo_table.main([str(tmp_path / name)])
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / name}: no metrics of a run")
