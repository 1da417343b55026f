"""TensorBoard event files in `output_dir/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.observe.sinks.base import Row, optional_import


class TensorboardSink:
    """Scalars, the configuration, sample texts; written out after every call, so a killed run keeps them."""

    def __init__(self, output_dir: Path, config: Mapping[str, Any]) -> None:
        self._module = optional_import("torch.utils.tensorboard", "tensorboard")
        self._folder = str(Path(output_dir) / "tensorboard")
        self._config = config
        self._purge_step: int | None = None
        self._opened: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one scalar a metric."""
        writer = self._writer()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def text(self, tag: str, rows: Sequence[Row], step: int) -> None:
        """Add the samples as a table."""
        writer = self._writer()
        writer.add_text(tag, markdown_table(rows), step)
        writer.flush()

    def truncate_from(self, step: int) -> None:
        """TensorBoard hides what the earlier files recorded from this step on."""
        self._purge_step = step

    def close(self) -> None:
        """Close the event file."""
        if self._opened is not None:
            self._opened.close()

    def _writer(self) -> Any:
        # Made at the first record, when it is known whether the run resumes.
        if self._opened is None:
            self._opened = self._module.SummaryWriter(self._folder, purge_step=self._purge_step)
            if self._config:
                import yaml

                shown = yaml.safe_dump(dict(self._config), sort_keys=False)
                indented = "".join(f"    {line}\n" for line in shown.splitlines())  # a code block
                self._opened.add_text("config", indented, self._purge_step or 0)
        return self._opened


def markdown_table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table; cell text keeps its line breaks and cannot break the table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(c, "")) for c in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return text.replace("\r", "").replace("\n", "<br>")
