"""The guard: rules over the metrics of every iteration, and what they do when one fires.

`Guard` is a state machine without torch, files or collectives. Given the same metrics it decides the same on every
rank; carrying out what an event says is the loop's work. docs/guard.md explains the rules.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from megappo.config.schema import ExperimentConfig, GuardActionConfig, GuardRuleConfig
from megappo.config.schema.guard import ScaleConfig, span_iterations
from megappo.config.schema.guard_presets import preset_rules
from megappo.trainer.effective import Adjustment, value_in_force

Metrics = Mapping[str, float]
_FACTORS = (0.01, 100.0)  # all scalings of a key together
_TRENDS = ("rising", "falling", "not_rising")


@dataclass(frozen=True)
class Event:
    """A rule has fired. `actions` are what was decided, e.g. `{"scale": "actor.optim.lr", "from": …, "to": …}`."""

    step: int
    rule: str
    metric: str
    value: float
    condition: str
    actions: tuple[dict[str, Any], ...]
    message: str = ""

    def record(self) -> dict[str, Any]:
        """One line of events.jsonl; NaN and infinity as strings, as in metrics.jsonl."""
        out = asdict(self)
        out["actions"] = list(self.actions)
        out["value"] = self.value if math.isfinite(self.value) else str(self.value)
        return out

    def told(self) -> str:
        """The actions as words."""
        return ", ".join(_told(action) for action in self.actions)

    def __str__(self) -> str:
        message = f" ({self.message})" if self.message else ""
        return f"guard {self.rule}: {self.metric} = {self.value:.4g}, {self.condition}{message}: {self.told()}"


@dataclass(frozen=True)
class Verdict:
    """What the loop has to do after an iteration, all events taken together.

    A rollback brings the optimizer's state with it, so `restore_optimizer` is False beside one.
    """

    rollback: Literal["stable", "latest"] | None = None
    skip_data: bool = True
    restore_optimizer: bool = False
    on_policy: bool = False
    stop: bool = False
    warn: bool = False

    @classmethod
    def of(cls, events: Iterable[Event]) -> Verdict:
        """The older target and the more cautious choice win: stable over latest, skipping data over using it again."""
        actions = [action for event in events for action in event.actions]
        back = [action for action in actions if "rollback" in action]
        target = None
        if back:
            target = "stable" if any(action["rollback"] == "stable" for action in back) else "latest"
        return cls(
            rollback=target,
            skip_data=any(action["skip_data"] for action in back) or not back,
            restore_optimizer=target is None and any("restore_optimizer" in action for action in actions),
            on_policy=any("on_policy" in action for action in actions),
            stop=any("stop" in action for action in actions),
            warn=any("warn" in action or "stop" in action for action in actions),
        )


@dataclass
class _RuleState:
    """`streak`: times in a row that the condition held; `history`: recent values by metric, for trends."""

    streak: int = 0
    fired: int | None = None
    history: dict[str, list[float]] = field(default_factory=dict)


class Guard:
    """The rules of one run and their state.

    Args:
        config: the run's configuration as written, resolved; never changed.

    Attributes:
        adjustments: what it did to keys so far, by dotted key: see `effective_config`.
        rollbacks: how often it went back.
        on_policy: recorded rollouts are to be left for good.
    """

    def __init__(self, config: ExperimentConfig):
        self.config = config
        self.settings = config.guard
        self.rules = [rule for rule in config.guard.rules if rule.enabled]
        self.adjustments: dict[str, Adjustment] = {}
        self.rollbacks = 0
        self.on_policy = False
        self._states = {rule.name: _RuleState() for rule in self.rules}
        self._healthy_streak = 0
        self._report: dict[str, float] = {}

    @property
    def active(self) -> bool:
        """Is there anything to watch?"""
        return self.settings.active

    @property
    def rolls_back(self) -> bool:
        """Can a rule ask for a checkpoint? Then the run's starting point must be one, and stable."""
        return any(rule.does("rollback", "restore_optimizer") for rule in self.rules)

    # -------------------------------------------------------------- each iteration
    def vetoes(self, metrics: Metrics, iteration: int, total: int) -> list[str]:
        """Rules that forbid the update of iteration `iteration` (1-based), given what is known before it.

        Changes nothing: `check` on the full metrics follows.
        """
        out = []
        for rule in self.rules:
            state = self._states[rule.name]
            if rule.does("skip_update") and _in_time(rule, iteration, total) and self._hits(rule, metrics):
                enough = state.streak + 1 >= _patience(rule, total)
                if enough and _rested(rule, state, iteration, total):
                    out.append(rule.name)
        return out

    def check(self, metrics: Metrics, iteration: int, total: int) -> list[Event]:
        """Take the metrics of the finished iteration `iteration` (1-based) of `total`; the rules that fire.

        Adjustments are in force from now on; for the rest see `Verdict.of`. A rollback makes all rules begin anew.
        """
        events: list[Event] = []
        healthy = True
        for rule in self.rules:
            state = self._states[rule.name]
            if not _in_time(rule, iteration, total):
                state.streak = 0
                continue
            seen, hits = self._observe(rule, metrics)
            if not seen:
                continue
            state.streak = state.streak + 1 if hits else 0
            healthy &= not (hits and rule.spoils_health)
            if hits and state.streak >= _patience(rule, total) and _rested(rule, state, iteration, total):
                state.streak, state.fired, state.history = 0, iteration, {}
                events.append(self._fire(rule, hits, metrics, iteration, total))
        events = self._bound_rollbacks(events)
        self._healthy_streak = self._healthy_streak + 1 if healthy else 0
        if Verdict.of(events).rollback:
            self._begin_anew()
        self._report = self._measure(metrics, healthy, events, iteration, total)
        return events

    def metrics(self) -> dict[str, float]:
        """`guard/…` of the last check; empty for a guard without rules."""
        return dict(self._report)

    def promotable(self, checkpoints: Iterable[int], iteration: int) -> int | None:
        """The newest checkpoint (number of finished iterations) since which enough healthy iterations followed.

        What an update broke shows in the next iterations' metrics, so health counts after a checkpoint.
        """
        ages = {c: iteration - c for c in checkpoints}
        good = [c for c, age in ages.items() if self.settings.stable_after <= age <= self._healthy_streak]
        return max(good, default=None)

    def unwatched(self, logged: Collection[str]) -> list[str]:
        """One line for each rule whose metric is not among the names logged so far; for after the first iteration.

        Rules over `val/…` are left out, for validation comes later; a preset's rules share one line.
        """
        own = {rule.name for rule in preset_rules(self.settings.preset)}
        lines: list[str] = []
        missing: dict[str, list[str]] = {}
        for rule in self.rules:
            name = rule.metric or ""
            if name.startswith("val") or any(_matches(rule, metric) for metric in logged):
                continue
            if rule.name in own:
                missing.setdefault(name, []).append(rule.name)
                continue
            close = difflib.get_close_matches(name, sorted(logged), n=3, cutoff=0.5)
            nearest = f"nearest: {', '.join(close)}" if close else "see metrics.jsonl for the names"
            lines.append(f"guard rule {rule.name} watches {name}, which is not logged; {nearest}")
        if missing:
            told = "; ".join(f"{name} ({', '.join(rules)})" for name, rules in missing.items())
            lines.append(f"guard preset {self.settings.preset}: not logged in this run, so not watched: {told}")
        return lines

    # -------------------------------------------------------------- conditions
    def _observe(self, rule: GuardRuleConfig, metrics: Metrics) -> tuple[bool, list[tuple[str, float]]]:
        """Was there anything to look at, and the metrics for which the condition holds. Keeps trends' histories."""
        hits = self._hits(rule, metrics)
        kind = _condition(rule)[0]
        values = [metrics[name] for name in sorted(metrics) if _matches(rule, name)]
        if kind == "non_finite":
            return bool(values), hits
        finite = {n: metrics[n] for n in metrics if _matches(rule, n) and math.isfinite(metrics[n])}
        if kind not in _TRENDS:
            # NaN says nothing about a threshold: it neither continues nor ends a streak.
            return any(not math.isnan(value) for value in values), hits
        history = self._states[rule.name].history
        for name, value in finite.items():
            history[name] = [*history.get(name, []), float(value)][-rule.window :]
        return any(len(history[name]) == rule.window for name in finite), hits

    def _hits(self, rule: GuardRuleConfig, metrics: Metrics) -> list[tuple[str, float]]:
        """(metric, value compared) where the condition holds now, in order of names."""
        kind, threshold = _condition(rule)
        out = []
        for name in sorted(n for n in metrics if _matches(rule, n)):
            value = float(metrics[name])
            if kind in _TRENDS:
                value = self._trend(rule, name, value)
            if _holds(kind, value, threshold):
                out.append((name, value))
        return out

    def _trend(self, rule: GuardRuleConfig, name: str, value: float) -> float:
        """Fitted change over the window that ends with `value`; NaN while the window is not full."""
        past = self._states[rule.name].history.get(name, [])
        window = [*past, value][-rule.window :]
        if len(window) < rule.window or not math.isfinite(value):
            return math.nan
        return fitted_change(window)

    # -------------------------------------------------------------- actions
    def _fire(
        self, rule: GuardRuleConfig, hits: list[tuple[str, float]], metrics: Metrics, iteration: int, total: int
    ) -> Event:
        metric, value = hits[0]
        if len(hits) > 1:
            metric += f" (and {len(hits) - 1} more)"
        actions: list[dict[str, Any]] = []
        for action in rule.actions:
            for kind in action.kinds():
                actions += self._act(kind, action, metrics, iteration, total)
        return Event(iteration, rule.name, metric, value, _told_condition(rule), tuple(actions), rule.message or "")

    def _act(
        self, kind: str, action: GuardActionConfig, metrics: Metrics, iteration: int, total: int
    ) -> list[dict[str, Any]]:
        if kind == "scale":
            assert action.scale is not None
            return [self._scale(action.scale, iteration, total)]
        if kind == "set":
            assert action.set is not None
            before = self._value(action.set.key, iteration, total)
            self.adjustments[action.set.key] = Adjustment(value=action.set.to)
            return [{"set": action.set.key, "from": before, "to": action.set.to}]
        if kind == "check":
            assert action.check is not None
            wanted = action.check
            found = {n: v for n, v in sorted(metrics.items()) if fnmatchcase(n, wanted.metric)}
            bad = {n: v for n, v in found.items() if not wanted.low <= v <= wanted.high}
            return [{"outside": n, "value": _plain(v)} for n, v in bad.items()] or [{"inside": wanted.metric}]
        if kind == "rollback":
            return [{"rollback": action.rollback, "skip_data": action.skip_data}]
        if kind == "on_policy":
            self.on_policy = True
        return [{kind: True}]

    def _scale(self, scale: ScaleConfig, iteration: int, total: int) -> dict[str, Any]:
        """Multiply, within the bounds; a value that is beyond a bound already stays where it is."""
        before = self._value(scale.key, iteration, total)
        if before is None or before <= 0:
            return {"scale": scale.key, "from": before, "to": before}
        after = before * scale.by
        if scale.by < 1 and scale.min is not None:
            after = max(after, min(scale.min, before))
        if scale.by > 1 and scale.max is not None:
            after = min(after, max(scale.max, before))
        old = self.adjustments.get(scale.key, Adjustment())
        factor = min(max(old.factor * (after / before), _FACTORS[0]), _FACTORS[1])
        self.adjustments[scale.key] = replace(old, factor=factor)
        return {"scale": scale.key, "from": before, "to": self._value(scale.key, iteration, total)}

    def _value(self, key: str, iteration: int, total: int) -> Any:
        """The value in force in the iteration to come (the last one's, after the last)."""
        return value_in_force(self.config, key, min(iteration, total - 1), total, self.adjustments)

    def _bound_rollbacks(self, events: list[Event]) -> list[Event]:
        """Count the rollback, of which there is one however many rules want it; past the limit it becomes a stop."""
        if Verdict.of(events).rollback is None:
            return events
        if self.rollbacks < self.settings.max_rollbacks:
            self.rollbacks += 1
            return events
        said = f"guard.max_rollbacks ({self.settings.max_rollbacks}) reached: stop instead of rollback"
        return [
            replace(
                event,
                actions=tuple({"stop": True} if "rollback" in action else action for action in event.actions),
                message="; ".join(part for part in (event.message, said) if part),
            )
            if any("rollback" in action for action in event.actions)
            else event
            for event in events
        ]

    def _begin_anew(self) -> None:
        """What was seen of the discarded weights says nothing about the restored ones."""
        self._healthy_streak = 0
        for state in self._states.values():
            state.streak, state.history = 0, {}

    def _measure(
        self, metrics: Metrics, healthy: bool, events: list[Event], iteration: int, total: int
    ) -> dict[str, float]:
        if not self.active:
            return {}
        out = {
            "guard/healthy": float(healthy),
            "guard/events": float(len(events)),
            "guard/rollbacks": float(self.rollbacks),
        }
        band = self.settings.kl_band
        kl = metrics.get(band.metric, math.nan) if band is not None else math.nan
        if band is not None and not math.isnan(kl):
            out["guard/kl_band"] = float(kl > band.high) - float(kl < band.low)
        return out

    # -------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as JSON."""
        return {
            "rules": {name: asdict(state) for name, state in self._states.items()},
            "adjustments": {key: asdict(adjustment) for key, adjustment in self.adjustments.items()},
            "rollbacks": self.rollbacks,
            "on_policy": self.on_policy,
            "healthy_streak": self._healthy_streak,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. New rules begin anew, the state of rules that are gone is dropped."""
        for name, saved in state["rules"].items():
            if name in self._states:
                self._states[name] = _RuleState(**saved)
        self.adjustments = {key: Adjustment(**saved) for key, saved in state["adjustments"].items()}
        self.rollbacks, self.on_policy = int(state["rollbacks"]), bool(state["on_policy"])
        self._healthy_streak = int(state["healthy_streak"])


def replay(config: ExperimentConfig, rows: Iterable[Mapping[str, Any]], total: int) -> list[Event]:
    """What the rules would have said to the rows of a metrics.jsonl (`step` 1-based), actions not carried out."""
    guard = Guard(config)
    out: list[Event] = []
    for row in rows:
        step = int(row["step"])
        metrics = {name: number for name, value in row.items() if (number := _number(value)) is not None}
        if step > 0:
            out += guard.check(metrics, step, total)
    return out


def fitted_change(values: list[float]) -> float:
    """Slope of the least-squares line through equally spaced values, times their span: the change that it shows."""
    n = len(values)
    centre = (n - 1) / 2
    mean = math.fsum(values) / n
    slope = math.fsum((i - centre) * (v - mean) for i, v in enumerate(values)) / math.fsum(
        (i - centre) ** 2 for i in range(n)
    )
    return slope * (n - 1)


def _condition(rule: GuardRuleConfig) -> tuple[str, float]:
    (kind,) = rule.conditions()
    return kind, 0.0 if kind == "non_finite" else float(getattr(rule, kind))


def _holds(kind: str, value: float, threshold: float) -> bool:
    """NaN holds no condition but `non_finite`."""
    if kind == "non_finite":
        return not math.isfinite(value)
    if kind in ("above", "rising"):
        return value > threshold
    if kind == "falling":
        return value < -threshold
    return value <= threshold if kind == "not_rising" else value < threshold


def _matches(rule: GuardRuleConfig, name: str) -> bool:
    """The guard's own numbers are not watched by patterns."""
    wanted = rule.metric or ""
    return name == wanted or (not name.startswith("guard/") and fnmatchcase(name, wanted))


def _in_time(rule: GuardRuleConfig, iteration: int, total: int) -> bool:
    until = math.inf if rule.until is None else span_iterations(rule.until, total)
    return span_iterations(rule.after, total) < iteration <= until


def _rested(rule: GuardRuleConfig, state: _RuleState, iteration: int, total: int) -> bool:
    return state.fired is None or iteration - state.fired > span_iterations(rule.cooldown, total)


def _patience(rule: GuardRuleConfig, total: int) -> int:
    return max(1, span_iterations(rule.patience, total))


def _told_condition(rule: GuardRuleConfig) -> str:
    kind, threshold = _condition(rule)
    if kind == "non_finite":
        return "not finite"
    if kind in _TRENDS:
        words = {"rising": "rose by more than", "falling": "fell by more than", "not_rising": "rose by no more than"}
        return f"{words[kind]} {threshold:g} over {rule.window} iterations"
    return f"{kind} {threshold:g}"


def _told(action: Mapping[str, Any]) -> str:
    def number(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    for kind in ("scale", "set"):
        if kind in action:
            return f"{action[kind]} {number(action['from'])} -> {number(action['to'])}"
    if "rollback" in action:
        return f"back to the {action['rollback']} checkpoint"
    if "outside" in action:
        return f"{action['outside']} = {number(action['value'])} is out of range"
    if "inside" in action:
        return f"{action['inside']} is in range"
    return next(iter(action)).replace("_", " ")


def _plain(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))


def _number(value: Any) -> float | None:
    """A number of metrics.jsonl, where NaN and infinity are strings."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
