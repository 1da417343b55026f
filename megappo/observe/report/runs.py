"""What a run left in its folder: metrics, guard events, configuration, dates."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megappo.errors import UserError
from megappo.observe.report.curves import Curve, curves_of

Row = dict[str, float]
_SECRET = re.compile(r"(^|_)(api_?key|secret|password|passwd|authorization|(auth|access|bearer)_token)$", re.IGNORECASE)


@dataclass(frozen=True)
class Event:
    """One line of `events.jsonl`; `actions` as text."""

    step: int
    rule: str
    metric: str
    value: str
    condition: str
    actions: str
    message: str


@dataclass
class Run:
    """One run folder.

    `discarded`: what was logged for iterations that a resume made again later, oldest first.
    `started`, `ended`: seconds since 1970, None if unknown; `guessed`: the start comes from the timings.
    `notes`: what the reader of the report should know about the files.
    """

    name: str
    folder: Path
    curves: dict[str, Curve]
    discarded: list[dict[str, Curve]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    guessed: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def span(self) -> tuple[int, int]:
        """First and last iteration with a metric."""
        steps = [c.steps for c in self.curves.values()]
        return min(int(s[0]) for s in steps), max(int(s[-1]) for s in steps)

    def setting(self, path: str) -> Any:
        """A key of the configuration such as `guard.preset`; None where it is absent."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """All runs, with names that tell them apart.

    Raises:
        UserError: a folder is missing, given twice, or has no readable `metrics.jsonl`.
    """
    paths = [Path(folder) for folder in folders]
    return [load_run(path, name) for path, name in zip(paths, unique_names(paths), strict=True)]


def unique_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ from each other."""
    full = [folder.expanduser().resolve() for folder in folders]
    for i, folder in enumerate(full):
        if folder in full[:i]:
            raise UserError(f"{folders[i]} is given twice: name every run once")
    for depth in range(1, max(len(folder.parts) for folder in full) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in full]
        if len(set(names)) == len(names):
            break
    return names


def load_run(folder: Path, name: str) -> Run:
    """One run; see `load_runs`."""
    notes: list[str] = []
    kept, discarded = metric_rows(folder, notes)
    if discarded:
        first = int(discarded[0][-1]["step"])
        notes.append(
            f"The log goes back to an earlier iteration {len(discarded)} time(s) (a resume), first from iteration "
            f"{first}; dotted lines show what was logged before."
        )
    run = Run(name, folder, curves_of(kept), [curves_of(rows) for rows in discarded], notes=notes)
    run.events = list(read_events(folder / "events.jsonl", notes))
    run.config = hide_secrets(read_config(folder))
    if not run.config:
        notes.append("The configuration was not found: no config.yaml, checkpoint or TensorBoard file holds one.")
    broken = {name: len(c.broken()) for name, c in run.curves.items() if len(c.broken())}
    if broken:
        notes.append("NaN or infinite: " + ", ".join(f"{name} ({n}×)" for name, n in broken.items()))
    run.ended = _metrics_file(folder).stat().st_mtime
    run.started, run.guessed = _start(run)
    return run


def metric_rows(folder: Path, notes: list[str]) -> tuple[list[Row], list[list[Row]]]:
    """The rows of a run's metrics.jsonl, one a step, ascending; and those that a resume made again later.

    Raises:
        UserError: the folder is missing, or has no readable `metrics.jsonl`.
    """
    file = _metrics_file(folder)
    kept, discarded = _in_order(_metric_rows(file, notes))
    if not kept:
        raise UserError(f"{file} has no complete line with a step and a number: the run has logged nothing yet")
    return kept, discarded


def _metrics_file(folder: Path) -> Path:
    if not folder.exists():
        raise UserError(f"{folder}: no such folder: give a run's trainer.output_dir")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: give the run's folder (trainer.output_dir)")
    file = folder / "metrics.jsonl"
    if file.is_file():
        return file
    below = sorted(found.parent for found in folder.glob("*/metrics.jsonl"))
    hint = "is it a run's trainer.output_dir, with jsonl in trainer.logger?"
    if below:
        hint = f"did you mean {', '.join(map(str, below[:4]))}?"
    raise UserError(f"{folder} has no metrics.jsonl: {hint}")


