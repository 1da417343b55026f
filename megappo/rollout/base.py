"""What every generation engine takes and returns: token ids in, token ids out, never text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from megappo.errors import UserError

FinishReason = Literal["stop", "length", "abort"]


class RolloutLost(UserError):
    """No engine is left that could generate. The run's own state is whole: it can be saved."""


NO_WEIGHTS = -1
"""`weight_version` of an engine that holds no usable weights."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response to produce.

    `prompt_ids` are the exact ids the response continues (at least one). `seed` (any integer) alone decides
    the random numbers of the response, so the caller gives every sample its own: samples of one group that
    share a seed are copies of each other.
    """

    sample_id: int
    group_id: int
    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens; shared by all requests of a `generate` call.

    `temperature` 0 is greedy. `top_p` 1 and `top_k` -1 are off; where both are on, top-k applies first.
    Generation of a sample ends after a token of `stop_token_ids`, or after the token that completes one of
    `stop_strings` in the decoded response; that token is part of the response.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: give a number >= 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: give a number in (0, 1] (1 is off)")
        if self.top_k != -1 and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: give a number >= 1, or -1 for off")
        if "" in self.stop_strings:
            raise UserError("stop strings contain an empty string: remove it")

    @property
    def truncated(self) -> bool:
        """True where tokens are drawn from a truncated distribution, which biases the ratio of PPO."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k != -1)


@dataclass(slots=True)
class GeneratedSample:
    """One finished response.

    `logprobs[t]` speaks about `response_ids[t]` (the stop token included) under the full, temperature-scaled
    distribution of the engine; see `sampling.sample_tokens`. `finish_reason`: "stop" (stop token or string),
    "length" (`max_new_tokens` reached: the response is cut), "abort" (given up by the engine: untrainable).
    `loss_mask[t]`: the policy wrote the token, so it is trained on; None: it wrote all of them.
    """

    sample_id: int
    group_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    loss_mask: list[bool] | None = None


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One weight update: wall seconds, bytes written into the engine, transfers, resulting version."""

    seconds: float
    bytes: int
    buckets: int
    version: int


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`ok`: a `generate` call would be served now; otherwise `detail` says why not, in one line."""

    ok: bool
    detail: str
    weight_version: int


class RolloutEngine(Protocol):
    """A generation engine as one rank sees it: it serves the requests given to it, in their order."""

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GeneratedSample]:
        """One sample a request, in the order of the requests."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Replace all weights by full (unsharded) tensors under their Hugging Face names."""
        ...

    def sleep(self) -> None:
        """Free device memory between generation phases. Idempotent."""
        ...

    def wake(self) -> None:
        """Undo `sleep`. Idempotent."""
        ...

    def health(self) -> EngineHealth:
        """Cheap; callable at any time."""
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers of the engine's own since the last call, for the logs; rank 0's count."""
        ...

    def close(self) -> None:
        """End what the engine has started. Idempotent; nothing else is called afterwards."""
        ...
