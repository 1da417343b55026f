"""A reward that runs in a process of its own, so that user code can neither hang nor kill the trainer.

The process is started on first use, reused between calls, and closed with its parent: on `close()`, at
exit, when the object is collected, and also when the parent is killed (its end of the pipe closes). It has
its own session, so a Ctrl-C at the terminal does not reach it, and when it is killed, so is what user code
has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from megappo.errors import UserError
from megappo.rewards.base import RewardSample
from megappo.rewards.worker_main import HEADER

STARTUP_TIMEOUT_S = 180.0  # imports of user code, on a busy machine
CLOSE_TIMEOUT_S = 5.0
# The parent's sys.path is taken over first, so that the child finds the same modules.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from megappo.rewards.worker_main import main; main()"


class _Dead(Exception):
    """The process ended instead of answering."""


class WorkerReward:
    """Scores samples one by one in another process, each within `timeout_s` seconds.

    Args:
        name: for errors and metrics.
        kind: "function" (with `path` and `kwargs`) or "reasoning_gym".
        timeout_s: seconds a sample; on expiry the process is killed.

    After `score`, `extras[i]` holds the extra numbers that were returned for sample i.
    Errors are UserErrors naming the sample; the next call starts a fresh process.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        path: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.extras: list[dict[str, float]] = []
        self._spec = {"kind": kind, "path": path, "kwargs": dict(kwargs or {}), "timeout_s": timeout_s}
        self._process: subprocess.Popen | None = None
        self._finalizer: weakref.finalize | None = None
        self._owner = 0

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process and load the scorer, unless that is done. UserError when it cannot be loaded."""
        if self._process is not None and self._owner == os.getpid():
            return
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._process, self._owner)
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            reply = self._request(self._spec, STARTUP_TIMEOUT_S)
        except TimeoutError:
            self._kill()
            raise UserError(
                f"reward '{self.name}': not loaded after {STARTUP_TIMEOUT_S:.0f} s: "
                "make the import of its module faster"
            ) from None
        except _Dead as death:
            raise UserError(f"reward '{self.name}': its process {death} while loading") from None
        if "error" in reply:
            self.close()
            raise UserError(f"reward '{self.name}': {_one_line(reply['error'])}")

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """One finite score a sample. UserError on timeout, exception, death of the process or a bad value."""
        self.extras = []
        scores: list[float] = []
        if samples:
            self.start()
        for sample in samples:
            reply = self._score_one(sample)
            scores.append(float(reply["score"]))
            self.extras.append(reply["extras"])
        return scores

    def close(self) -> None:
        """End the process; harmless when there is none."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _score_one(self, sample: RewardSample) -> dict[str, Any]:
        try:
            reply = self._request(sample, self.timeout_s)
        except TimeoutError:
            self._kill()
            raise UserError(
                f"reward '{self.name}': {sample}: not scored after {self.timeout_s:g} s, "
                "its process was killed: make the function faster or raise timeout_s"
            ) from None
        except _Dead as death:
            raise UserError(f"reward '{self.name}': {sample}: its process {death}") from None
        if "error" in reply:
            raise UserError(f"reward '{self.name}': {sample}: {_one_line(reply['error'])}")
        return reply

    def _request(self, message: Any, timeout_s: float) -> dict[str, Any]:
        """Send a message and wait for its reply. Raises TimeoutError, or _Dead when the process has ended."""
        deadline = time.monotonic() + timeout_s
        data = pickle.dumps(message)
        try:
            self._write(HEADER.pack(len(data)) + data, deadline)
            size = HEADER.unpack(self._read(HEADER.size, deadline))[0]
            return json.loads(self._read(size, deadline))
        except (BrokenPipeError, EOFError):
            raise self._death() from None
        except TimeoutError:
            # Children of user code may hold the pipe open after the process itself has died.
            if _exit_code(self._process, 0) is not None:
                raise self._death() from None
            raise
        except BaseException:  # Ctrl-C: a late reply would be taken for the next request's
            self._kill()
            raise

    def _write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        stream = self._process.stdin.fileno()
        while left:
            _wait([], [stream], deadline)
            left = left[os.write(stream, left) :]

    def _read(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        stream = self._process.stdout.fileno()
        while len(parts) < size:
            _wait([stream], [], deadline)
            part = os.read(stream, size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _death(self) -> _Dead:
        code = _exit_code(self._process, CLOSE_TIMEOUT_S)
        self._kill()
        if code is None:  # it closed its pipe and lived on
            return _Dead("closed its connection")
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return _Dead(f"was killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else ""))
        return _Dead(f"died with exit code {code}")

    def _kill(self) -> None:
        if self._process is not None:
            _kill_group(self._process)
        self.close()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _wait(read: list[int], write: list[int], deadline: float) -> None:
    # poll, not select: a trainer may have more than 1024 files open
    poller = select.poll()
    for stream in read:
        poller.register(stream, select.POLLIN)
    for stream in write:
        poller.register(stream, select.POLLOUT)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _close(process: subprocess.Popen, owner: int) -> None:
    """Ask the process to end, then make it. Not a method: the finalizer must not keep the object alive."""
    if os.getpid() != owner:  # a forked child has copies of the pipes, not of the process
        return
    if _exit_code(process, 0) is None:
        with contextlib.suppress(OSError):
            os.write(process.stdin.fileno(), HEADER.pack(0))  # an empty request: stop
            _exit_code(process, CLOSE_TIMEOUT_S)
    _kill_group(process)
    process.stdin.close()
    process.stdout.close()


def _exit_code(process: subprocess.Popen, timeout_s: float) -> int | None:
    """Exit code, None while it runs. When it has ended, what user code had started in its group is killed."""
    if process.returncode is None:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        _signal_group(process.pid)
    return process.returncode


def _kill_group(process: subprocess.Popen) -> None:
    if process.returncode is None:  # afterwards its number may belong to another process
        _signal_group(process.pid)
        process.wait()


def _signal_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
