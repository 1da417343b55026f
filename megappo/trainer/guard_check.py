"""The guard's rules over the metrics of a run that is over: what would have fired, and what did. Imports no torch."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.load import read_config
from megappo.config.schema import ExperimentConfig
from megappo.config.schema.guard import GuardConfig
from megappo.config.yaml_io import dump_yaml
from megappo.errors import UserError
from megappo.observe.report import runs
from megappo.trainer.guard import Event, Guard, replay

Fired = tuple[int, str]  # step, rule


@dataclass(frozen=True)
class GuardCheck:
    """What a replay found.

    Attributes:
        total: iterations of the run, which shares in the rules refer to.
        events: what the rules would have said.
        really: step and rule of every line of events.jsonl; None if there is no file.
        notes: about the files, and rules whose metric was not logged.
    """

    total: int
    events: list[Event]
    really: list[Fired] | None
    notes: list[str]

    def fired(self, event: Event) -> bool | None:
        """Did the event happen in the run? None: unknown."""
        return None if self.really is None else (event.step, event.rule) in self.really

    @property
    def missing(self) -> list[Fired]:
        """What fired in the run and not here."""
        found = {(event.step, event.rule) for event in self.events}
        return [fired for fired in self.really or [] if fired not in found]

    def counts(self) -> dict[str, dict[str, int]]:
        """By rule: how often it would have fired, and did (if known)."""
        would = Counter(event.rule for event in self.events)
        did = Counter(rule for _, rule in self.really or [])
        out = {rule: {"would_fire": would[rule]} for rule in dict.fromkeys([*would, *did])}
        for rule in out if self.really is not None else ():
            out[rule]["fired"] = did[rule]
        return out

    def record(self) -> dict[str, Any]:
        """Everything as JSON."""
        events = [event.record() | {"text": str(event), "fired": self.fired(event)} for event in self.events]
        missing = [{"step": step, "rule": rule} for step, rule in self.missing]
        return {
            "total": self.total,
            "events": events,
            "rules": self.counts(),
            "only_in_the_run": missing,
            "notes": self.notes,
        }


def check_run(
    folder: Path,
    config_file: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
) -> GuardCheck:
    """Replay the rules of a configuration over the metrics of the run in `folder`.

    The metrics stay what they were: what an action would have changed is not simulated, so later events are those of
    the same run without it.

    Args:
        config_file: whose rules to take; None: the run's own (`config.yaml`, else its newest checkpoint's).
        overrides: changes to it, `key=value`.
        preset: take this preset's rules in place of all others.

    Raises:
        UserError: no metrics, no configuration, a wrong one, or one without rules.
    """
    notes: list[str] = []
    rows, _ = runs.metric_rows(folder, notes)
    config = _configuration(folder, config_file, overrides, preset)
    if preset is not None:
        config.guard = GuardConfig(
            preset=preset, stable_after=config.guard.stable_after, max_rollbacks=config.guard.max_rollbacks
        ).expanded()
    guard = Guard(config)
    if not guard.rules:
        raise UserError(f"{config_file or folder}: guard has no rules: give --preset, --config, or guard.preset=...")
    last = max(int(row["step"]) for row in rows)
    total = max(last, config.trainer.total_iterations or last)
    events = replay(config, rows, total)
    notes += guard.unwatched({name for row in rows for name in row})
    file = folder / "events.jsonl"
    really = [(event.step, event.rule) for event in runs.read_events(file, notes)] if file.is_file() else None
    return GuardCheck(total, events, really, notes)


def _configuration(
    folder: Path, config_file: Path | None, overrides: Sequence[str], preset: str | None
) -> ExperimentConfig:
    file = config_file or folder / "config.yaml"
    if config_file is not None or file.is_file():
        return read_config(file, overrides)[0]
    tree = runs.read_config(folder)  # a run of an earlier version: its checkpoint knows
    if not tree and preset is not None:
        tree = {"model": {"path": "unknown"}}  # the values that actions would change are then the defaults
    if not tree:
        raise UserError(f"{folder} has no config.yaml: give the run's configuration with --config, or a --preset")
    with tempfile.TemporaryDirectory() as there:
        copy = Path(there) / "config.yaml"
        copy.write_text(dump_yaml(tree), encoding="utf-8")
        return read_config(copy, overrides)[0]
