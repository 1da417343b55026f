"""Weights & Biases (`pip install 'megappo[wandb]'`). Offline with WANDB_MODE=offline, as everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.observe.sinks.base import Row, optional_import


class WandbSink:
    """Logs against our own `step`: the service's counter only grows, but a resumed run goes back a little."""

    best_effort = True

    def __init__(self, output_dir: Path, project: str, experiment: str, config: Mapping[str, Any]) -> None:
        self._wandb = optional_import("wandb", "wandb")
        self._folder = Path(output_dir)
        self._id_file = self._folder / "wandb_run_id"
        self._settings = {
            "project": project,
            "name": experiment,
            "config": dict(config),
            "dir": str(self._folder),
        }
        self._resume = False
        self._started: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one point a metric."""
        self._run().log({**metrics, "step": step})

    def text(self, tag: str, rows: Sequence[Row], step: int) -> None:
        """Log the samples as a table."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = self._wandb.Table(columns=columns, data=[[row.get(c) for c in columns] for row in rows])
        self._run().log({tag: table, "step": step})

    def truncate_from(self, step: int) -> None:
        """Continue the earlier run of this folder; iterations made again appear as second points."""
        self._resume = True

    def close(self) -> None:
        """Finish the run (waits for uploads)."""
        if self._started is not None:
            self._started.finish()

    def _run(self) -> Any:
        if self._started is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._resume and self._id_file.exists():
                self._settings |= {"id": self._id_file.read_text().strip(), "resume": "allow"}
            self._started = self._wandb.init(**self._settings)
            self._started.define_metric("*", step_metric="step")
            self._id_file.write_text(f"{self._started.id}\n")
        return self._started
