"""`rewards`: a list; a response's score is the weighted sum."""

from typing import Any, Literal

from megappo.config.schema.base import Section, key


class RewardConfig(Section):
    """One reward function."""

    type: Literal["gsm8k", "reasoning_gym", "function"] = key(
        ..., "gsm8k: number after ####; reasoning_gym: the task's own scorer; function: your own (see path)."
    )
    path: str | None = key(
        None, "Your function, `package.module:function` or `path/to/file.py:function`, for type `function`."
    )
    weight: float = key(1.0, "Weight in the sum.")
    timeout_s: float = key(30.0, "Longest time for scoring one response before the run fails (seconds).", gt=0)
    kwargs: dict[str, Any] = key({}, "Keyword arguments passed to the function.")
