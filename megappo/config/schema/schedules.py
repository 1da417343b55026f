"""`schedules`: values of other keys that change during the run."""

import difflib
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from megappo.config.schema.base import FloatPair, Section, key

#: keys that the guard may scale or set: read anew in every iteration, and any positive factor leaves them valid
ADJUSTABLE: tuple[str, ...] = (
    "actor.optim.lr",
    "actor.optim.max_grad_norm",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.entropy_coeff",
    "actor.kl_loss_coef",
    "critic.optim.lr",
    "critic.optim.max_grad_norm",
    "critic.cliprange_value",
    "rollout.temperature",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_ctrl.target_kl",
)

#: keys that may have a schedule
SCHEDULABLE: tuple[str, ...] = (
    *ADJUSTABLE,
    "actor.sft_mix.coef",
    "actor.clip_ratio",
    "actor.clip_ratio_c",
    "actor.optim.weight_decay",
    "critic.optim.weight_decay",
    "algorithm.reward_shaping.overlong.penalty_factor",
    "algorithm.correction.clip_max",
    "data.train_batch_size",
)


class ScheduleConfig(Section):
    """The value is `start` while the delay lasts, goes to `end` along the shape, and stays there."""

    EXAMPLE: ClassVar[str] = "actor.entropy_coeff"  # as in schedules.actor.entropy_coeff.start

    start: float | None = key(None, "Value at the beginning; null: the key's own value.")
    end: float | None = key(None, "Value at the end; null: the key's own value.")
    steps: int | None = key(None, "Length of the way from start to end (iterations); null: see fraction.", ge=1)
    fraction: float | None = key(
        None, "The same as a share of all iterations, 0 to 1; null: until the last iteration.", gt=0, le=1
    )
    delay: int = key(0, "Iterations before it begins (iterations).", ge=0)
    delay_fraction: float | None = key(
        None, "The same as a share of all iterations, 0 to 1; null: see delay.", ge=0, le=1
    )
    shape: Literal["linear", "cosine", "exponential", "constant", "stages"] = key(
        "linear", "linear, cosine, exponential (equal ratios); constant: jump to end after the delay; or stages."
    )
    stages: list[FloatPair] = key(
        [], "For shape stages: [until, value] pairs, until a share of all iterations; the last until is 1."
    )

    @classmethod
    def wrong_name(cls, name: str) -> str | None:
        return not_in("cannot be scheduled", name, SCHEDULABLE)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        wrong = self._stages_problem() if self.shape == "stages" else self._ramp_problem()
        if wrong:
            raise ValueError(wrong)
        return self

    def _stages_problem(self) -> str | None:
        ramp = ("start", "end", "steps", "fraction", "delay_fraction")
        given = [name for name in ramp if getattr(self, name) is not None] + (["delay"] if self.delay else [])
        untils = [until for until, _ in self.stages]
        if given:
            return f"shape stages does not use {given[0]}; remove it"
        if not untils:
            return "shape stages needs stages, e.g. stages: [[0.2, 0.008], [1.0, 0.012]]"
        if untils != sorted(set(untils)) or untils[0] <= 0 or untils[-1] != 1:
            return f"the stages end at {', '.join(f'{u:g}' for u in untils)}: needs ascending shares, the last one 1.0"
        return None

    def _ramp_problem(self) -> str | None:
        if self.stages:
            return f"shape {self.shape} does not use stages; write shape: stages or remove them"
        if self.start is None and self.end is None:
            return "changes nothing; give start or end"
        if self.shape == "constant" and (self.steps is not None or self.fraction is not None):
            return "shape constant has no ramp; remove steps and fraction, or choose another shape"
        if self.steps is not None and self.fraction is not None:
            return "has steps and fraction; give only one of them"
        if self.delay and self.delay_fraction is not None:
            return "has delay and delay_fraction; give only one of them"
        return None


def not_in(what: str, name: str, allowed: tuple[str, ...]) -> str | None:
    """`what; did you mean …?`, or None if the name is allowed."""
    if name in allowed:
        return None
    same = [k for k in allowed if k.rpartition(".")[2] == str(name).rpartition(".")[2]]
    close = same or difflib.get_close_matches(str(name), allowed, n=1)
    if close:
        return f"{what}; did you mean {close[0]}?"
    return f"{what}; possible: {', '.join(allowed)}"
