"""What a reward is: responses in, one finite number each out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from megappo.errors import UserError

SHOWN_CHARACTERS = 60  # of a response in an error message
#: A score counts as a success from here on: validation accuracy, the hacking watch, dynamic sampling.
SUCCESS_SCORE = 0.8


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One finished response. `ground_truth` and `extra_info` are what the data row says."""

    sample_id: int | str
    data_source: str
    prompt_text: str
    response_text: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        start = self.response_text[:SHOWN_CHARACTERS]
        dots = "…" if len(self.response_text) > SHOWN_CHARACTERS else ""
        return f"sample {self.sample_id} (data_source {self.data_source!r}, response {start!r}{dots})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sample: a finite score, or one line (naming reward and sample) that says why there is none.

    `timed_out`: its time was over, whether that is an error or gave it a score.
    """

    score: float = 0.0
    extras: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    timed_out: bool = False


@runtime_checkable
class Reward(Protocol):
    """Scores responses. `name` is unique within a run and names the component in metrics and errors.

    A reward that can tell its samples apart also has `outcomes(samples, fail_fast) -> list[Outcome]`, which raises
    UserError only where no single sample is at fault, or, with `fail_fast`, as soon as a sample fails.
    """

    name: str

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """One finite score a sample, in order. UserError names the sample that cannot be scored."""
        ...


def to_score(value: Any) -> tuple[float, dict[str, float]]:
    """(score, extra numbers) of what a reward function returned: a number, or a mapping with "score".

    Raises ValueError, worded for the user, for anything else and for NaN and infinity.
    """
    extras: dict[str, float] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"returned a mapping without 'score' (keys: {', '.join(map(str, value)) or 'none'})")
        for name, extra in value.items():
            if name != "score" and isinstance(extra, int | float) and math.isfinite(extra):
                extras[str(name)] = float(extra)
        value = value["score"]
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"returned {'None' if value is None else type(value).__name__}, not a number")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"returned {score}, not a finite number")
    return score, extras


def outcome_of(name: str, sample: RewardSample, value: Any) -> Outcome:
    """What a reward returned for a sample, checked."""
    try:
        return Outcome(*to_score(value))
    except Exception as error:  # a number too large for a float, a broken __float__
        return failed(name, sample, str(error))


def failed(name: str, sample: RewardSample, reason: str, *, timed_out: bool = False) -> Outcome:
    """No score; the error names the reward and the sample."""
    return Outcome(error=f"reward '{name}': {sample}: {one_line(reason)}", timed_out=timed_out)


def one_line(text: str) -> str:
    return " ".join(text.split())


def check_scores(name: str, samples: Sequence[RewardSample], scores: Sequence[float]) -> list[float]:
    """The scores as floats. UserError when one is not finite or their number is wrong."""
    if len(scores) != len(samples):
        raise UserError(f"reward '{name}': returned {len(scores)} scores for {len(samples)} samples")
    for sample, score in zip(samples, scores, strict=True):
        if not math.isfinite(score):
            raise UserError(f"reward '{name}': {sample}: returned {score}, not a finite number")
    return [float(score) for score in scores]
