"""A pool of reward processes that share the samples of a batch, each sample within its own time limit."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megappo.errors import UserError
from megappo.rewards.base import Outcome, RewardSample, failed, one_line
from megappo.rewards.worker import Dead, Worker, wait_for

STARTUP_TIMEOUT_S = 180.0  # imports of user code, on a busy machine
_LOADING = -1  # in place of a sample's index


class _Work:
    """The samples of one call: what is still to do, and what became of the others."""

    def __init__(self, samples: Sequence[RewardSample], fail_fast: bool) -> None:
        self.samples, self.fail_fast = samples, fail_fast
        self.todo = deque(range(len(samples)))
        self.done: list[Outcome] = [Outcome()] * len(samples)

    def settle(self, index: int, outcome: Outcome) -> None:
        if self.fail_fast and outcome.error is not None:
            raise UserError(outcome.error)
        self.done[index] = outcome


class PoolReward:
    """Scores samples one by one in other processes, each within `timeout_s` seconds.

    The processes are started on first use (or by `start`) and reused; one that hangs or dies is replaced and costs
    only the sample that it was working on.

    Args:
        name: for errors and metrics.
        kind: "function" (with `path` and `kwargs`), "reasoning_gym" or "math" (with `kwargs`).
        timeout_s: seconds a sample; on expiry the process is killed.
        workers: number of processes.
        late_score: score of a sample whose time is over, where the response is to blame for that; None: an error.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        path: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
        workers: int = 1,
        late_score: float | None = None,
    ) -> None:
        self.name, self.timeout_s, self.workers, self.late_score = name, timeout_s, workers, late_score
        self._spec = {"kind": kind, "path": path, "kwargs": dict(kwargs or {}), "timeout_s": timeout_s}
        self._idle: list[Worker] = []
        self._busy: dict[Worker, int] = {}  # what each works on: a sample's index, or _LOADING

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    def start(self) -> None:
        """Start all processes and load the scorer. UserError when it cannot be loaded."""
        self._run([], self.workers, fail_fast=True)

    def outcomes(self, samples: Sequence[RewardSample], fail_fast: bool = False) -> list[Outcome]:
        """One outcome a sample, in order.

        Raises:
            UserError: the scorer cannot be loaded; with `fail_fast`, the first sample that failed.
        """
        return self._run(samples, min(self.workers, len(samples)), fail_fast)

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """One finite score a sample. UserError on timeout, exception, death of a process or a bad value."""
        return [outcome.score for outcome in self.outcomes(samples, fail_fast=True)]

    def close(self) -> None:
        """End the processes; harmless when there are none."""
        for worker in (*self._idle, *self._busy):
            worker.close()
        self._idle, self._busy = [], {}

    def _run(self, samples: Sequence[RewardSample], workers: int, fail_fast: bool) -> list[Outcome]:
        work = _Work(samples, fail_fast)
        # Not those of a parent process, nor those that ended meanwhile.
        self._idle = [worker for worker in self._idle if worker.owner == os.getpid() and not worker.ended]
        try:
            self._grow(workers)
            while work.todo or self._busy:
                while work.todo and self._idle:
                    worker, index = self._idle.pop(), work.todo.popleft()
                    worker.send(samples[index], self.timeout_s)
                    self._busy[worker] = index
                    self._advance(worker, work)
                for worker in wait_for(self._busy) if self._busy else ():
                    self._advance(worker, work)
                self._grow(min(workers, len(work.todo) + len(self._busy)))
        except BaseException:  # also Ctrl-C: a late reply would be taken for the next request's
            for worker in self._busy:
                worker.kill()
            self._busy = {}
            raise
        return work.done

    def _grow(self, workers: int) -> None:
        """Start processes until there are so many."""
        while len(self._idle) + len(self._busy) < workers:
            worker = Worker()
            self._busy[worker] = _LOADING
            worker.send(self._spec, STARTUP_TIMEOUT_S)

    def _advance(self, worker: Worker, work: _Work) -> None:
        """Let a busy worker go on; on its reply it becomes idle, on its death or timeout it is gone."""
        index = self._busy[worker]
        try:
            reply = worker.advance()
        except (Dead, TimeoutError) as trouble:
            del self._busy[worker]
            worker.kill()
            if index == _LOADING:
                raise self._load_error(trouble) from None
            work.settle(index, self._lost(work.samples[index], trouble))
            return
        if reply is None:
            return
        del self._busy[worker]
        if index == _LOADING and "error" in reply:
            worker.close()
            raise UserError(f"reward '{self.name}': {one_line(reply['error'])}")
        self._idle.append(worker)
        if index != _LOADING:
            work.settle(index, self._answer(work.samples[index], reply))

    def _answer(self, sample: RewardSample, reply: dict[str, Any]) -> Outcome:
        if "error" in reply:
            return failed(self.name, sample, reply["error"])
        return Outcome(float(reply["score"]), reply["extras"])

    def _lost(self, sample: RewardSample, trouble: Exception) -> Outcome:
        if isinstance(trouble, Dead):
            return failed(self.name, sample, f"its process {trouble}")
        if self.late_score is not None:
            return Outcome(self.late_score, timed_out=True)
        reason = (
            f"not scored after {self.timeout_s:g} s, its process was killed: "
            "make the function faster or raise timeout_s"
        )
        return failed(self.name, sample, reason, timed_out=True)

    def _load_error(self, trouble: Exception) -> UserError:
        if isinstance(trouble, Dead):
            return UserError(f"reward '{self.name}': its process {trouble} while loading")
        return UserError(
            f"reward '{self.name}': not loaded after {STARTUP_TIMEOUT_S:.0f} s: make the import of its module faster"
        )
