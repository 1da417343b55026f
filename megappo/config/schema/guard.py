"""`guard`: rules over logged metrics, and what to do when one fires."""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from megappo.config.schema.base import Section, key

CONDITIONS = ("above", "below", "rising", "falling", "not_rising", "non_finite")
_SPAN = "(iterations; below 1: a share of all iterations)"
_declare = key  # for sections with a field called key


def _span(value: float) -> float:
    if value >= 1 and not value.is_integer():
        raise ValueError("needs a whole number of iterations, or a share of the run below 1")
    return value


#: 0.1 is a tenth of the run, 10 are ten iterations
Span = Annotated[float, Field(ge=0), AfterValidator(_span)]


def span_iterations(span: float, total: int) -> int:
    """A `Span` in iterations of a run of `total`."""
    return int(span) if span >= 1 else round(span * total)


class ScaleConfig(Section):
    """Multiply a value, for the rest of the run."""

    key: str = _declare(..., "Key to scale, such as actor.optim.lr.")
    by: float = _declare(..., "Factor; the product of a key's factors stays within 0.01 to 100.", gt=0)
    min: float | None = _declare(None, "The value is not lowered below this; null: no bound.", ge=0)
    max: float | None = _declare(None, "The value is not raised above this; null: no bound.", ge=0)


class SetConfig(Section):
    """Replace a value, its schedule and earlier factors, for the rest of the run."""

    key: str = _declare(..., "Key to set, such as rollout.temperature.")
    to: float = _declare(..., "The new value.")


class CheckConfig(Section):
    """Look at other metrics when the rule fires; what is outside goes into the event."""

    metric: str = key(..., "Metric, or a pattern with * and ?.")
    low: float = key(..., "Smallest value that is in order.")
    high: float = key(..., "Largest value that is in order.")


class GuardActionConfig(Section):
    """One action: a name alone (`- stop`), or a name with its details (`- rollback: stable`)."""

    scale: ScaleConfig | None = key(None, "Multiply a value for the rest of the run.")
    set: SetConfig | None = key(None, "Replace a value for the rest of the run.")
    rollback: Literal["stable", "latest"] | None = key(
        None, "Go back to the last stable checkpoint, or to the newest one; the other actions apply after it."
    )
    skip_data: bool = key(True, "With rollback: go on behind the data that was used since; false: use it again.")
    restore_optimizer: bool = key(False, "Take the optimizers' moments from the newest checkpoint.")
    skip_update: bool = key(False, "No update in an iteration in which the condition holds before the update.")
    on_policy: bool = key(False, "Leave recorded rollouts for generated ones (embedded engine), for good.")
    check: CheckConfig | None = key(None, "Look at other metrics and report what is out of range.")
    warn: bool = key(False, "A line on the console, beside the event that every rule leaves.")
    stop: bool = key(False, "Save, and end the run with a report.")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        if not isinstance(data, str):
            return data
        flags = [name for name, info in cls.model_fields.items() if info.annotation is bool and name != "skip_data"]
        if data == "rollback":
            return {"rollback": "stable"}
        if data in flags:
            return {data: True}
        close = difflib.get_close_matches(data, [*flags, "rollback"], n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"`{data}` is no action by itself; possible: rollback, {', '.join(flags)}{guess}")

    @model_validator(mode="after")
    def _some_action(self) -> Self:
        if not self.kinds():
            raise ValueError("does nothing; name an action, e.g. warn")
        if not self.skip_data and self.rollback is None:
            raise ValueError("skip_data belongs to rollback; write it beside `rollback: stable`")
        return self

    def kinds(self) -> list[str]:
        """Names of the actions in this item."""
        return [name for name in type(self).model_fields if name != "skip_data" and getattr(self, name)]


