"""Evaluation by a command of the user's (a benchmark harness, MT-Bench, …) on an exported copy of the policy."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megappo.parallel.reduce import from_first_rank
from megappo.trainer.setup import PPORun, export_model
from megappo.trainer.watch import Watch

_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def external_evaluation(run: PPORun, watch: Watch) -> dict[str, float]:
    """`val/external/<name>`: the numbers that `trainer.eval_command` printed; `val/external/failed`. Collective.

    A command that fails costs its numbers and a warning, never the run.
    """
    trainer = run.config.trainer
    folder = Path(trainer.output_dir) / "eval_hf"
    export_model(run.actor, folder, run.config.model.dtype)
    numbers: dict[str, float] = {}
    trouble = None
    if dist.get_rank() == 0:
        words = {"model": str(folder), "iteration": str(run.iteration), "output_dir": trainer.output_dir}
        numbers, trouble = run_command(trainer.eval_command, words, trainer.eval_command_timeout_s)
        if trouble:
            watch.say(f"warning: trainer.eval_command at iteration {run.iteration}: {trouble}")
    numbers, trouble = from_first_rank((numbers, trouble))
    run.actor.sleep()
    found = {f"val/external/{name}": value for name, value in numbers.items()}
    return found | {"val/external/failed": float(trouble is not None)}


def run_command(command: str, words: Mapping[str, str], timeout_s: float) -> tuple[dict[str, float], str | None]:
    """Run a command with `{word}` replaced; (numbers of the JSON object in its last line, what went wrong)."""
    parts = shlex.split(command)
    for word, text in words.items():
        parts = [part.replace("{" + word + "}", text) for part in parts]
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    try:
        done = subprocess.run(
            parts, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"not done after {timeout_s:g} s (trainer.eval_command_timeout_s)"
    except OSError as err:
        return {}, f"cannot be started: {err.strerror}"
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return {}, " ".join([f"exit code {done.returncode}", *last])
    lines = done.stdout.strip().splitlines()
    try:
        record = json.loads(lines[-1])
        return {str(k): float(v) for k, v in record.items() if isinstance(v, int | float)}, None
    except (IndexError, ValueError, AttributeError):
        return {}, "its last line is no JSON object of numbers"
