"""A batch of all ranks, which may be generated in a thread of rank 0 while the trainer trains on another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from megappo.errors import UserError
from megappo.rollout.sglang.client import Batch


@dataclass(frozen=True)
class Verdict:
    """What rank 0 tells the others: go on with `what`, or fail all together."""

    what: str
    error: UserError | None = None


@dataclass
class Ahead:
    """`batch` is None on ranks other than 0. `sizes`: requests of each rank. `wrong`: why it cannot be generated."""

    batch: Batch | None
    sizes: list[int]
    wrong: str | None
    _thread: threading.Thread | None = None
    _verdict: Verdict | None = None
    _trouble: BaseException | None = field(default=None)

    def begin(self, work: Callable[[Ahead], Verdict]) -> None:
        """Do the work in a thread."""

        def run() -> None:
            try:
                self._verdict = work(self)
            except BaseException as error:  # told in `result`, by the thread that asks
                self._trouble = error

        self._thread = threading.Thread(target=run, daemon=True, name="rollouts ahead")
        self._thread.start()

    def result(self) -> Verdict | None:
        """How the work in the thread ended; waits for it. None: it was never begun."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._trouble is not None:
            raise self._trouble
        return self._verdict

    def cancel(self) -> None:
        """Have the work end as soon as it can, and wait for that."""
        if self._thread is not None:
            if self.batch is not None:
                self.batch.cancelled.set()
            self._thread.join()
            self._thread = None
