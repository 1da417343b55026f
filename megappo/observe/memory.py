"""Highest memory use since a point in time: of the GPU where there is one, else of the process."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """`reset()`, work, `read()`.

    Without a GPU it is the resident memory (Linux). Where the kernel does not let a process reset its peak, the peak
    since the start of the process is read instead: never too low.
    """

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()

    def reset(self) -> None:
        """The peak from now on."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):  # a container may forbid it
            _CLEAR.write_text("5")

    def read(self) -> int:
        """Bytes."""
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        try:
            lines = _STATUS.read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
