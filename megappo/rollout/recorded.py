"""Rollouts written to and read from JSON lines, one file an iteration: to replay a run in another layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from megappo.data.batch import FINISH_REASONS
from megappo.errors import UserError
from megappo.rollout.base import (
    NO_WEIGHTS,
    EngineHealth,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
    SyncReport,
)


def record_file(folder: str | Path, iteration: int, *, greedy: bool = False) -> Path:
    """Where an iteration's samples are; ReMax's greedy answers have a file of their own."""
    return Path(folder) / f"{'greedy' if greedy else 'rollouts'}_{iteration:06d}.jsonl"


def write_rollouts(
    folder: str | Path, iteration: int, samples: Iterable[GeneratedSample], *, greedy: bool = False
) -> Path:
    """Write one iteration's samples, ascending by `sample_id`; beside and renamed, so a file is never half there."""
    target = record_file(folder, iteration, greedy=greedy)
    partial = target.with_suffix(".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as out:
            for sample in sorted(samples, key=lambda s: s.sample_id):
                out.write(json.dumps(asdict(sample)) + "\n")
        partial.replace(target)
    except OSError as err:
        raise UserError(f"cannot write {target} ({err.strerror}): check rollout.record_dir") from None
    return target


def read_rollouts(folder: str | Path, iteration: int, *, greedy: bool = False) -> dict[int, GeneratedSample]:
    """The samples of one iteration by `sample_id`.

    Raises:
        UserError: missing file or damaged line.
    """
    file = record_file(folder, iteration, greedy=greedy)
    if not file.is_file():
        what = "greedy answers" if greedy else "rollouts"
        raise UserError(f"{file} does not exist: rollout.replay_dir has no {what} for iteration {iteration}")
    samples = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            sample = GeneratedSample(**json.loads(line))
            _check(sample)
        except (ValueError, TypeError) as err:
            raise UserError(f"{file} line {number}: not a recorded rollout ({err}): record it again") from None
        samples[sample.sample_id] = sample
    return samples


def _check(sample: GeneratedSample) -> None:
    """Raises ValueError or TypeError for what would break a batch later, far from the file that is wrong."""
    if not all(isinstance(token, int) for token in (*sample.prompt_ids, *sample.response_ids)):
        raise ValueError("prompt_ids and response_ids must be token ids")
    if len(sample.logprobs) != len(sample.response_ids):
        raise ValueError(f"{len(sample.logprobs)} logprobs for {len(sample.response_ids)} response tokens")
    if not all(isinstance(logprob, float | int) for logprob in sample.logprobs):
        raise ValueError("logprobs must be numbers")
    if sample.loss_mask is not None and len(sample.loss_mask) != len(sample.response_ids):
        raise ValueError(f"{len(sample.loss_mask)} mask entries for {len(sample.response_ids)} response tokens")
    if sample.finish_reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason {sample.finish_reason!r} is not one of {', '.join(FINISH_REASONS)}")


class RecordedEngine:
    """Answers requests with what was recorded; weights are accepted and ignored.

    `vocab_size`: ids from there on are refused (a model with another tokenizer has recorded them).
    """

    def __init__(self, folder: str | Path, vocab_size: int):
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.iteration = 0
        self.version = NO_WEIGHTS

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GeneratedSample]:
        """The recorded sample of each request of the current `iteration`; temperature 0 reads the greedy answers.

        Raises:
            UserError: a sample is not in the file, or does not answer the request.
        """
        greedy = sampling.temperature == 0
        file = record_file(self.folder, self.iteration, greedy=greedy)
        samples = read_rollouts(self.folder, self.iteration, greedy=greedy)
        for request in requests:
            sample = samples.get(request.sample_id)
            if sample is None:
                raise UserError(f"{file} has no sample {request.sample_id}: it was recorded with other settings")
            wrong = self._mismatch(sample, request, sampling)
            if wrong:
                raise UserError(f"{file}: sample {request.sample_id} {wrong}")
        return [samples[request.sample_id] for request in requests]

    def _mismatch(self, sample: GeneratedSample, request: GenerateRequest, sampling: SamplingParams) -> str | None:
        if sample.prompt_ids != request.prompt_ids:
            return (
                "has another prompt than the data set: replay with the seed, data and batch size that it was "
                "recorded with"
            )
        if len(sample.response_ids) > sampling.max_new_tokens:
            limit = f"data.max_response_length={sampling.max_new_tokens}"
            return f"has {len(sample.response_ids)} response tokens, more than {limit}: raise it"
        if not all(0 <= token < self.vocab_size for token in sample.response_ids):
            return f"has token ids outside the model's vocabulary of {self.vocab_size}: another model recorded it"
        return None

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Drain `named_tensors`, which is a collective."""
        for _ in named_tensors:
            pass
        self.version = version
        return SyncReport(0.0, 0, 0, version)

    def sleep(self) -> None:
        """Nothing is held."""

    def wake(self) -> None:
        """Nothing was released."""

    def health(self) -> EngineHealth:
        ok = self.folder.is_dir()
        return EngineHealth(ok, "" if ok else f"{self.folder} does not exist", self.version)

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing was started."""
