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


class SGLangConfig(Section):
    """The servers of engine `sglang`: how they are started, asked, kept alive and given weights."""

    num_servers: int = key(1, "Servers to start on this machine (servers); with rollout.servers: none.", ge=1)
    tp: int = key(1, "Tensor parallelism of a started server (devices).", ge=1)
    first_gpu: int = key(0, "First device of the started servers, which take num_servers x tp in a row (index).", ge=0)
    mem_fraction_static: float | None = key(
        None, "Share of a device's memory for weights and key/value cache, 0 to 1; null: SGLang decides.", gt=0, lt=1
    )
    launch: list[str] | None = key(
        None, "Command that starts a server, its options are appended; null: this Python's own sglang."
    )
    extra_args: list[str] = key([], "More options for the started servers, as on SGLang's command line.")
    deterministic: bool = key(
        False, "Start servers with deterministic inference: responses then follow from seeds (slower)."
    )
    max_concurrency: int = key(256, "Requests under way at a server at a time (samples).", ge=1)
    timeout_s: float = key(1200.0, "Longest wait for one response (seconds).", gt=0)
    retries: int = key(4, "Further attempts at a server after 5xx, broken connection or bad answer.", ge=0)
    start_timeout_s: float = key(900.0, "Longest wait for a started server to become healthy (seconds).", gt=0)
    down_timeout_s: float = key(120.0, "Longest wait for a given server that is away (seconds).", gt=0)
    restarts: int = key(3, "Restarts of a server that died, within an iteration (restarts).", ge=0)
    health_interval_s: float = key(10.0, "Time between health checks while generating (seconds).", gt=0)
    health_timeout_s: float = key(60.0, "A server that does not pass its check for so long is dead (seconds).", gt=0)
    weight_sync: Literal["auto", "tensor", "shards", "distributed", "disk"] = key(
        "auto",
        "How weights reach the servers. tensor: in requests, by value; shards: the same, cut for each server rank; "
        "distributed: NCCL broadcast (gloo without GPUs); disk: through a folder that all see; auto: tensor for "
        "models below 1 GB, otherwise disk.",
    )
    sync_host: str | None = key(
        None, "This machine's address as the servers see it, for weight_sync distributed; null: found out."
    )
    sync_timeout_s: float = key(600.0, "Longest wait for one step of a weight update (seconds).", gt=0)
    sync_dir: str | None = key(None, "Folder for weight_sync disk; null: in trainer.output_dir.", path=True)
    bucket_mb: int = key(256, "Weights in one request of weight_sync tensor, shards or distributed (MB).", ge=1)


class RolloutConfig(Section):
    """Generation of the training samples."""

    engine: Literal["embedded", "sglang", "recorded"] = key(
        "embedded",
        "embedded: generate in this process; sglang: SGLang servers do; recorded: the responses in data.train_files "
        "(see offline), or the rollouts in replay_dir.",
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
    servers: list[str] = key([], "URLs of running SGLang servers for engine `sglang`; []: start them here.")
    sglang: SGLangConfig = sub(SGLangConfig, "The servers of engine `sglang`.")
    val: ValRolloutConfig = sub(ValRolloutConfig, "Sampling during evaluation.")
