"""Responses from a data set in place of generated ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from megappo.data.offline import OfflineRow, RecordedResponse
from megappo.errors import UserError
from megappo.rollout.base import (
    NO_WEIGHTS,
    EngineHealth,
    GeneratedSample,
    GenerateRequest,
    RolloutEngine,
    SamplingParams,
    SyncReport,
)


class BehaviourFile:
    """Log-probs of every recorded response under the starting policy, on disk: a run may resume long after.

    One flat fp32 array, response after response in the order of the data set; ranks read the slices they need.
    """

    def __init__(self, path: Path, rows: Sequence[OfflineRow]):
        self.path = path
        sizes = np.array([[len(response.ids) for response in row.responses] for row in rows], dtype=np.int64)
        self._starts = np.concatenate([[0], sizes.ravel().cumsum()])
        self._n = sizes.shape[1]
        self._open: Any = None  # the array, mapped

    @property
    def tokens(self) -> int:
        """Length of the array."""
        return int(self._starts[-1])

    def write(self, parts: Sequence[np.ndarray]) -> None:
        """Write all responses' log-probs, beside and renamed."""
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"logprobs": np.concatenate(parts).astype(np.float32)}, partial)
            partial.replace(self.path)
        except OSError as err:
            raise UserError(f"cannot write {self.path} ({err.strerror}): check trainer.output_dir") from None

    def check(self) -> None:
        """Open the file; UserError unless it is there and has a number for every token."""
        try:
            self._open = safe_open(self.path, "np").get_slice("logprobs")
            found = self._open.get_shape()
        except FileNotFoundError:
            found = "missing"
        except Exception as err:  # safetensors' own error type is not public
            found = f"damaged ({' '.join(str(err).split())})"
        if found != [self.tokens]:
            raise UserError(
                f"{self.path}: the behaviour policy's log-probs of this data are {found}, expected [{self.tokens}]: "
                "restore the file and the data, or start anew with trainer.resume=never"
            )

    def read(self, row: int, k: int) -> list[float]:
        """Log-probs of response k of a row, after `check`."""
        at = row * self._n + k
        return self._open[self._starts[at] : self._starts[at + 1]].tolist()


class OfflineEngine:
    """Hands out the responses of data-set rows; an engine inside, if there is one, answers validation prompts.

    Attributes:
        behaviour: where the log-probs are that the rows do not hold themselves.
    """

    def __init__(self, inner: RolloutEngine | None):
        self.inner = inner
        self.behaviour: BehaviourFile | None = None
        self.version = NO_WEIGHTS

    def recall(self, requests: Sequence[GenerateRequest], rows: Sequence[OfflineRow]) -> list[GeneratedSample]:
        """The recorded response to each request: number `sample_id % responses` of its row."""
        return [self._sample(request, row) for request, row in zip(requests, rows, strict=True)]

    def _sample(self, request: GenerateRequest, row: OfflineRow) -> GeneratedSample:
        k = request.sample_id % len(row.responses)
        response = row.responses[k]
        logprobs = response.logprobs
        if self.behaviour is not None:
            logprobs = self.behaviour.read(row.index, k)
        return recorded_sample(request.sample_id, request.group_id, row, response, logprobs)

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GeneratedSample]:
        """Fresh answers, from the engine inside."""
        if self.inner is None:
            raise RuntimeError("offline rollouts without an engine cannot generate")
        return self.inner.generate(requests, sampling)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Pass them on, or drain `named_tensors`, which is a collective."""
        self.version = version
        if self.inner is not None:
            return self.inner.update_weights(named_tensors, version)
        for _ in named_tensors:
            pass
        return SyncReport(0.0, 0, 0, version)

    def sleep(self) -> None:
        if self.inner is not None:
            self.inner.sleep()

    def wake(self) -> None:
        if self.inner is not None:
            self.inner.wake()

    def health(self) -> EngineHealth:
        return self.inner.health() if self.inner is not None else EngineHealth(True, "", self.version)

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics() if self.inner is not None else {}

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()


def recorded_sample(
    sample_id: int, group_id: int, row: OfflineRow, response: RecordedResponse, logprobs: list[float] | None
) -> GeneratedSample:
    """A response of the data set as if an engine had produced it; without log-probs they count as 0."""
    known = [0.0] * len(response.ids) if logprobs is None else logprobs
    reason = "stop" if response.finished else "length"
    prompt = list(row.prompt_ids)
    return GeneratedSample(sample_id, group_id, prompt, response.ids, known, reason, 0, response.mask)


def recorded_scores(samples: Sequence[GeneratedSample], rows: Sequence[OfflineRow]) -> list[float]:
    """The data set's own score of each recalled sample; NaN where the row has none."""
    nan = float("nan")
    responses = [row.responses[s.sample_id % len(row.responses)] for s, row in zip(samples, rows, strict=True)]
    return [nan if response.score is None else response.score for response in responses]
