"""Charts as matplotlib figures: light, one style for all, runs in colours, guard events as dashed verticals."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from megappo.observe.report.charts import Chart, Line
from megappo.observe.report.curves import BUCKETS, SMOOTH_FROM, Curve, smooth, thin
from megappo.observe.report.runs import Run

#: Okabe and Ito's colours (told apart by the colour-blind), darkened for thin lines on white
COLOURS = (
    "#0b66b0", "#d95f02", "#12855f", "#b0428c", "#7a5c00",
    "#5b4bb3", "#2b9ec4", "#a3341f", "#5d8a1c", "#555f6b",
)  # fmt: skip
LEVELS = {"good": "#1a8f4a", "warn": "#c27c0e", "bad": "#c62828"}
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
SIZE = (6.6, 3.5)  # inches
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9.0,
    "axes.labelcolor": "#38424d",
    "axes.edgecolor": "#9aa5b1",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e8ebef",
    "grid.linewidth": 0.8,
    "xtick.color": "#5b6672",
    "ytick.color": "#5b6672",
    "text.color": "#1f2933",
    "legend.fontsize": 8.2,
    "legend.frameon": False,
    "svg.hashsalt": "megappo",  # the same run gives the same bytes
    "svg.fonttype": "path",
}
_MARK_UP_TO = 30  # points that get a dot each
_MOST_EVENTS = 150  # verticals drawn for one run
_MOST_NUMBERS = 15  # event numbers written in one chart
_MOST_BANDS = 3  # runs that are drawn with bands; more would be mud
_NOISE = 1e-3  # a range that is smaller, relative to the values, is drawn as a constant
_LEGEND_WIDTH = 92  # characters in a row of the legend


@dataclass(frozen=True)
class Picture:
    """A finished chart; `svg` is a data URI."""

    section: str
    key: str
    title: str
    metrics: str
    svg: str


@contextmanager
def style() -> Iterator[None]:
    """The report's look, for figures made and saved inside."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a run's name may be in any script
        yield


def picture(section: str, key: str, title: str, metrics: str, figure: Figure, png: Path | None) -> Picture:
    """Save the figure as SVG data, and as `png` where asked for."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    if png is not None:
        figure.savefig(png, dpi=160)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return Picture(section, key, title, metrics, f"data:image/svg+xml;base64,{data}")


def run_colour(index: int) -> str:
    """The colour of a run, everywhere in the report."""
    return COLOURS[index % len(COLOURS)]


def plain(text: str, longest: int = 34) -> str:
    """Text that matplotlib draws as it is: no formulas between dollars, no leading underscore, not too long."""
    if len(text) > longest:
        text = f"{text[: longest // 2]}…{text[-(longest // 2) + 1 :]}"
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


# ------------------------------------------------------------------ curves
def draw(chart: Chart, runs: Sequence[Run], span: tuple[int, int]) -> Figure:
    """The chart of all runs, over the iterations of `span`."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    shown: list[np.ndarray] = []
    broken: list[np.ndarray] = []
    for r, run in enumerate(runs):
        for i, line in enumerate(chart.lines):
            colour = run_colour(r if len(runs) > 1 else i)
            for old in (part[line.metric] for part in run.discarded if line.metric in part):
                _discarded(axes, old, colour)
                shown.append(old.finite())
                broken.append(old.broken())
            if line.metric in run.curves:
                shown += _trace(axes, run, line, colour, DASHES[i % len(DASHES)], banded=len(runs) <= _MOST_BANDS)
                broken.append(run.curves[line.metric].broken())
    data = np.concatenate(shown) if shown else np.zeros(0)
    log = _set_scale(axes, chart, data)
    _set_range(axes, chart, data, log)
    _thresholds(axes, chart)
    mark_events(axes, runs, span)
    missing = np.unique(np.concatenate(broken)) if broken else np.zeros(0)
    if len(missing):
        at = missing[np.linspace(0, len(missing) - 1, min(len(missing), 200)).astype(int)]
        top = axes.get_xaxis_transform()
        axes.plot(at, np.full(len(at), 0.03), "x", ms=5, color=LEVELS["bad"], transform=top, clip_on=False, zorder=5)
    iteration_axis(axes, chart.unit + (f" ({log})" if log else ""), span)
    _titled(axes, chart.title, _legend(chart, runs, bool(len(missing))))
    return figure


def _trace(axes: Any, run: Run, line: Line, colour: str, dash: Any, *, banded: bool) -> list[np.ndarray]:
    """One line with its band; returns the numbers that the axis should show."""
    curve = run.curves[line.metric]
    long = len(curve.steps) > SMOOTH_FROM
    raw = thin(curve)
    if long:
        axes.plot(raw.steps, raw.values, color=colour, lw=0.7, alpha=0.3, zorder=1.8)
        main = thin(smooth(curve))
        axes.plot(main.steps, main.values, color=colour, lw=1.7, ls=dash, zorder=2.5)
    else:
        marker = "o" if len(curve.steps) <= _MARK_UP_TO else ""
        axes.plot(raw.steps, raw.values, color=colour, lw=1.6, ls=dash, marker=marker, ms=3.2)
    band = _band(run, line) if banded else None
    if band is None:
        return [curve.finite()]
    low, high = map(_edge, band) if long else band
    if len(low.steps) == 1:
        axes.vlines(low.steps, low.values, high.values, color=colour, alpha=0.13, lw=9)
    axes.fill_between(low.steps, low.values, high.values, color=colour, alpha=0.13, lw=0)
    return [curve.finite(), low.finite(), high.finite()]


