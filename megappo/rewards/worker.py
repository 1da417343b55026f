"""One reward process: user code runs there, so that it can neither hang nor kill the trainer.

The process is closed with its parent: on `close()`, at exit, when the object is collected, and also when the parent is
killed (its end of the pipe closes). It has its own session, so a Ctrl-C at the terminal does not reach it, and when it
is killed, so is what user code has started.
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
from collections.abc import Iterable
from typing import Any

from megappo.rewards.worker_main import HEADER

CLOSE_TIMEOUT_S = 5.0
_CHUNK = 1 << 20  # bytes a read
# The parent's sys.path is taken over first, so that the child finds the same modules.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from megappo.rewards.worker_main import main; main()"


class Dead(Exception):
    """The process ended instead of answering; the message says how ("was killed by SIGKILL …")."""


class Worker:
    """A process that answers one request at a time: `send`, then `advance` until the reply is there.

    Neither of them waits for the process; `wait_for` sleeps until one of several workers can be advanced.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.owner = os.getpid()
        self.deadline = 0.0  # of the request in flight, on the monotonic clock
        self.pid = self._process.pid
        self._finalizer = weakref.finalize(self, _close, self._process, self.owner)
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._out, self._in = memoryview(b""), bytearray()

    def send(self, message: Any, timeout_s: float) -> None:
        """Make `message` the request in flight; it is written by `advance`."""
        data = pickle.dumps(message)
        self._out, self._in = memoryview(HEADER.pack(len(data)) + data), bytearray()
        self.deadline = time.monotonic() + timeout_s

    def advance(self) -> dict[str, Any] | None:
        """Write and read what is possible now; the reply once it is complete.

        Raises TimeoutError past the deadline, and Dead when the process has ended. Neither ends the process.
        """
        try:
            self._write()
            if self._read():
                return json.loads(memoryview(self._in)[HEADER.size :].tobytes())
        except (BrokenPipeError, EOFError):
            raise self._death() from None
        if time.monotonic() >= self.deadline:
            # Children of user code may hold the pipe open after the process itself has died.
            if _exit_code(self._process, 0) is not None:
                raise self._death()
            raise TimeoutError
        return None

    def kill(self) -> None:
        """End the process and what it started, at once."""
        if os.getpid() == self.owner:  # a forked child has copies of the pipes, not of the process
            _kill_group(self._process)
        self.close()

    def close(self) -> None:
        """Ask the process to end, then make it. Harmless when it has ended."""
        self._finalizer()

    @property
    def ended(self) -> bool:
        """The process is gone."""
        return _exit_code(self._process, 0) is not None

    def streams(self) -> Iterable[tuple[int, int]]:
        """(file descriptor, poll event) of what this worker waits for."""
        yield self._stdout, select.POLLIN
        if self._out:
            yield self._stdin, select.POLLOUT

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                self._out = self._out[os.write(self._stdin, self._out) :]

    def _read(self) -> bool:
        """True once the reply is complete. The process never sends more than was asked for."""
        with contextlib.suppress(BlockingIOError):
            while not self._complete():
                part = os.read(self._stdout, _CHUNK)
                if not part:
                    raise EOFError
                self._in += part
        return self._complete()

    def _complete(self) -> bool:
        size = HEADER.size
        return len(self._in) >= size and len(self._in) >= size + HEADER.unpack_from(self._in)[0]

    def _death(self) -> Dead:
        code = _exit_code(self._process, CLOSE_TIMEOUT_S)
        if code is None:  # it closed its pipe and lived on
            return Dead("closed its connection")
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return Dead(f"was killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else ""))
        return Dead(f"died with exit code {code}")


def wait_for(workers: Iterable[Worker]) -> list[Worker]:
    """Sleep until a worker can be advanced (its pipe is ready, or its deadline is over); those that can."""
    # poll, not select: a trainer may have more than 1024 files open
    poller = select.poll()
    by_stream: dict[int, Worker] = {}
    for worker in workers:
        for stream, event in worker.streams():
            poller.register(stream, event)
            by_stream[stream] = worker
    left = min(worker.deadline for worker in by_stream.values()) - time.monotonic()
    ready = {by_stream[stream]: None for stream, _ in poller.poll(max(0.0, left) * 1000 + 1)}
    now = time.monotonic()
    ready |= {worker: None for worker in by_stream.values() if now >= worker.deadline}
    return list(ready)


def _close(process: subprocess.Popen, owner: int) -> None:
    """Not a method: the finalizer must not keep the object alive."""
    if os.getpid() != owner:
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
