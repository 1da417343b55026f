"""A tiny PPO experiment: data, a model with its own tokenizer, a reward file and the YAML that uses them."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Any

import yaml

from megappo.config.load import load_config
from megappo.config.schema import ExperimentConfig
from megappo.data.prepare.tiny_model import write_tiny_model

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    '''Smooth, so that returns differ: closeness of the digit sum to the truth, minus a little for length.'''
    total = sum(int(c) for c in solution_str if c.isdigit())
    return 1 / (1 + abs(total - int(ground_truth))) - 0.01 * len(solution_str)
"""
ACTOR_OPTIM = {"lr": 1e-3}


def write_case(folder: Path, *, layers: int = 4, prompts: int = 12) -> Path:
    """Everything that a run needs, in `folder`; returns the YAML file. Prompts have 1 to 6 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(["7", "+", "2", "=", "9"][: 1 + i % 5]) + (" 4" if i % 3 == 0 else "") for i in range(prompts)]
    for name, rows in (("train", texts), ("val", texts[:3])):
        lines = [
            {"prompt": text, "data_source": f"task{i % 2}", "reward_model": {"ground_truth": str(3 + i % 7)}}
            for i, text in enumerate(rows)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)
    write_tiny_model(folder / "model", texts, hidden=48, layers=layers, heads=4)
    settings = {
        "trainer": {
            "output_dir": "out",
            "total_iterations": 3,
            "test_freq": -1,
            "save_freq": -1,
            "val_before_train": False,
            "logger": ["jsonl"],
        },
        "model": {"path": "model"},
        "data": {"train_files": ["train.jsonl"], "train_batch_size": 6, "max_prompt_length": 8}
        | {"max_response_length": 6},
        "rewards": [{"type": "function", "path": "reward.py:score"}],
        "rollout": {"n": 2},
        "actor": {"ppo_epochs": 2, "ppo_mini_batch_size": 3, "ppo_micro_batch_size_per_gpu": 2}
        | {"optim": {"lr": 1e-3}, "entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.05},
        "critic": {"optim": {"lr": 1e-3}},
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 100}},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return file


def config_of(file: Path, world: int = 1, kind: str = "train", **changes: Any) -> ExperimentConfig:
    """The experiment with changes such as `trainer__save_freq=2` (two underscores for a dot)."""
    overrides = [f"{key.replace('__', '.')}={json.dumps(value, default=str)}" for key, value in changes.items()]
    return load_config(file, overrides, world_size=world, kind=kind)


def read_metrics(output_dir: str | Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl; numbers that JSON cannot hold as floats."""
    lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    return [{key: float(value) for key, value in json.loads(line).items()} for line in lines]


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment for a command: without what a launcher, or a rank that runs tests, has set."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    keep = {k: v for k, v in os.environ.items() if k not in dropped and not k.endswith("_ERROR_FILE")}
    return keep | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"} | changes


def gone(pid: int, timeout: float = 30) -> None:
    """Wait for the end of a process, a stranger's too."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], timeout)[0], f"process {pid} still runs"
    finally:
        os.close(handle)