def _band(run: Run, line: Line) -> tuple[Curve, Curve] | None:
    """Lower and upper edge, where the metrics of the band were logged at the same iterations."""
    if not line.band or not all(name in run.curves for name in line.band):
        return None
    middle, edges = run.curves[line.metric], [run.curves[name] for name in line.band]
    if any(not np.array_equal(edge.steps, middle.steps) for edge in edges):
        return None
    if len(edges) == 2:
        return edges[0], edges[1]
    return (
        Curve(middle.steps, middle.values - edges[0].values),
        Curve(middle.steps, middle.values + edges[0].values),
    )


def _edge(curve: Curve) -> Curve:
    """The edge of a long band: smoothed, at evenly spaced iterations (the same for both edges)."""
    at = np.unique(np.linspace(0, len(curve.steps) - 1, 2 * BUCKETS).astype(int))
    return Curve(curve.steps[at], smooth(curve).values[at])


def _discarded(axes: Any, curve: Curve, colour: str) -> None:
    raw = thin(curve)
    axes.plot(raw.steps, raw.values, color=colour, lw=1.1, ls=(0, (1, 1.6)), alpha=0.75)


# ------------------------------------------------------------------ axes
def _set_scale(axes: Any, chart: Chart, data: np.ndarray) -> str:
    """Logarithmic where the data need it (an explosion would flatten the rest); returns its name for the label."""
    size = np.abs(data[data != 0])
    if chart.floor is not None or not len(size):
        return ""
    middle, top = float(np.median(size)), float(size.max())
    if chart.zones and top <= max(zone.high for zone in chart.zones):
        return ""  # nothing exploded: it is just small
    if (chart.log or top > 60 * middle) and (data > 0).all():
        axes.set_yscale("log")
        return "log"
    if top > 200 * middle:
        axes.set_yscale("symlog", linthresh=10.0 ** np.ceil(np.log10(middle)))
        return "symmetric log"
    return ""


def _set_range(axes: Any, chart: Chart, data: np.ndarray, log: str) -> None:
    """The y range: the data, the floor, and zones and limits where they belong to the picture."""
    values = list(data[[data.argmin(), data.argmax()]]) if len(data) else [0.0, 1.0]
    if chart.show_limits:
        values += [edge for zone in chart.zones for edge in (zone.low, zone.high)]
        values += [limit.value for limit in chart.limits] if not chart.zones else []
        values += [0.0] if chart.zones and not log else []
    low, high = min(values), max(values)
    if log == "log":
        if not chart.log:  # a start near 0 must not take half of the picture
            low = max(low, float(np.median(data)) / 1000)
        low, high = np.floor(np.log10(low / 1.1)), np.ceil(np.log10(high * 1.1))
        axes.set_ylim(10.0**low, 10.0**high)
        axes.yaxis.set_minor_formatter(NullFormatter())
        return
    if chart.floor is not None and low >= chart.floor:
        low = chart.floor
        axes.set_ylim(low, high + 0.1 * (high - low) if high > low else low + 1)
        return
    if log:
        axes.set_ylim(2 * min(low, 0.0), 2 * max(high, 0.0))
        return
    size = max(abs(low), abs(high))
    margin = 0.08 * (high - low) if high - low > _NOISE * size else (0.1 * size or 1.0)
    axes.set_ylim(low - margin, high + margin)


def _thresholds(axes: Any, chart: Chart) -> None:
    """Zones, and the limits inside the range or a little above it."""
    low, high = axes.get_ylim()
    linear = axes.get_yscale() == "linear"
    for zone in chart.zones:
        axes.axhspan(zone.low, zone.high, color=LEVELS["good"], alpha=0.1, lw=0, zorder=0.5)
        _note(axes, zone.high, zone.label, LEVELS["good"], left=True, below=True)
    for limit in chart.limits:
        if linear and high - 0.1 * (high - low) < limit.value <= high + 0.3 * (high - low):
            high = limit.value + 0.17 * (high - low)
            axes.set_ylim(low, high)
    shown = [limit for limit in chart.limits if low <= limit.value <= high]
    heights = [axes.transAxes.inverted().transform(axes.transData.transform((0, x.value)))[1] for x in shown]
    for limit, height in zip(shown, heights, strict=True):
        crowded = any(height < other < height + 0.06 for other in heights)
        axes.axhline(limit.value, color=LEVELS[limit.level], lw=1.0, alpha=0.9, zorder=1)
        _note(axes, limit.value, limit.label, LEVELS[limit.level], below=crowded)


