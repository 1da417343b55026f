"""`rollout`: who generates the responses and how they are sampled."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megappo.config.schema.base import Dtype, Section, key, sub

_TOP_P = "Sample from the smallest set of tokens with this total probability, 0 to 1; 1: all."
_TOP_K = "Sample from this many most likely tokens (tokens); -1: all."


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 would leave no token to sample: write -1 for all")
    return value


TopK = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]


class ValRolloutConfig(Section):
    """Sampling during evaluation; truncation is harmless here."""

    temperature: float = key(0.0, "Sampling temperature; 0: greedy.", ge=0)
    n: int = key(1, "Responses per validation prompt (samples).", ge=1)
    top_p: float = key(1.0, _TOP_P, gt=0, le=1)
    top_k: TopK = key(-1, _TOP_K)
    sampled: bool = key(False, "Evaluate a second time, with the training's sampling; metrics end in `_sampled`.")


class RolloutConfig(Section):
    """Generation of the training samples."""

    engine: Literal["embedded", "recorded"] = key(
        "embedded",
        "embedded: generate in this process; recorded: the responses in data.train_files (see offline), or the "
        "rollouts in replay_dir.",
    )
    n: int = key(1, "Responses per prompt (samples); group estimators need at least 2.", ge=1)
    temperature: float = key(1.0, "Sampling temperature; also divides the actor's logits in training.", ge=0)
    top_p: float = key(1.0, _TOP_P, gt=0, le=1)
    top_k: TopK = key(-1, _TOP_K)
    stop: list[str] = key([], "Strings that end a response.")
    stop_token_ids: list[int] = key([], "Token ids that end a response, beside the model's own.")
    max_batch_tokens: int = key(
        65536, "Tokens in the embedded engine's key/value cache on a rank, prompts included (tokens).", ge=1
    )
    record_dir: str | None = key(None, "Folder to write each iteration's rollouts to; null: none.", path=True)
    replay_dir: str | None = key(
        None,
        "Folder with the rollouts of a run to replay with engine `recorded`; null: offline PPO on data.train_files.",
        path=True,
    )
    allow_truncated_sampling: bool = key(
        False, "Allow top_p < 1 or top_k > 0 in training although they bias the probability ratio."
    )
    dtype: Dtype | None = key(None, "Number format of the generating model; null: model.dtype.")
    val: ValRolloutConfig = sub(ValRolloutConfig, "Sampling during evaluation.")
