"""Ctrl-C and SIGTERM: finish the iteration, save, and say how to go on. A second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading

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
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number

    def anywhere(self) -> bool:
        """Did any rank receive a request? Collective."""
        return any_rank(self._signal is not None)

    @property
    def exit_code(self) -> int:
        return 128 + (self._signal or signal.SIGINT)
