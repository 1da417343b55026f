"""`rewards`: a list; a response's score is the weighted sum."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from megappo.config.schema.base import FloatPair, Section, key, ordered
from megappo.config.schema.parallel import ParallelConfig


def _some(sources: list[str]) -> list[str]:
    if not sources:
        raise ValueError("an empty list applies to nothing; name data sources, or leave it out for all")
    return sources


def _metric_name(name: str) -> str:
    if not name or "/" in name or name.isspace():
        raise ValueError("names metrics (reward/<name>/mean); write a word without /")
    return name


class RewardConfig(Section):
    """One reward."""

    type: Literal["gsm8k", "math", "reasoning_gym", "function", "remote", "model", "recorded"] = key(
        ...,
        "gsm8k: number after ####; math: math-verify decides; reasoning_gym: the task's own scorer; function: your "
        "own (see path); remote: an HTTP server (see url); model: a reward model (see path); recorded: the scores in "
        "the offline data.",
    )
    name: Annotated[str, AfterValidator(_metric_name)] | None = key(
        None, "Name in metrics and errors; null: the type, or the function's name."
    )
    weight: float = key(1.0, "Weight in the sum.")
    sources: Annotated[list[str], AfterValidator(_some)] | None = key(
        None, "Patterns (* ? [ab]) of the data sources it applies to; null: all. Each sample needs a reward."
    )
    clip: Annotated[FloatPair, AfterValidator(ordered)] | None = key(
        None, "Its scores are clipped to [low, high], before standardising and weighting; null: not clipped."
    )
    standardize: bool = key(
        False, "Train on (score - mean) / std, with mean and std over all scores since the start of the run."
    )
    on_error: Literal["fail", "drop", "neutral"] = key(
        "fail",
        "If a response cannot be scored (exception, timeout, bad value, no answer): fail ends the run, drop does not "
        "train on it, neutral gives it neutral_score.",
    )
    neutral_score: float = key(0.0, "Score of responses that cannot be scored, for on_error neutral.")
    timeout_s: float = key(
        30.0, "Longest time for one response, for `remote` one attempt of a request (seconds).", gt=0
    )
    workers: int = key(1, "Processes per rank (function, math, reasoning_gym).", ge=1)
    kwargs: dict[str, Any] = key({}, "Keyword arguments of the function; options of gsm8k and math; sent by remote.")
    path: str | None = key(
        None,
        "For type `function`: yours, `package.module:function` or `path/to/file.py:function`; for type `model`: the "
        "reward model's folder.",
    )
    parallel: ParallelConfig | None = key(None, "Layout of the model over the ranks; null: actor.parallel (model).")
    micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward on a rank (samples); null: actor.log_prob_micro_batch_size_per_gpu (model).", ge=1
    )
    max_token_len_per_gpu: int | None = key(
        None,
        "Token budget of a forward on a rank, with actor.use_dynamic_bsz (tokens); null: "
        "actor.log_prob_max_token_len_per_gpu (model).",
        ge=1,
    )
    url: str | None = key(None, "Where batches of responses are posted, http(s)://…, for type `remote`.")
    token_env: str | None = key(None, "Environment variable whose value is sent as bearer token (remote).")
    batch_size: int = key(32, "Most responses in one request (remote).", ge=1)
    concurrency: int = key(4, "Most requests at a time per rank (remote).", ge=1)
    retries: int = key(
        3, "Further attempts after a connection error, a timeout or a 5xx answer; never after others (remote).", ge=0
    )
    backoff_s: float = key(
        0.5, "Wait before the first further attempt; doubles each time, with jitter (seconds).", ge=0
    )
    backoff_max_s: float = key(30.0, "Longest such wait (seconds).", ge=0)
    breaker_failures: int = key(
        5, "After so many failed requests in a row the server is left alone for a while (remote).", ge=1
    )
    breaker_pause_s: float = key(30.0, "How long, before one request probes it again (seconds).", ge=0)
