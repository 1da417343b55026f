"""Groups of gloo ranks that stay alive between tests: starting one costs seconds, asking it again nothing."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from support import join_group, meeting_file, rank_context

_groups: dict[tuple[int, str], _Group] = {}


def on_ranks(world: int, fn: Callable, *args: Any, timeout: float = 280) -> Any:
    """Run `fn(*args)` on `world` ranks and return rank 0's result. Any failure fails the test.

    The group is kept for the next call of the same module and size unless something went wrong. Only one is: the
    process groups of many layouts have hundreds of threads, and idle ones still cost processor time.
    """
    key = (world, fn.__module__)
    if key not in _groups:
        _end_all()
        _groups[key] = _Group(world)
    group = _groups.pop(key)
    result = group.run(fn, args, timeout)
    _groups[key] = group
    return result


class _Group:
    def __init__(self, world: int) -> None:
        context = rank_context()
        meeting = meeting_file()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, meeting, theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable, args: tuple, timeout: float) -> Any:
        try:
            for pipe in self.pipes:
                pipe.send((fn, args))
            return self._answers(time.monotonic() + timeout)[0]
        except BaseException:
            self.end()
            raise

    def _answers(self, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {set(range(len(self.pipes))) - set(answers)} have not answered in time"
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    failure, answers[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(10)
                    failure = f"it died with exit code {self.processes[rank].exitcode}"
                assert failure is None, f"rank {rank} failed:\n{failure}"
        return [answers[rank] for rank in range(len(self.pipes))]

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.kill()  # one that is not yet the leader of its group
            process.join()


def _serve(rank: int, world: int, meeting: str, pipe: Connection) -> None:
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):  # Linux: end with the process that asks, however it ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    join_group(rank, world, meeting)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (None, fn(*args))
            torch.distributed.barrier()
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)


@atexit.register
def _end_all() -> None:
    for group in _groups.values():
        group.end()
    _groups.clear()