def json_lines(file: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; lines that are none are counted in a note, a cut last line apart."""
    damaged: list[int] = []
    at, ended = 0, True
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for at, line in enumerate(lines, 1):
                ended = line.endswith("\n")
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError:
                    record = None
                if isinstance(record, dict):
                    yield record
                else:
                    damaged.append(at)
    except OSError as err:
        raise UserError(f"cannot read {file}: {err.strerror}") from None
    if damaged and damaged[-1] == at and not ended:
        damaged.pop()
        notes.append(f"{file.name}: the last line was cut off and is left out; the run was killed or is still writing.")
    if damaged:
        notes.append(f"{file.name}: {len(damaged)} damaged line(s) left out, the first is line {damaged[0]}.")


def _metric_rows(file: Path, notes: list[str]) -> Iterator[Row]:
    without = 0
    for record in json_lines(file, notes):
        step = number(record.get("step"))
        if step is None or not math.isfinite(step):
            without += 1
            continue
        values = ((name, number(value)) for name, value in record.items())
        yield {name: value for name, value in values if value is not None} | {"step": int(step)}
    if without:
        notes.append(f"{file.name}: {without} line(s) without a step are left out.")


def _in_order(rows: Iterator[Row]) -> tuple[list[Row], list[list[Row]]]:
    """Rows that ascend by step, and the stretches that a later return to an earlier step replaced.

    Lines of the same step are one row. A stretch starts with the row before it, so that its curve is attached.
    """
    kept: list[Row] = []
    discarded: list[list[Row]] = []
    for row in rows:
        if kept and row["step"] < kept[-1]["step"]:
            first = next(i for i, old in enumerate(kept) if old["step"] >= row["step"])
            discarded.append(kept[max(0, first - 1) :])
            del kept[first:]
        if kept and row["step"] == kept[-1]["step"]:
            kept[-1] |= row
        elif len(row) > 1:
            kept.append(row)
    return kept, discarded


def number(value: Any) -> float | None:
    """A JSON number, or a string that stands for NaN or an infinity; None for everything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and value.strip().lower() in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return float(value)
    return None


def read_events(file: Path, notes: list[str]) -> Iterator[Event]:
    """The guard's events, in the order in which they happened; nothing if there is no file."""
    if not file.is_file():
        return
    for record in json_lines(file, notes):
        step = number(record.get("step"))
        if step is None or not math.isfinite(step):
            continue
        actions = record.get("actions") or []
        actions = actions if isinstance(actions, list) else [actions]
        value = number(record.get("value"))
        yield Event(
            int(step),
            str(record.get("rule", "")),
            str(record.get("metric") or ""),
            f"{value:.4g}" if value is not None else str(record.get("value") or ""),
            str(record.get("condition") or ""),
            ", ".join(_action(action) for action in actions),
            str(record.get("message") or ""),
        )


def _action(action: Any) -> str:
    """One action as words: `{"scale": key, "from": x, "to": y}`, `{"rollback": "stable"}`, `{"warn": true}`, …"""
    if not isinstance(action, dict):
        return str(action)
    key = action.get("scale", action.get("set"))
    if key is not None and {"from", "to"} <= action.keys():
        return f"{key} {_short(action['from'])} → {_short(action['to'])}"
    if "rollback" in action:
        again = " (same data)" if action.get("skip_data") is False else ""
        return f"back to the {action['rollback']} checkpoint{again}"
    if "outside" in action:
        return f"{action['outside']} = {_short(action.get('value'))} is out of range"
    if "inside" in action:
        return f"{action['inside']} is in range"
    return ", ".join(k.replace("_", " ") if v is True else f"{k}: {_short(v)}" for k, v in action.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in force at the end: `config.yaml`, else the newest checkpoint's, else TensorBoard's."""
    import yaml

    try:
        if (folder / "config.yaml").is_file():
            return _mapping(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        for state in sorted(folder.glob("checkpoints/iter_*/state.json"), reverse=True):
            config = _mapping(json.loads(state.read_text(encoding="utf-8")).get("config"))
            if config:
                return config
        for file in sorted(folder.glob("tensorboard/events.out.tfevents.*"), reverse=True):
            config = _mapping(yaml.safe_load(_tensorboard_text(file)))
            if config:
                return config
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        pass  # a report without its configuration is still a report; the caller notes it
    return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tensorboard_text(file: Path) -> str:
    """The text `config` of an event file, which the sink writes before everything else."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        for _, event in zip(range(20), EventFileLoader(str(file)).Load(), strict=False):
            for value in event.summary.value:
                if value.tag.startswith("config/"):
                    return value.tensor.string_val[0].decode("utf-8")
    except Exception:  # tensorboard's own errors; the file may be damaged or of another version
        pass
    return ""


def hide_secrets(tree: Any) -> Any:
    """The tree with the values of keys such as `api_key` replaced: reports are handed on."""
    if isinstance(tree, dict):
        return {k: "(hidden)" if v and _SECRET.search(str(k)) else hide_secrets(v) for k, v in tree.items()}
    return [hide_secrets(item) for item in tree] if isinstance(tree, list) else tree


def _start(run: Run) -> tuple[float | None, bool]:
    """When the run began: its first event file carries the time in its name; else end minus the seconds it logged."""
    stamps = []
    for file in run.folder.glob("tensorboard/events.out.tfevents.*"):
        found = re.match(r"events\.out\.tfevents\.(\d{9,11})\.", file.name)
        stamps += [float(found[1])] if found else []
    if stamps and min(stamps) <= run.ended:
        return min(stamps), False
    names = [f"timing_s/{phase}" for phase in ("step", "testing", "save_checkpoint")]
    logged = [run.curves[name].finite().sum() for name in names if name in run.curves]
    return (run.ended - float(sum(logged)), True) if logged else (None, False)