def _note(axes: Any, y: float, text: str, colour: str, *, left: bool = False, below: bool = False) -> None:
    """A label at the end of a threshold."""
    axes.annotate(
        text,
        (0.0 if left else 1.0, y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(3 if left else -3, -2 if below else 2),
        textcoords="offset points",
        ha="left" if left else "right",
        va="top" if below else "bottom",
        fontsize=7.4,
        color=colour,
        path_effects=[withStroke(linewidth=2.2, foreground="white")],
        zorder=4,
    )


def iteration_axis(axes: Any, unit: str, span: tuple[int, int]) -> None:
    """Whole iterations from the first to the last of all runs; `unit` is the label of the other axis."""
    first, last = span
    pad = 0.015 * (last - first) if last > first else 0.5
    axes.set_xlim(first - pad, last + pad)
    if last > first:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    else:
        axes.set_xticks([first])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.set_xlabel("iteration")
    axes.set_ylabel(plain(unit, 60))


def tick(value: float) -> str:
    """A number at an axis, complete in itself: matplotlib's common factor above the axis is easily overlooked."""
    if 1e3 <= abs(value) < 1e7:
        return f"{value:,.6g}"
    return f"{value:.5g}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def mark_events(axes: Any, runs: Sequence[Run], span: tuple[int, int], only: int | None = None) -> None:
    """Guard events of all runs (or of run `only`), numbered as in the table of events while there is room."""
    top = axes.get_xaxis_transform()
    number, last_text, room = 0, -np.inf, 0.028 * max(1, span[1] - span[0])
    numbered = sum(len(run.events) for run in runs) <= _MOST_NUMBERS
    labels: list[tuple[int, int, str]] = []
    for r, run in enumerate(runs):
        colour = LEVELS["bad"] if len(runs) == 1 else run_colour(r)
        steps = np.unique([event.step for event in run.events]).astype(float)
        if only not in (None, r):
            number += len(run.events)
            continue
        if len(steps):
            at = steps[np.linspace(0, len(steps) - 1, min(len(steps), _MOST_EVENTS)).astype(int)]
            axes.vlines(
                at,
                0,
                1,
                transform=top,
                color=colour,
                lw=0.9,
                ls=(0, (3, 2.2)),
                alpha=0.75,
                zorder=2.2 if only is not None else 1.5,
            )
        for event in run.events:
            number += 1
            labels.append((event.step, number, colour))
    for step, text, colour in sorted(labels) if numbered else ():
        if step - last_text >= room:
            box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": colour, "lw": 0.6}
            axes.text(step, 0.985, str(text), transform=top, ha="center", va="top", size=6.6, color=colour, bbox=box)
            last_text = step


# ------------------------------------------------------------------ title and legend
def _legend(chart: Chart, runs: Sequence[Run], missing: bool) -> list[tuple[Any, str]]:
    """Handles with labels: runs by colour, lines by dash; a single line of a single run needs none."""
    several = len(runs) > 1
    items: list[tuple[Any, str]] = []
    if several:
        drawn = [(r, run) for r, run in enumerate(runs) if any(line.metric in run.curves for line in chart.lines)]
        items += [(Line2D([], [], color=run_colour(r), lw=2), plain(run.name)) for r, run in drawn]
    kinds = list(enumerate(chart.lines))
    if len(kinds) > 1 or (kinds[0][1].band and not several):
        for i, line in kinds:
            colour = "#66717d" if several else run_colour(i)
            items.append((Line2D([], [], color=colour, lw=1.8, ls=DASHES[i % len(DASHES)]), plain(line.label, 44)))
    for i, line in kinds:
        if line.band and any(name in run.curves for run in runs for name in line.band):
            items.append((Patch(color="#66717d" if several else run_colour(i), alpha=0.2, lw=0), line.band_label))
    if any(line.metric in old for run in runs for old in run.discarded for line in chart.lines):
        items.append((Line2D([], [], color="#66717d", lw=1.1, ls=(0, (1, 1.6))), "before a resume"))
    if any(run.events for run in runs):
        colour = "#66717d" if several else LEVELS["bad"]
        items.append((Line2D([], [], color=colour, lw=0.9, ls=(0, (3, 2.2))), "guard event"))
    if missing:
        items.append((Line2D([], [], color=LEVELS["bad"], marker="x", ms=5, ls=""), "NaN or infinite"))
    return items


def _titled(axes: Any, title: str, items: Sequence[tuple[Any, str]]) -> None:
    """Title at the left, the legend in as many rows as it needs between title and axes."""
    rows = 0
    if items:
        columns = next(c for c in range(len(items), 0, -1) if c == 1 or _width(items, c) <= _LEGEND_WIDTH)
        items = [item for column in range(columns) for item in items[column::columns]]  # matplotlib fills columns
        rows = -(-len(items) // columns)
        axes.legend(
            [handle for handle, _ in items],
            [label for _, label in items],
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=columns,
            borderaxespad=0.1,
            handlelength=1.9,
            columnspacing=1.3,
            labelspacing=0.25,
        )
    axes.set_title(plain(title, 70), loc="left", pad=7 + 12.4 * rows)


def _width(items: Sequence[tuple[Any, str]], columns: int) -> int:
    """Characters that a legend of so many columns takes, handles included."""
    return sum(max(len(label) for _, label in items[c::columns]) + 7 for c in range(columns))
