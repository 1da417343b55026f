"""Ctrl-C and SIGTERM: finish the iteration, save, and say how to go on. A second Ctrl-C stops at once."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading

from megappo.checkpoint.store import CheckpointStore
from megappo.errors import Interrupted
from megappo.observe.failures import ERROR_FILE, TORCHRUN_ERROR_FILE
from megappo.parallel.reduce import any_rank


class StopRequest:
    """Remembers that somebody asked this process to stop. Use as a context manager around the training loop."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self._signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        if self._signal is not None and number != signal.SIGUSR1:
            raise KeyboardInterrupt
        self._signal = number

    def anywhere(self) -> bool:
        """Did any rank receive a request? Collective."""
        return any_rank(self._signal is not None)

    @property
    def exit_code(self) -> int:
        return 128 + (self._signal or signal.SIGINT)

    def interrupted(self, done: str, store: CheckpointStore, saving_key: str, resume: str) -> Interrupted:
        """The exception that ends the run after `done` ("iteration 3"); tells what is kept and how to continue.

        `saving_key`: the setting that decides whether there are checkpoints; `resume`: `trainer.resume`.
        """
        kept = store.iterations()
        if not kept:
            told = f"nothing is saved ({saving_key} is -1, or it was too early): the next run starts anew"
        else:
            command = resume_command(sys.argv[1:], resume)
            told = f"the newest checkpoint is {store.folder(kept[-1])}; to continue from it: {command}"
        return Interrupted(f"interrupted after {done}; {told}", self.exit_code)


def resume_command(argv: list[str], resume: str) -> str:
    """The command that continues this run, as it was started: alone, with --nproc, or by torchrun."""
    if argv[:1] not in (["train"], ["sft"], ["reward-model"]):
        return "start it again with trainer.resume=auto"
    words = [word for word in argv if word not in ("--no-resume", "trainer.resume=never")]
    if resume == "never":
        words.append("trainer.resume=auto")
    if TORCHRUN_ERROR_FILE in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        return f"torchrun … -m megappo_cli {shlex.join(words)}"
    if ERROR_FILE in os.environ:  # a rank of `megappo … --nproc N`, which keeps that option to itself
        words += ["--nproc", os.environ["WORLD_SIZE"]]
    return f"megappo {shlex.join(words)}"
