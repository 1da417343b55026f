"""Puts a report together: reads the runs, draws the charts, fills the page."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo import __version__
from megappo.errors import UserError
from megappo.observe.report import numbers
from megappo.observe.report.charts import KL, OTHER, SPEED, charts_for
from megappo.observe.report.runs import Event, Run, load_runs
from megappo.observe.report.samples import sample_groups
from megappo.observe.report.template import CSS, PAGE
from megappo.observe.report.thresholds import Thresholds, thresholds_of

if TYPE_CHECKING:
    from megappo.observe.report.draw import Picture

MOST_RUNS = 10  # the colours end there
_MOST_EVENTS = 500  # rows of the table
_NO_REFERENCE = (
    "No KL to the reference: these runs have none (actor.use_kl_loss and algorithm.use_kl_in_reward are false)."
)


def write_report(folders: Sequence[str | Path], out: str | Path | None = None, png: str | Path | None = None) -> Path:
    """Write one HTML page about the runs; returns its path.

    Args:
        folders: run folders (`trainer.output_dir`); several are drawn over each other.
        out: the page; default `report.html` in the run's folder, for several runs in the current one.
        png: folder for each chart as a PNG file.

    Raises:
        UserError: a run cannot be read, there are too many, matplotlib is missing, or a file cannot be written.
    """
    if not 1 <= len(folders) <= MOST_RUNS:
        raise UserError(f"{len(folders)} run folders given: a report shows 1 to {MOST_RUNS}")
    _need_matplotlib()
    runs = load_runs(folders)
    target = Path(out) if out else Path(folders[0]) / "report.html" if len(runs) == 1 else Path("report.html")
    if target.is_dir():
        raise UserError(f"{target} is a folder: give --out a file name, such as {target / 'report.html'}")
    thresholds = thresholds_of(runs)
    try:
        if png is not None:
            Path(png).mkdir(parents=True, exist_ok=True)
        pictures = draw_all(runs, thresholds, Path(png) if png is not None else None)
        text = render(runs, pictures, thresholds.note)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="\n")
    except OSError as err:
        raise UserError(
            f"cannot write {err.filename or target} ({err.strerror}): choose another --out or --png"
        ) from None
    return target


def _need_matplotlib() -> None:
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as err:
        raise UserError(f"megappo report needs matplotlib ({err}): pip install 'megappo[report]'") from None


def draw_all(runs: Sequence[Run], thresholds: Thresholds, png: Path | None) -> list[Picture]:
    """All charts of these runs, in the order of the page; also as files in `png`."""
    from megappo.observe.report.draw import draw, picture, style
    from megappo.observe.report.timing import draw_timing

    span = min(run.span[0] for run in runs), max(run.span[1] for run in runs)
    pictures: list[Picture] = []

    def add(section: str, key: str, title: str, metrics: str, figure: Any) -> None:
        file = png / f"{len(pictures) + 1:02d}_{key}.png" if png is not None else None
        pictures.append(picture(section, key, title, metrics, figure, file))

    charts = charts_for(runs, thresholds)
    with style():
        for chart in (c for c in charts if c.section != OTHER):
            add(chart.section, chart.key, chart.title, _names(chart), draw(chart, runs, span))
        for r, run in enumerate(runs):
            title = "Time of an iteration" + (f": {run.name}" if len(runs) > 1 else "")
            figure = draw_timing(runs, r, title, span)
            if figure is not None:
                add(SPEED, f"timing_{r + 1}" if len(runs) > 1 else "timing", title, "timing_s/*", figure)
        for chart in (c for c in charts if c.section == OTHER):
            add(chart.section, chart.key, chart.title, _names(chart), draw(chart, runs, span))
    return pictures


def _names(chart: Any) -> str:
    return ", ".join(dict.fromkeys(name for line in chart.lines for name in (line.metric, *line.band)))


def render(runs: Sequence[Run], pictures: Sequence[Picture], limits_note: str) -> str:
    """The page as text."""
    import jinja2

    from megappo.observe.report.draw import COLOURS

    several = len(runs) > 1
    events = _events(runs, COLOURS)
    sections = _sections(pictures, limits_note)
    found = [(run.name, COLOURS[r], sample_groups(run)) for r, run in enumerate(runs)]
    samples = [entry for entry in found if entry[2]]
    links = [("overview", "Overview"), ("numbers", "Numbers")]
    links += [("events", "Guard events")] * bool(events)
    links += [(section["anchor"], section["name"]) for section in sections]
    links += [("samples", "Samples")] * bool(samples) + [("configuration", "Configuration"), ("metrics", "All metrics")]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(
        css=jinja2.utils.markupsafe.Markup(CSS),
        title=_title(runs),
        version=__version__,
        made=numbers.when(time.time()),
        colours=COLOURS,
        several=several,
        links=links,
        runs=[_card(run) for run in runs],
        final=numbers.final_table(runs),
        metrics=numbers.metric_table(runs),
        events=events[:_MOST_EVENTS],
        more_events=max(0, len(events) - _MOST_EVENTS),
        sections=sections,
        samples=samples,
        different=numbers.differences(runs) if several else [],
        show=numbers.show,
    )


def _title(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} training runs"
    experiment = runs[0].setting("trainer.experiment_name")
    return f"Training run {runs[0].name}" + (f": {experiment}" if experiment not in (None, runs[0].name) else "")


def _card(run: Run) -> dict[str, Any]:
    import yaml

    config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else ""
    return {"name": run.name, "facts": numbers.facts(run), "notes": run.notes, "config": config}


def _events(runs: Sequence[Run], colours: Sequence[str]) -> list[tuple[int, str, str, Event]]:
    """Events with the numbers that the charts use."""
    flat = [(run.name, colours[r], event) for r, run in enumerate(runs) for event in run.events]
    return [(i, name, colour, event) for i, (name, colour, event) in enumerate(flat, 1)]


def _sections(pictures: Sequence[Picture], limits_note: str) -> list[dict[str, Any]]:
    out = []
    for name in dict.fromkeys(p.section for p in pictures):
        mine = [p for p in pictures if p.section == name]
        anchor = re.sub(r"[^a-z]+", "-", name.lower())
        note = limits_note if name == KL else ""
        if name == KL and not any(p.key == "kl_reference" for p in mine):
            note = f"{_NO_REFERENCE} {note}"
        out.append({"name": name, "anchor": anchor, "pictures": mine, "note": note, "folded": name == OTHER})
    return out
