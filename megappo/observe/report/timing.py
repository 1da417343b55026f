"""Where the seconds of an iteration go: stacked bars for one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megappo.observe.report.draw import SIZE, iteration_axis, mark_events, plain
from megappo.observe.report.runs import Run

_BARS = 60
_SMALLEST = 0.004  # share of the total; smaller phases are drawn as "other"
_OUTSIDE = ("testing", "save_checkpoint")  # not part of timing_s/step
_ORDER = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "sync_weights")
_COLOURS = {
    "gen": "#0b66b0", "reward": "#7db8e0", "old_log_prob": "#12855f", "ref": "#7cc7a6", "values": "#c9a227",
    "adv": "#e8d48b", "update_critic": "#d95f02", "update_actor": "#a3341f", "sync_weights": "#b0428c",
    "testing": "#5b4bb3", "save_checkpoint": "#b3a9e0", "other": "#c3cad2",
}  # fmt: skip
_SPARE = ("#2b9ec4", "#5d8a1c", "#7a5c00", "#e39ac7", "#555f6b", "#f2a66e")


def phases(run: Run) -> dict[str, np.ndarray]:
    """Seconds by phase, one number for each row of `timing_s/step`; `other` is the rest of the step.

    Empty if the run has no timing. NaN counts as 0.
    """
    if "timing_s/step" not in run.curves:
        return {}
    step = run.curves["timing_s/step"]
    names = [n.removeprefix("timing_s/") for n in run.curves if n.startswith("timing_s/") and n != "timing_s/step"]
    names.sort(key=lambda n: (n in _OUTSIDE, _ORDER.index(n) if n in _ORDER else len(_ORDER), n))
    out: dict[str, np.ndarray] = {}
    for name in names:
        curve = run.curves[f"timing_s/{name}"]
        seconds = np.zeros(len(step.steps))
        both = np.isin(curve.steps, step.steps)
        seconds[np.searchsorted(step.steps, curve.steps[both])] = np.nan_to_num(curve.values[both], posinf=0, neginf=0)
        out[name] = seconds
    inside = sum((s for name, s in out.items() if name not in _OUTSIDE), np.zeros(len(step.steps)))
    rest = np.maximum(np.nan_to_num(step.values, posinf=0, neginf=0) - inside, 0)
    total = sum(out.values(), rest).sum()
    for name in [n for n, s in out.items() if s.sum() < _SMALLEST * total]:
        rest = rest + out.pop(name)
    return out | {"other": rest}


def draw_timing(runs: Sequence[Run], which: int, title: str, span: tuple[int, int]) -> Figure | None:
    """Mean seconds of an iteration of run `which` by phase, in at most 60 bars; None without timings."""
    run = runs[which]
    parts = phases(run)
    if not parts or not sum(s.sum() for s in parts.values()):
        return None
    steps = run.curves["timing_s/step"].steps
    first, last = int(steps[0]), int(steps[-1])
    width = -(-(last - first + 1) // _BARS)
    bar = (steps - first) // width
    count = np.bincount(bar)
    middle = first + (np.arange(len(count)) + 0.5) * width - 0.5
    figure = Figure(figsize=(SIZE[0], SIZE[1] + 0.25), layout="constrained")
    axes = figure.subplots()
    base = np.zeros(len(count))
    for name, seconds in parts.items():
        height = np.bincount(bar, weights=seconds) / np.maximum(count, 1)
        axes.bar(middle, height, width * 0.86, bottom=base, color=_colour(name, list(parts)), label=name, lw=0)
        base += height
    axes.grid(axis="x", visible=False)
    iteration_axis(axes, "seconds per iteration" + (f" (mean of {width})" if width > 1 else ""), span)
    axes.set_xlim(min(span[0], first) - 0.6 * width, max(span[1], last) + 0.6 * width)
    mark_events(axes, runs, span, only=which)
    _shares(axes, parts)
    axes.set_title(plain(title, 70), loc="left", pad=7)
    return figure


def _shares(axes: Any, parts: dict[str, np.ndarray]) -> None:
    """A legend at the right, from the top of the bars to their foot, with each phase's share of the time."""
    total = sum(s.sum() for s in parts.values())
    handles, names = axes.get_legend_handles_labels()
    labels = [f"{plain(name, 24)}  {parts[name].sum() / total:.0%}" for name in names]
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.0)


def _colour(name: str, names: Sequence[str]) -> str:
    unknown = [n for n in names if n not in _COLOURS]
    return _COLOURS[name] if name in _COLOURS else _SPARE[unknown.index(name) % len(_SPARE)]
