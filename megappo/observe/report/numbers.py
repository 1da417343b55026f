"""The tables of a report: final numbers, all metrics, events, settings that differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from megappo.observe.report.curves import Curve
from megappo.observe.report.runs import Run

#: (label, metric; `*` stands for a data source)
FINAL = (
    ("Validation accuracy", "val/*/acc"),
    ("Validation accuracy, sampled", "val/*/acc_sampled"),
    ("Score, mean", "critic/score/mean"),
    ("Score, standard deviation", "critic/score/std"),
    ("Score, median", "critic/score/median"),
    ("KL to the reference", "actor/reward_kl_penalty"),
    ("KL loss", "actor/kl_loss"),
    ("KL of the update", "actor/ppo_kl"),
    ("Entropy", "actor/entropy"),
    ("Policy loss", "actor/pg_loss"),
    ("Value loss", "critic/vf_loss"),
    ("Explained variance", "critic/vf_explained_var"),
    ("Gradient norm, policy", "actor/grad_norm"),
    ("Gradient norm, critic", "critic/grad_norm"),
    ("Tokens clipped, policy", "actor/pg_clipfrac"),
    ("Training loss", "train/loss"),
    ("Validation loss", "val/loss"),
    ("Validation perplexity", "val/perplexity"),
    ("Response length (tokens)", "response_length/mean"),
    ("Responses cut at the limit", "response_length/clip_ratio"),
    ("Log-prob difference, rollout − training", "rollout_corr/logprob_abs_diff_mean"),
    ("Throughput (tokens/s per rank)", "perf/throughput"),
    ("Seconds per iteration", "timing_s/step"),
)


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row. `groups`: (run name, index, columns) above the head."""

    head: list[str]
    rows: list[list[str]]
    groups: list[tuple[str, int, int]]


def show(value: float | None) -> str:
    """Four significant digits, thousands apart; "–" for nothing."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def final_table(runs: Sequence[Run]) -> Table:
    """The numbers that matter, first and last."""
    names = sorted({name for run in runs for name in run.curves})
    rows = []
    for label, metric in FINAL:
        pattern = re.compile(re.escape(metric).replace(r"\*", "(.+)") + "$")
        found = [(name, m) for name in names if (m := pattern.match(name))]
        rows += [(f"{label}: {m[1]}" if "*" in metric else label, name) for name, m in found]
    return _table(runs, rows)


def metric_table(runs: Sequence[Run]) -> Table:
    """Every metric of every run."""
    return _table(runs, [(name, name) for name in sorted({name for run in runs for name in run.curves})])


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, str]]) -> Table:
    several = len(runs) > 1
    cells = [[label, *(cell for run in runs for cell in _cells(run.curves.get(name), several))] for label, name in rows]
    per_run = ["first", "last"] if several else ["first", "last", "lowest", "highest"]
    groups = [(run.name, r, len(per_run)) for r, run in enumerate(runs)] if several else []
    return Table(["", *per_run * len(runs)], cells, groups)


def _cells(curve: Curve | None, several: bool) -> list[str]:
    values = curve.finite() if curve is not None else np.zeros(0)
    if curve is not None and not len(values):
        return ["NaN"] * (2 if several else 4)
    if curve is None:
        return ["–"] * (2 if several else 4)
    ends = [show(float(values[0])), show(float(values[-1]))]
    return ends if several else [*ends, show(float(values.min())), show(float(values.max()))]


def facts(run: Run) -> list[tuple[str, str]]:
    """What the run is: experiment, iterations, dates, tokens, versions of nothing else."""
    first, last = run.span
    names = [run.setting(f"trainer.{key}") for key in ("project_name", "experiment_name")]
    planned = run.setting("trainer.total_iterations")
    started = f"{'about ' if run.guessed else ''}{when(run.started)}"
    out = [
        ("Experiment", " / ".join(str(n) for n in names if n)),
        ("Model", str(run.setting("model.path") or "")),
        ("Iterations", f"{first:,} to {last:,}" + (f" of {planned:,}" if isinstance(planned, int) else "")),
        ("Started", started if run.started else ""),
        ("Last logged", when(run.ended)),
        ("Duration", duration(run.ended - run.started) if run.started and run.ended else ""),
    ]
    tokens = run.curves.get("perf/total_num_tokens")
    if tokens is not None:
        out.append(("Tokens", f"{tokens.finite().sum():,.0f}"))
    out.append(("Guard events", str(len(run.events))))
    return [(name, text) for name, text in out if text]


def when(seconds: float | None) -> str:
    """A moment in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else ""


def duration(seconds: float) -> str:
    """Two units are enough."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Settings that are not the same in all runs: key, then the value in each."""
    flat = [_flat(run.config) for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    rows = [[key, *(str(settings.get(key, "–")) for settings in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix[:-1]: tree} if prefix else {}
    return {key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}{name}.").items()}
