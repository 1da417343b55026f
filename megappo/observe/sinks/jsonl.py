"""One JSON object a line: `metrics.jsonl` (metrics, step) and `samples.jsonl` (samples, tag, step)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

from megappo.observe.sinks.base import EVENTS_TAG, Row


class JsonlSink:
    """Appends a line an iteration and flushes it, so that a killed run loses nothing it had logged.

    Values that JSON has no number for are strings that `float()` reads: "nan", "inf", "-inf".
    """

    FILES: ClassVar[tuple[str, ...]] = ("metrics.jsonl", "samples.jsonl")

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._open: dict[str, TextIO] = {}
        self._resumed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one line to metrics.jsonl."""
        self._write("metrics.jsonl", {**metrics, "step": step})

    def text(self, tag: str, rows: Sequence[Row], step: int) -> None:
        """Write one line a sample to samples.jsonl."""
        for row in rows if tag != EVENTS_TAG else ():
            self._write("samples.jsonl", {**row, "tag": tag, "step": step})

    def truncate_from(self, step: int) -> None:
        """Drop lines with `step` or later and lines that are damaged; then append to the same files."""
        self._resumed = True
        for name in self.FILES:
            path = self._folder / name
            if path.exists():
                # not splitlines: a logged text may hold U+2028, which JSON leaves as it is
                lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
                kept = [line for line in lines if _step(line) < step]
                part = path.with_suffix(".part")
                part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
                os.replace(part, path)

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open = {}

    def _write(self, name: str, record: dict[str, Any]) -> None:
        self._begin(name)
        plain = {key: _plain(value) for key, value in record.items()}
        file = self._open[name]
        file.write(json.dumps(plain, sort_keys=True, ensure_ascii=False) + "\n")
        file.flush()

    def _begin(self, name: str) -> None:
        if name not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / name
            if not self._resumed:
                _set_aside(path)
            self._open[name] = path.open("a", encoding="utf-8")


class EventLog(JsonlSink):
    """The guard's events as lines of `events.jsonl`, whatever `trainer.logger` says."""

    FILES = ("events.jsonl",)

    def begin(self) -> None:
        """Training has begun: unless the run was resumed, events of an earlier one are kept under another name."""
        if (self._folder / self.FILES[0]).exists():
            self._begin(self.FILES[0])

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append events."""
        for record in records:
            self._write(self.FILES[0], dict(record))


def _step(line: str) -> float:
    """The step of a line; infinite for one that was cut off while it was written, or is no record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return math.inf


def _set_aside(path: Path) -> None:
    """Rename an earlier run's file to the first free name.N.jsonl."""
    if path.exists() and path.stat().st_size:
        number = 1
        while path.with_suffix(f".{number}.jsonl").exists():
            number += 1
        path.rename(path.with_suffix(f".{number}.jsonl"))


def _plain(value: Any) -> Any:
    """A JSON value: numbers as numbers (0-d tensors and numpy scalars too), everything else as it prints."""
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int)) else str(value)
