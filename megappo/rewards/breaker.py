"""When to try a server again: backoff between the attempts of a request, and a circuit breaker over all requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal


def backoff(attempt: int, first_s: float, most_s: float, rng: random.Random) -> float:
    """Seconds to wait after failed attempt number `attempt` (0, 1, …): doubled each time, at most `most_s`.

    The wait is drawn between half of that and all of it, so that the ranks of a run do not come back together.
    """
    limit = min(most_s, first_s * 2.0 ** min(attempt, 60))
    return limit * rng.uniform(0.5, 1.0)


class CircuitBreaker:
    """Keeps requests away from a server that is down.

    Closed: every request may go. After `failures` failed requests in a row it opens: none may go until `pause_s`
    seconds later, when one may as a probe (half-open). Its success closes the breaker; otherwise the next probe
    follows after another pause.
    """

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures, self.pause_s, self._clock = failures, pause_s, clock
        self.opened = 0  # how often it has opened
        self._in_a_row = 0
        self._next_probe: float | None = None  # None: closed

    @property
    def is_open(self) -> bool:
        return self._next_probe is not None

    def ask(self) -> Literal["go", "probe", "no"]:
        """May a request go now? "probe": it may, once, and should not be repeated."""
        if self._next_probe is None:
            return "go"
        now = self._clock()
        if now < self._next_probe:
            return "no"
        self._next_probe = now + self.pause_s  # a probe that is never heard of again is followed by another
        return "probe"

    def succeeded(self) -> None:
        """The server answered a request."""
        self._in_a_row, self._next_probe = 0, None

    def failed(self) -> None:
        """A request failed after all its attempts."""
        self._in_a_row += 1
        if self._next_probe is None and self._in_a_row >= self.failures:
            self._next_probe = self._clock() + self.pause_s
            self.opened += 1

    def seconds_to_probe(self) -> float:
        """Seconds until a probe may go; 0 when closed."""
        return 0.0 if self._next_probe is None else max(0.0, self._next_probe - self._clock())