class GuardRuleConfig(Section):
    """A metric, one condition, and actions. A preset's rule is changed by giving its name and what differs."""

    name: str = key(..., "Name in events; the name of a preset's rule changes that rule.")
    enabled: bool = key(True, "false: the rule is off.")
    metric: str | None = key(None, "Metric, or a pattern with * and ?: any that matches counts.")
    above: float | None = key(None, "Condition: the value is greater than this.")
    below: float | None = key(None, "Condition: the value is less than this.")
    rising: float | None = key(None, "Condition: over the window the value rose by more than this.")
    falling: float | None = key(None, "Condition: over the window the value fell by more than this.")
    not_rising: float | None = key(None, "Condition: over the window the value rose by no more than this.")
    non_finite: bool = key(False, "Condition: the value is NaN or infinite.")
    window: int = key(10, "Values that a trend is fitted to (iterations).", ge=2)
    patience: Span = key(1, f"The condition must hold so many times in a row {_SPAN}.")
    cooldown: Span = key(0, f"Rest after firing {_SPAN}.")
    after: Span = key(0, f"Not before this much of the run is over {_SPAN}.")
    until: Span | None = key(None, f"Not later than this {_SPAN}; null: to the end.")
    unhealthy: bool | None = key(
        None, "An iteration in which the condition holds is not healthy; null: if it skips, rolls back or stops."
    )
    message: str | None = key(None, "What it means, for the event and the report.")
    actions: list[GuardActionConfig] = key([], "What to do when it fires, in this order.")

    def conditions(self) -> list[str]:
        """Names of the conditions that are given."""
        return [name for name in CONDITIONS if getattr(self, name) is not None and getattr(self, name) is not False]

    def does(self, *kinds: str) -> bool:
        """Is one of these actions among the rule's?"""
        return any(kind in kinds for action in self.actions for kind in action.kinds())

    @property
    def spoils_health(self) -> bool:
        """Does an iteration in which the condition holds count as not healthy?"""
        return self.unhealthy if self.unhealthy is not None else self.does("skip_update", "rollback", "stop")


class KlBandConfig(Section):
    """Range in which the KL to the reference should be; reported as guard/kl_band: -1 below, 0 inside, 1 above."""

    metric: str = key("actor/reward_kl_penalty", "Metric with the mean KL.")
    low: float = key(..., "Lower end of the range (nats per token).")
    high: float = key(..., "Upper end of the range (nats per token).")


class GuardConfig(Section):
    """Watches the metrics of every iteration. Presets: docs/guard.md."""

    preset: Literal["none", "conservative", "loose"] = key("none", "Rules to begin with.")
    rules: list[GuardRuleConfig] = key([], "More rules, and changes to the preset's rules by name.")
    kl_band: KlBandConfig | None = key(None, "Range in which the KL should be; null: the preset's, if any.")
    stable_after: int = key(5, "A checkpoint is stable after so many healthy iterations (iterations).", ge=1)
    max_rollbacks: int = key(3, "Rollbacks in a run; instead of one more the run stops (rollbacks).", ge=0)

    @property
    def active(self) -> bool:
        """Is there anything to watch?"""
        return self.kl_band is not None or any(rule.enabled for rule in self.rules)

    def expanded(self, more: Sequence[GuardRuleConfig] = ()) -> Self:
        """A copy with the preset's rules and `more` written out, the file's own ones first. Idempotent."""
        from megappo.config.schema.guard_presets import KL_BANDS, preset_rules

        left = {rule.name: rule for rule in (*preset_rules(self.preset), *more)}
        rules = [_merge(left.pop(rule.name, None), rule) for rule in self.rules]
        band = self.kl_band or KL_BANDS.get(self.preset)
        return self.model_copy(update={"rules": [*rules, *left.values()], "kl_band": band}, deep=True)


def drift_rule(max_drift: float) -> GuardRuleConfig:
    """The rule behind offline.max_drift; a rule of the file with its name changes it, as it does with a preset's."""
    return GuardRuleConfig(
        name="off_policy_drift",
        metric="rollout_corr/k3_kl",
        above=max_drift,
        actions=[GuardActionConfig(on_policy=True), GuardActionConfig(warn=True)],
        message="the policy has left the recorded data behind",
    )


def _merge(base: GuardRuleConfig | None, change: GuardRuleConfig) -> GuardRuleConfig:
    """The preset's rule with what `change` gives; a condition replaces the preset's."""
    if base is None:
        return change
    given = {name: getattr(change, name) for name in change.model_fields_set if getattr(change, name) is not None}
    if change.conditions():
        given = dict.fromkeys(CONDITIONS) | {"non_finite": False} | given
    return base.model_copy(update=given, deep=True)
