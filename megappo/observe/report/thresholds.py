"""The thresholds that charts show: those of the runs' guard, or of the conservative preset where it is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from megappo.observe.report.runs import Run

if TYPE_CHECKING:
    from megappo.config.schema.guard import GuardConfig

Level = Literal["good", "warn", "bad"]


@dataclass(frozen=True)
class Limit:
    """A threshold: a horizontal line. `bad`: the guard does more than to warn."""

    value: float
    label: str
    level: Level = "warn"


@dataclass(frozen=True)
class Zone:
    """A healthy range."""

    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Thresholds:
    """What the guard compares metrics with; `note` says whose guard it is."""

    guard: GuardConfig
    note: str

    def zones(self, metrics: Sequence[str]) -> tuple[Zone, ...]:
        """Healthy ranges of these metrics."""
        band = self.guard.kl_band
        if band is None or band.metric not in metrics:
            return ()
        return (Zone(band.low, band.high, f"healthy {band.low:g} to {band.high:g}"),)

    def limits(self, metrics: Sequence[str]) -> tuple[Limit, ...]:
        """Limits of these metrics, one a value; the edges of a healthy range need no line."""
        taken = {edge for zone in self.zones(metrics) for edge in (zone.low, zone.high)}
        limits = []
        for rule in self.guard.rules:
            value = rule.above if rule.above is not None else rule.below
            if not rule.enabled or value is None or not any(fnmatchcase(name, rule.metric or "") for name in metrics):
                continue
            if value not in taken:
                taken.add(value)
                acts = any(kind not in ("warn", "check") for action in rule.actions for kind in action.kinds())
                name = rule.name.replace("_", " ").replace("kl ", "KL ")
                limits.append(Limit(value, f"{name} {value:g}", "bad" if acts else "warn"))
        return tuple(limits)


def thresholds_of(runs: Sequence[Run]) -> Thresholds:
    """The guard of the first run that has one."""
    from megappo.config.schema.guard import GuardConfig

    guards = [(run.name, _guard(run)) for run in runs]
    active = [(name, guard) for name, guard in guards if guard is not None and guard.active]
    if not active:
        default = GuardConfig(preset="conservative").expanded()
        return Thresholds(
            default, "Thresholds: the guard's conservative preset; the guard is not on in the configuration."
        )
    name, guard = active[0]
    kind = f"preset {guard.preset}" if guard.preset != "none" else "its own rules"
    others = any(other is None or other != guard for _, other in guards)
    rest = f"; other runs differ from {name}" if others else ""
    return Thresholds(guard, f"Thresholds: the guard of the configuration, {kind}{rest}.")


def _guard(run: Run) -> GuardConfig | None:
    """The run's guard with its preset written out; None where the configuration has none that this version reads."""
    from pydantic import ValidationError

    from megappo.config.schema.guard import GuardConfig

    try:
        return GuardConfig.model_validate(run.config.get("guard") or {}).expanded()
    except ValidationError:
        return None
