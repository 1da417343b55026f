"""Which charts a report has: metrics, units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megappo.observe.report.runs import Run
from megappo.observe.report.thresholds import Limit, Thresholds, Zone

MOST_SOURCES = 8  # data sources that are drawn; the table of all metrics has all
MOST_OTHER = 24  # charts of metrics that the catalogue does not know


@dataclass(frozen=True)
class Line:
    """One metric of a chart. `band`: a standard deviation (one name) or a lower and an upper metric (two).

    A `*` in `metric` stands for a data source; it is filled in the label's `{}`.
    """

    metric: str
    label: str
    band: tuple[str, ...] = ()
    band_label: str = ""


@dataclass(frozen=True)
class Chart:
    """One chart. `floor`: where a linear axis starts (None: it follows the data and may become logarithmic).

    `show_limits`: the axis always reaches zones and limits; otherwise a limit is drawn where the data come near it.
    `unless_zero`: left out while all values are 0. `log`: logarithmic from the start.
    """

    section: str
    key: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    limits: tuple[Limit, ...] = ()
    zones: tuple[Zone, ...] = ()
    floor: float | None = None
    show_limits: bool = False
    unless_zero: bool = False
    log: bool = False


REWARD, VALID, KL, LOSS, CLIP, LENGTH, MATCH, SPEED, OTHER = (
    "Reward",
    "Validation",
    "KL and entropy",
    "Losses and gradients",
    "Clipping",
    "Lengths",
    "Rollout against training",
    "Speed",
    "Other metrics",
)


def catalogue() -> list[Chart]:
    """All charts, before it is known which metrics the runs have."""
    return [*_results(), *_control(), *_losses(), *_rest()]


def _results() -> list[Chart]:
    score = (
        Line("critic/score/mean", "mean", ("critic/score/std",), "± std"),
        Line("critic/score/median", "median"),
    )
    held_out = (Line("val/*/acc", "{}"), Line("val/*/acc_sampled", "{}, sampled"))
    held_out_score = (Line("val/*/reward/mean", "{}"), Line("val/*/reward_sampled/mean", "{}, sampled"))
    return [
        Chart(REWARD, "score", "Score of the responses", "score", score),
        Chart(
            REWARD,
            "reward",
            "Reward after shaping and KL penalty",
            "reward",
            (Line("critic/rewards/mean", "mean"),),
        ),
        Chart(
            REWARD,
            "score_by_source",
            "Score by data source and reward",
            "mean score",
            (Line("critic/score/*/mean", "{}"),),
        ),
        Chart(VALID, "val_accuracy", "Validation accuracy", "share of answers scoring ≥ 0.8", held_out, floor=0.0),
        Chart(VALID, "val_score", "Validation score", "mean score", held_out_score),
        Chart(VALID, "val_loss", "Validation loss", "nats per token", (Line("val/loss", "validation"),)),
    ]


def _control() -> list[Chart]:
    to_reference = (
        Line("actor/reward_kl_penalty", "before the update"),
        Line("actor/kl_loss", "in the loss"),
    )
    coefficients = (
        Line("actor/reward_kl_penalty_coeff", "in the reward"),
        Line("actor/kl_coef", "in the loss"),
    )
    kl, entropy = "KL to the reference", "Policy entropy"
    step = (Line("actor/ppo_kl", "mean"),)
    return [
        Chart(KL, "kl_reference", kl, "nats per token", to_reference, show_limits=True),
        Chart(KL, "kl_step", "KL of the update (old to new policy)", "nats per token", step),
        Chart(KL, "kl_coefficient", "KL coefficient", "coefficient", coefficients),
        Chart(KL, "entropy", entropy, "nats per token", (Line("actor/entropy", "mean"),), floor=0.0, show_limits=True),
    ]


def _losses() -> list[Chart]:
    norms = [
        Chart(
            LOSS,
            f"grad_norm_{role}",
            f"Gradient norm, {name}",
            "norm before clipping",
            (Line(f"{role}/grad_norm", "mean of the steps"), Line(f"{role}/grad_norm_max", "largest step")),
        )
        for role, name in (("actor", "policy"), ("critic", "critic"), ("train", "fine-tuning"))
    ]
    rates = (Line("actor/lr", "policy"), Line("critic/lr", "critic"), Line("train/lr", "fine-tuning"))
    skipped = (Line("actor/skipped_steps", "policy"), Line("critic/skipped_steps", "critic"))
    return [
        Chart(
            LOSS,
            "loss_policy",
            "Policy loss",
            "loss",
            (Line("actor/pg_loss", "policy loss"), Line("actor/loss", "with entropy and KL terms")),
        ),
        Chart(LOSS, "loss_value", "Value loss", "reward²", (Line("critic/vf_loss", "value loss"),)),
        Chart(LOSS, "loss_train", "Training loss", "nats per token", (Line("train/loss", "training"),)),
        *norms,
        Chart(
            LOSS,
            "explained_variance",
            "Explained variance of the critic",
            "share (1 is perfect)",
            (Line("critic/vf_explained_var", "share"),),
        ),
        Chart(LOSS, "learning_rate", "Learning rate", "learning rate", rates),
        Chart(LOSS, "skipped_steps", "Skipped optimizer steps", "steps", skipped, floor=0.0, unless_zero=True),
    ]


def _rest() -> list[Chart]:
    policy = (Line("actor/pg_clipfrac", "clip"), Line("actor/pg_clipfrac_lower", "dual clip"))
    length = Line("response_length/mean", "mean", ("response_length/min", "response_length/max"), "min to max")
    cut = (Line("response_length/clip_ratio", "cut at the limit"), Line("response/aborted_ratio", "aborted"))
    gap = (Line("rollout_corr/logprob_abs_diff_mean", "mean"),)
    ratio = (Line("actor/ratio_max", "largest"), Line("actor/ratio_min", "smallest"))
    return [
        Chart(CLIP, "clip_policy", "Tokens clipped, policy", "share of tokens", policy, floor=0.0),
        Chart(
            CLIP,
            "clip_value",
            "Tokens clipped, critic",
            "share of tokens",
            (Line("critic/vf_clipfrac", "clip"),),
            floor=0.0,
            unless_zero=True,
        ),
        Chart(CLIP, "ratio", "Probability ratio, new to old policy", "ratio", ratio, log=True),
        Chart(LENGTH, "response_length", "Response length", "tokens", (length,), floor=0.0),
        Chart(LENGTH, "responses_cut", "Responses cut or aborted", "share of responses", cut, floor=0.0),
        Chart(
            MATCH, "logprob_gap", "Log-prob difference, rollout − training", "mean |difference|, nats", gap, log=True
        ),
        Chart(
            MATCH,
            "sample_size",
            "Effective sample size, tokens kept",
            "share (1 is no mismatch)",
            (Line("rollout_corr/ess", "effective sample size"), Line("rollout_corr/kept_share", "tokens kept")),
        ),
        Chart(SPEED, "throughput", "Throughput", "tokens/s per rank", (Line("perf/throughput", "all"),), floor=0.0),
    ]


#: in the table of all metrics, but not worth a chart of their own
_PLAIN = re.compile(
    r"(training|sync|perf|timing_s|prompt_length|rollout_corr)/|critic/(vpred|values|returns|advantages)|reward/.+/mean$"
)


def charts_for(runs: Sequence[Run], thresholds: Thresholds) -> list[Chart]:
    """The charts that these runs have metrics for, in the order of the page; unknown metrics come last."""
    names = {name for run in runs for name in run.curves}
    wanted = [chart for raw in catalogue() for chart in _expand(raw, names, apart=len(runs) > 1)]
    known = {name for chart in wanted for line in chart.lines for name in (line.metric, *line.band)}
    charts = []
    for chart in wanted:
        lines = tuple(line for line in chart.lines if line.metric in names)
        lines = tuple(line for i, line in enumerate(lines) if not any(_same(runs, line, old) for old in lines[:i]))
        copy = chart.key == "reward" and lines and _same(runs, lines[0], Line("critic/score/mean", ""))
        if lines and not copy and not (chart.unless_zero and _all_zero(runs, lines)):
            charts.append(replace(chart, lines=lines))
    charts += _others(runs, names, known)
    return [_with_thresholds(chart, thresholds) for chart in charts]


def _with_thresholds(chart: Chart, thresholds: Thresholds) -> Chart:
    metrics = [line.metric for line in chart.lines]
    return replace(chart, zones=thresholds.zones(metrics), limits=thresholds.limits(metrics))


def _same(runs: Sequence[Run], one: Line, other: Line) -> bool:
    """True if two metrics have the same curves, so that one of them is enough."""
    pairs = [(run.curves.get(one.metric), run.curves.get(other.metric)) for run in runs]
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and np.array_equal(a.steps, b.steps) and _close(a.values, b.values))
        for a, b in pairs
    )


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-6, atol=1e-12, equal_nan=True)


def _expand(chart: Chart, names: set[str], *, apart: bool) -> list[Chart]:
    """Fill in the data sources: all in one chart, or one chart each (several runs need the colours)."""
    if not any("*" in line.metric for line in chart.lines):
        return [chart]
    patterns = [re.compile(re.escape(line.metric).replace(r"\*", "(.+)") + "$") for line in chart.lines]
    sources = sorted({m[1] for pattern in patterns for m in map(pattern.match, names) if m})
    if chart.key == "score_by_source" and len(sources) < 2:
        return []  # the same curve as the score
    sources = sources[:MOST_SOURCES]
    lines = [
        [replace(x, metric=x.metric.replace("*", s), label=x.label.format(s)) for x in chart.lines] for s in sources
    ]
    if not apart or len(sources) < 2:
        return [replace(chart, lines=tuple(line for group in lines for line in group))] if sources else []
    return [
        replace(chart, key=f"{chart.key}_{i}", title=f"{chart.title}: {source}", lines=tuple(group))
        for i, (source, group) in enumerate(zip(sources, lines, strict=True), 1)
    ]


def _all_zero(runs: Sequence[Run], lines: Sequence[Line]) -> bool:
    return all(not run.curves[x.metric].values.any() for run in runs for x in lines if x.metric in run.curves)


def _others(runs: Sequence[Run], names: set[str], known: set[str]) -> list[Chart]:
    """A chart for each metric that nothing above shows and that varies, so that new metrics are not lost."""
    charts = []
    for name in sorted(names - known):
        stem, _, end = name.rpartition("/")
        beside = end in ("std", "median", "min", "max") and f"{stem}/mean" in names
        found = [run.curves[name] for run in runs if name in run.curves]
        if _PLAIN.match(name) or beside or len(np.unique(np.concatenate([c.finite() for c in found]))) < 2:
            continue
        band = (f"{stem}/min", f"{stem}/max") if end == "mean" and {f"{stem}/min", f"{stem}/max"} <= names else ()
        key = "other_" + re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
        charts.append(Chart(OTHER, key, name, "value", (Line(name, "value", band, "min to max"),)))
    return charts[:MOST_OTHER]
