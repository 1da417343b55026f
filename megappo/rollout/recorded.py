"""Rollouts written to and read from JSON lines, one file an iteration: to replay a run in another layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from megappo.errors import UserError
from megappo.rollout.base import (
    NO_WEIGHTS,
    EngineHealth,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
    SyncReport,
)


def record_file(folder: str | Path, iteration: int) -> Path:
    return Path(folder) / f"rollouts_{iteration:06d}.jsonl"


def write_rollouts(folder: str | Path, iteration: int, samples: Iterable[GeneratedSample]) -> Path:
    """Write one iteration's samples, ascending by `sample_id`; beside and renamed, so a file is never half there."""
    target = record_file(folder, iteration)
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


def read_rollouts(folder: str | Path, iteration: int) -> dict[int, GeneratedSample]:
    """The samples of one iteration by `sample_id`.

    Raises:
        UserError: missing file or damaged line.
    """
    file = record_file(folder, iteration)
    if not file.is_file():
        raise UserError(f"{file} does not exist: rollout.replay_dir has no rollouts for iteration {iteration}")
    samples = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            sample = GeneratedSample(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as err:
            raise UserError(f"{file} line {number}: not a recorded rollout ({err})") from None
        samples[sample.sample_id] = sample
    return samples


class RecordedEngine:
    """Answers requests with what was recorded; weights are accepted and ignored."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.iteration = 0
        self.version = NO_WEIGHTS

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GeneratedSample]:
        """The recorded sample of each request of the current `iteration`.

        Raises:
            UserError: a sample is not in the file, or its prompt differs from the request's.
        """
        samples = read_rollouts(self.folder, self.iteration)
        out = []
        for request in requests:
            sample = samples.get(request.sample_id)
            file = record_file(self.folder, self.iteration)
            if sample is None:
                raise UserError(f"{file} has no sample {request.sample_id}: it was recorded with other settings")
            if sample.prompt_ids != request.prompt_ids:
                raise UserError(
                    f"{file}: sample {request.sample_id} has another prompt than the data set: replay with the "
                    "seed, data and batch size that it was recorded with"
                )
            out.append(sample)
        return out

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
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
