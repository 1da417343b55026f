"""Sinks for metrics. `build_sinks` makes those that `trainer.logger` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.errors import UserError
from megappo.observe.sinks.base import Sink, Sinks

NAMES = ("console", "tensorboard", "jsonl", "wandb", "mlflow")

__all__ = ["NAMES", "Sink", "Sinks", "build_sinks"]


def build_sinks(
    names: Sequence[str],
    output_dir: str | Path,
    project_name: str,
    experiment_name: str,
    config_dict: Mapping[str, Any],
    total_steps: int | None,
) -> Sinks:
    """The named sinks as one. Call it on rank 0 only; the other ranks may use `Sinks([])`.

    When the run resumes at `step`, call `truncate_from(step)` before logging anything; without it an earlier
    run's files in `output_dir` are kept under another name.

    Raises:
        UserError: an unknown name, or a package that is not installed (the message names the extra).
    """
    return Sinks(
        [
            _build(name, Path(output_dir), project_name, experiment_name, config_dict, total_steps)
            for name in dict.fromkeys(names)
        ]
    )


def _build(
    name: str,
    output_dir: Path,
    project_name: str,
    experiment_name: str,
    config_dict: Mapping[str, Any],
    total_steps: int | None,
) -> Sink:
    if name == "console":
        from megappo.observe.sinks.console import ConsoleSink

        return ConsoleSink(total_steps, title=experiment_name)
    if name == "jsonl":
        from megappo.observe.sinks.jsonl import JsonlSink

        return JsonlSink(output_dir)
    if name == "tensorboard":
        from megappo.observe.sinks.tensorboard import TensorboardSink

        return TensorboardSink(output_dir, config_dict)
    if name == "wandb":
        from megappo.observe.sinks.wandb import WandbSink

        return WandbSink(output_dir, project_name, experiment_name, config_dict)
    if name == "mlflow":
        from megappo.observe.sinks.mlflow import MlflowSink

        return MlflowSink(output_dir, project_name, experiment_name, config_dict)
    raise UserError(f"trainer.logger: {name!r} is not a logger; choose from {', '.join(NAMES)}")
