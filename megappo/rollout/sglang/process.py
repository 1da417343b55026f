"""A server process of our own: a free port, a log file, and an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import BinaryIO

from megappo.errors import UserError

_LAST_LINES = 8
# What belongs to a rank of the trainer and would mislead a server.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "MEGAPPO_")
_libc = ctypes.CDLL(None)


class ServerProcess:
    """`command(port)` in a session of its own; output goes to `log`, appended over restarts."""

    def __init__(self, command: Callable[[int], list[str]], log: Path) -> None:
        self._command, self.log = command, log
        self._process: subprocess.Popen | None = None
        self._shared: set[str] = set()

    def start(self) -> str:
        """Start it; returns its URL. UserError when that is impossible."""
        port = free_port()
        words = self._command(port)
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as out:
                out.write(f"--- {' '.join(words)}\n".encode())
                out.flush()
                self._process = _starter().submit(_popen, words, out).result()
        except OSError as error:
            raise UserError(
                f"cannot start an SGLang server ({error.strerror}: {error.filename}): check rollout.sglang.launch"
            ) from None
        return f"http://127.0.0.1:{port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def end(self) -> None:
        """End it and all that it started, at once. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        shared = self._shared | _shared_memory(process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for name in shared:  # SGLang leaves it behind when it is ended by a signal
            with contextlib.suppress(OSError):
                os.unlink(name)

    def note_shared_memory(self) -> None:
        """Remember what it shares, now that it is up: it cannot be asked once it is dead."""
        if self._process is not None:
            self._shared |= _shared_memory(self._process.pid)

    def last_lines(self) -> str:
        """` (log FILE: … | …)`: the end of its output, for an error message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 8192))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        return f" (log {self.log}: {' | '.join(line[:200] for line in lines[-_LAST_LINES:])})"


@cache
def _starter() -> ThreadPoolExecutor:
    """The one thread that starts servers. Linux ends a child when the *thread* that has started it ends, and servers
    are also restarted from threads that end soon; this one lasts as long as the process."""
    return ThreadPoolExecutor(1, thread_name_prefix="server starter")


def _popen(words: list[str], out: BinaryIO) -> subprocess.Popen:
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env=_environment(),
        start_new_session=True,  # Ctrl-C is the trainer's; and the group can be ended as a whole
        preexec_fn=_end_with_parent,
    )


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _shared_memory(group: int) -> set[str]:
    """SGLang's own files in /dev/shm that processes of the group have mapped."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(folder.name)) == group:
                found.update(re.findall(r"/dev/shm/sglang_\S+", (folder / "maps").read_text()))
    return found


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and not k.startswith(_PREFIXES)}


def _end_with_parent() -> None:
    """Linux: a server is told to end when the trainer dies, however it dies."""
    _libc.prctl(1, signal.SIGTERM)
