"""Highest memory use since a point in time: of the GPU where there is one, else of the process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from megappo.observe.metrics import MetricAccumulator

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


def peak_memory(peaks: Mapping[str, int]) -> dict[str, float]:
    """`perf/peak_memory_gb/<phase>` (GiB, the rank with most) of each rank's bytes by phase, and
    `perf/max_memory_allocated_gb`, the most of all phases. Collective; every rank names the same phases."""
    numbers = MetricAccumulator()
    for phase, size in peaks.items():
        numbers.add_max(f"perf/peak_memory_gb/{phase}", size / 2**30)
    out = numbers.reduce() if peaks else {}
    return out | ({"perf/max_memory_allocated_gb": max(out.values())} if out else {})
