"""MLflow (`pip install 'megappo[mlflow]'`); the server is MLFLOW_TRACKING_URI's, as everywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.observe.sinks.base import Row, optional_import
from megappo.observe.sinks.tensorboard import markdown_table


class MlflowSink:
    """One MLflow run in the experiment `project`; metric names lose characters that MLflow refuses."""

    best_effort = True

    def __init__(self, output_dir: Path, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        self._mlflow = optional_import("mlflow", "mlflow")
        self._folder = Path(output_dir)
        self._id_file = self._folder / "mlflow_run_id"
        self._project, self._experiment, self._config = project, experiment, dict(config)
        self._resume = False
        self._started = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one point a metric."""
        self._start()
        self._mlflow.log_metrics({_name(key): float(value) for key, value in metrics.items()}, step=step)

    def text(self, tag: str, rows: Sequence[Row], step: int) -> None:
        """Store the samples as a Markdown artifact."""
        self._start()
        self._mlflow.log_text(markdown_table(rows), f"samples/{_name(tag)}/{step:06d}.md")

    def truncate_from(self, step: int) -> None:
        """Continue the earlier run of this folder; iterations made again appear as second points."""
        self._resume = True

    def close(self) -> None:
        """End the run."""
        if self._started:
            self._mlflow.end_run()

    def _start(self) -> None:
        if self._started:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._mlflow.set_experiment(self._project)
        if self._resume and self._id_file.exists():
            run = self._mlflow.start_run(run_id=self._id_file.read_text().strip())
        else:
            run = self._mlflow.start_run(run_name=self._experiment)
            self._mlflow.log_dict(self._config, "config.yaml")
        self._id_file.write_text(f"{run.info.run_id}\n")
        self._started = True


def _name(key: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", key)
