"""The terminal: a progress bar with the time left and a line an iteration; without a terminal only lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megappo.observe.sinks.base import EVENTS_TAG, Row

#: (label, metric names of which the first present is shown, format)
_FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", ("train/loss",), ".4f"),
    ("score", ("critic/score/mean",), ".3f"),
    ("kl", ("actor/ppo_kl",), ".4f"),
    ("ref_kl", ("actor/kl_loss", "actor/reward_kl_penalty"), ".4f"),
    ("ent", ("actor/entropy", "actor/entropy_loss"), ".3f"),
    ("clip", ("actor/pg_clipfrac",), ".3f"),
    ("len", ("response_length/mean",), ".0f"),
    ("pg", ("actor/pg_loss",), ".4f"),
    ("vf", ("critic/vf_loss",), ".4f"),
    ("gnorm", ("actor/grad_norm", "train/grad_norm"), ".3g"),
    ("vnorm", ("critic/grad_norm",), ".3g"),
    ("tok/s", ("perf/throughput",), ",.0f"),
    ("s", ("timing_s/step", "perf/time_per_step"), ".1f"),
)
_SAMPLE_CHARS = 300


class ConsoleSink:
    """Prints to stdout.

    Args:
        total_steps: iterations of the whole run, for the bar and the time left; None if unknown.
        title: shown before the bar.
        console: where to print, for tests.
        clock: seconds, monotonic, for tests.
    """

    def __init__(
        self,
        total_steps: int | None,
        title: str = "train",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time from which the pace is measured
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(title, total=total_steps)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the iteration's line and move the bar."""
        left = self._time_left(step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            self._bar.start()  # shows at the first iteration: an error before it finds a plain terminal
            left = None  # the bar shows it
        of_total = f"/{self._total}" if self._total else ""
        parts = [f"[{step}{of_total}]", *summary(metrics)]
        if left is not None:
            parts.append(f"eta {_duration(left)}")
        self._print("  ".join(parts))

    def text(self, tag: str, rows: Sequence[Row], step: int) -> None:
        """Print the samples, shortened."""
        for row in rows if tag != EVENTS_TAG else ():
            cells = (f"{key}: {_shorten(value)}" for key, value in row.items())
            self._print(f"  {tag} @{step} | " + " | ".join(cells))

    def truncate_from(self, step: int) -> None:
        """Start the bar there."""
        if self._bar is not None:
            self._bar.update(self._task, completed=max(0, step - 1))

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _time_left(self, step: int) -> float | None:
        """Seconds left at the pace since the first line, or None before there is a pace."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, since = self._first
        if not self._total or step <= first_step:
            return None
        return (now - since) / (step - first_step) * max(0, self._total - step)


def summary(metrics: Mapping[str, float]) -> list[str]:
    """The few numbers to watch, as "label value"; of validation metrics all, under their own names."""
    out = []
    for label, names, form in _FIELDS:
        name = next((n for n in names if n in metrics), None)
        if name is not None:
            out.append(f"{label} {_format(metrics[name], form)}")
    out += [f"{name} {_format(value, '.4g')}" for name, value in metrics.items() if name.startswith("val")]
    return out


def _format(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else str(float(value))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _shorten(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _SAMPLE_CHARS else text[: _SAMPLE_CHARS - 1] + "…"
