"""The reward process: scores one sample a request until its parent says stop or goes away. Imports no torch.

Requests arrive on standard input, replies leave on what was standard output; both are length-prefixed.
Requests are pickled (they come from the parent only and keep the types of the data row); replies are JSON,
because the code that runs here is the user's.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from megappo.errors import UserError
from megappo.rewards.base import to_score

HEADER = struct.Struct("<Q")
WATCHDOG_GRACE_S = 10.0


def main() -> None:
    """Serve until an empty request. The first one describes the scorer: {kind, path, kwargs, timeout_s}."""
    # Requests to stop are the parent's to handle: Ctrl-C, and what SLURM sends to every process of a step.
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(request, signal.SIG_IGN)
    requests_in, replies_out = _take_over_streams()
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests_in, requests), daemon=True).start()
    spec = pickle.loads(requests.get())
    try:
        scorer = make_scorer(spec)
    except UserError as error:
        _reply(replies_out, {"error": str(error)})
        return
    except Exception as error:
        _reply(replies_out, {"error": f"cannot start: {describe_exception(error)}"})
        return
    _reply(replies_out, {"ready": True})
    with open(os.devnull, "w") as nowhere:
        while request := requests.get():
            # A loop inside C code (a regular expression) holds the interpreter lock and would outlive a
            # killed parent: this timer is a C thread and needs no lock.
            faulthandler.dump_traceback_later(2 * spec["timeout_s"] + WATCHDOG_GRACE_S, exit=True, file=nowhere)
            reply = score_one(scorer, request)
            faulthandler.cancel_dump_traceback_later()
            _reply(replies_out, reply)


def make_scorer(spec: dict[str, Any]) -> Callable[[Any], Any]:
    """The scorer that a specification describes. Raises UserError when it cannot be loaded."""
    if spec["kind"] == "function":
        from megappo.rewards.function import FunctionScorer

        return FunctionScorer(spec["path"], spec["kwargs"])
    if spec["kind"] == "math":
        from megappo.rewards.math import MathScorer

        return MathScorer(**spec["kwargs"])
    from megappo.rewards.reasoning_gym import ReasoningGymScorer

    return ReasoningGymScorer()


def score_one(scorer: Callable[[Any], Any], request: bytes) -> dict[str, Any]:
    """{score, extras} or {error: one line} for a pickled sample."""
    try:
        value = scorer(pickle.loads(request))
    except UserError as error:
        return {"error": str(error)}
    except BaseException as error:  # sys.exit() in user code must not end the process without a word
        return {"error": describe_exception(error)}
    try:
        score, extras = to_score(value)
    except Exception as error:
        return {"error": str(error)}
    return {"score": score, "extras": extras}


def describe_exception(error: BaseException) -> str:
    """The last line of the traceback and where it was raised, as one line."""
    last_line = " ".join("".join(traceback.format_exception_only(error)).split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{last_line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else last_line


def _take_over_streams() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of the protocol's two ends; what user code prints goes to standard error."""
    requests_in, replies_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.dup2(2, 1)
    os.close(devnull)
    sys.stdout = sys.stderr
    return requests_in, replies_out


def _read_requests(stream: BinaryIO, requests: queue.SimpleQueue) -> None:
    while True:
        header = stream.read(HEADER.size)
        if len(header) < HEADER.size:
            _die()  # the parent is gone, perhaps while user code runs in the main thread
        requests.put(stream.read(HEADER.unpack(header)[0]))


def _die() -> None:
    if os.getpgrp() == os.getpid():  # with everything that user code has started
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _reply(stream: BinaryIO, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode()
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()
