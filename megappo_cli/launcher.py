"""Several ranks on this machine without torchrun: start them, watch them, and leave nothing behind.

Rank 0 has the console. The other ranks' output is kept (its end) and shown only if one of them fails. Every
rank is the leader of a session of its own, so that a Ctrl-C in the terminal reaches this process alone, which
passes it on once, and so that whatever a rank started is ended together with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from megappo.observe.failures import ERROR_FILE

_POLL_S = 0.05
_GRACE_S = 3.0  # until a rank is killed that was asked to end, or that reported its error but lingers
_STOP_S = 30.0  # for ranks to finish after SIGTERM; a job scheduler's patience is about as long
_KEPT_LINES = 200  # of each silent rank's output
_SHOWN_LINES = 30
_PR_SET_PDEATHSIG = 1
_SHOW_CURSOR = "\x1b[?25h"
#: request to stop -> what the ranks are sent (megappo/trainer/interrupt.py listens to these)
_REQUESTS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,  # a job scheduler's early warning
}
#: exit codes of a rank that finished early because somebody asked it to (errors.Interrupted)
_STOPPED = {128 + number for number in _REQUESTS.values()}


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[str]
    error_file: Path
    output: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    reader: threading.Thread | None = None
    code: int | None = None
    note: dict[str, Any] | None = None  # the error that the rank reported, see observe.failures
    failed_at: float | None = None  # when it reported an error, or was found dead

    def look(self) -> None:
        """Update code, note and failed_at."""
        if self.code is None:
            self.code = self.process.poll()
            if self.code is not None:
                self.signal_group(signal.SIGKILL)  # what the rank left running
        if self.note is None and self.error_file.exists():
            self.note = json.loads(self.error_file.read_text(encoding="utf-8"))
            self.failed_at = float(self.note["time"])
        if self.failed_at is None and self.code and self.code not in _STOPPED:
            self.failed_at = time.time()

    def keep_output(self) -> None:
        """Read a silent rank's output as it comes, so that it never blocks on a full pipe."""
        if self.process.stdout is not None:
            self.reader = threading.Thread(target=self.output.extend, args=(self.process.stdout,), daemon=True)
            self.reader.start()

    def signal_group(self, number: int) -> None:
        # PermissionError: only zombies are left (macOS).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def launch_local(argv: Sequence[str], nproc: int, *, command: Sequence[str] | None = None) -> int:
    """Run `megappo ARGV` as `nproc` ranks on this machine and return the exit code.

    The first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 is passed to every rank once, which may finish what it is
    doing (after SIGTERM within 30 s); a second one ends them. When a rank fails the others are ended within
    seconds and its error is shown first.

    Args:
        command: what to start instead of `python -m megappo_cli`; `argv` follows it.

    Returns:
        0, the exit code of the rank that failed first (128 + n if signal n killed it), or 128 + n after a
        signal n to this process (130 for Ctrl-C).
    """
    prefix = list(command or [sys.executable, "-m", "megappo_cli"])
    with tempfile.TemporaryDirectory(prefix="megappo-") as folder, _Signals() as signals:
        ranks: list[_Rank] = []
        try:
            port = _free_port()
            for number in range(nproc):
                ranks.append(_start([*prefix, *argv], number, nproc, port, Path(folder)))
            for rank in ranks:
                rank.keep_output()
            _watch(ranks, signals)
        finally:
            # An error from before the end was requested is a cause; one from after it is a consequence.
            ended_at = time.time()
            _end(ranks)
            if sys.stdout.isatty():
                print(_SHOW_CURSOR, end="", flush=True)  # a progress bar that was killed has left it hidden
        failed = [r for r in ranks if r.failed_at is not None and r.failed_at <= ended_at]
        if signals.received:
            if any(r.note for r in failed):
                _report([r for r in failed if r.note])
            return 128 + signals.received[0]
        return _report(failed) if failed else max(r.code or 0 for r in ranks)


class _Signals:
    """Notes the user's requests to stop, instead of letting them interrupt the watcher."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _REQUESTS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)


def _start(command: list[str], number: int, nproc: int, port: int, folder: Path) -> _Rank:
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        ERROR_FILE: str(folder / f"rank{number}.json"),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    quiet = {} if number == 0 else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_die_with_parent(),
        **quiet,
    )
    return _Rank(number, process, Path(environment[ERROR_FILE]))


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux: have the kernel end a rank when this process dies, even if it is killed outright."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child should do as little as possible
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _watch(ranks: list[_Rank], signals: _Signals) -> None:
    """Return when all ranks are done, one failed, or they have to be ended."""
    deadline = math.inf  # set when a request to stop was passed on
    passed_on = 0  # the signal that the ranks were sent
    while True:
        for rank in ranks:
            rank.look()
        requests = len(signals.received)
        if requests > 1 or all(r.code is not None for r in ranks) or time.monotonic() > deadline:
            return
        if requests and not passed_on:
            passed_on = _REQUESTS[signal.Signals(signals.received[0])]
            if passed_on == signal.SIGTERM:
                deadline = time.monotonic() + _STOP_S
            print("stopping; once more to stop at once", file=sys.stderr, flush=True)
            for rank in ranks:
                if rank.code is None:
                    rank.process.send_signal(passed_on)
        # A rank that stopped on request is done, and another may still be saving.
        if any(r.note or (r.code and r.code not in _STOPPED and r.code != -passed_on) for r in ranks):
            # Others may have died at the same moment; look once more so that the earliest can be told.
            time.sleep(_POLL_S)
            for rank in ranks:
                rank.look()
            return
        time.sleep(_POLL_S)


def _end(ranks: list[_Rank]) -> None:
    """End every rank that still runs: ask, wait a little, kill. One that reported an error is not asked."""
    for rank in ranks:
        if rank.code is None and rank.note is None:
            rank.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(r.code is None for r in ranks):
        time.sleep(_POLL_S)
        for rank in ranks:
            rank.look()
    for rank in ranks:
        if rank.code is None:
            rank.signal_group(signal.SIGKILL)
            rank.code = rank.process.wait()
        if rank.reader is not None:
            rank.reader.join(timeout=1.0)


def _report(failed: list[_Rank]) -> int:
    """Print the error of the rank that failed first, then one line for each other; return the exit code."""
    # The others notice the loss of a rank that was killed outright before its death shows here: it is first.
    failed = sorted(failed, key=lambda r: (r.note is not None or (r.code or 0) >= 0, r.failed_at))
    first, *others = failed
    prefix = f"[rank {first.number}] " if first.number else ""
    lines = list(first.note["lines"]) if first.note else [_death(first)]
    output = [line.rstrip("\n") for line in first.output][-_SHOWN_LINES:]
    if output:
        lines += [f"last output of rank {first.number}:", *output]
    print("\n".join(prefix + line for line in lines), file=sys.stderr)
    for rank in others:
        if rank.note and first.note and rank.note["lines"] == first.note["lines"]:
            continue
        what = rank.note["message"]["message"] if rank.note else _death(rank)
        print(f"[rank {rank.number}] then failed: {what}", file=sys.stderr)
    sys.stderr.flush()
    if first.note:
        return first.note["exit_code"]
    return first.code if first.code and first.code > 0 else 128 - (first.code or 0)


def _death(rank: _Rank) -> str:
    code = rank.code or 0
    if code >= 0:
        return f"error: rank {rank.number} ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (most often: out of memory)" if name == "SIGKILL" else ""
    return f"error: rank {rank.number} was killed by {name}{hint}"
