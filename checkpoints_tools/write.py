"""Write a target beside its place and rename it: disk space checked first, files in parallel, resumable.

The folder `DST.partial` holds finished files under their own names, unfinished ones as `*.tmp`, and
`.conversion.json`: which conversion this is and which files are finished. So what an interrupt leaves can be
continued, and a folder that is there under its own name is a whole one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch

from checkpoints_tools.targets import OutFile, Part, Target
from megappo.errors import UserError

JOURNAL = ".conversion.json"
BATCH_BYTES = 64 << 20  # parts are handed to a worker in batches of about this size
SMALL_BYTES = 1 << 16
ALIGNMENT = 64  # bytes; a chunk that starts at a multiple of it can be mapped
IN_FLIGHT_BYTES = 128 << 20  # tensors being made at the same time; one that is larger is alone


class Progress:
    """A line that is rewritten in place, on a terminal only."""

    def __init__(self, total: int, verb: str, show: bool | None = None):
        self.total, self.verb, self.done = total, verb, 0
        self.start, self._shown = time.perf_counter(), 0.0
        self._show = sys.stderr.isatty() if show is None else show
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.start, 1e-9)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            now = time.perf_counter()
            if self._show and (now - self._shown > 0.2 or self.done >= self.total):
                self._shown = now
                share = self.done / max(self.total, 1)
                bar = ("#" * int(30 * share)).ljust(30, ".")
                rate = self.done / self.seconds / 1e9
                text = f"{self.verb} [{bar}] {self.done / 1e9:.2f}/{self.total / 1e9:.2f} GB, {rate:.2f} GB/s"
                print(f"\r{text}", end="\n" if self.done >= self.total else "", file=sys.stderr, flush=True)


class _Budget:
    """Lets tensors be made while their bytes stay below a limit; a larger one waits until it is alone."""

    def __init__(self, limit: int):
        self._limit, self._used, self._changed = limit, 0, threading.Condition()

    def take(self, nbytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._limit)
            self._used += nbytes

    def give(self, nbytes: int) -> None:
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()


class _At:
    """`torch.save`'s view of a place in a file. Small writes are gathered: each would yield to other threads."""

    def __init__(self, fd: int, at: int):
        self.fd, self.at, self._small = fd, at, bytearray()

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        if len(view) > SMALL_BYTES:
            self.flush()
            _pwrite(self.fd, view, self.at)
            self.at += len(view)
        else:
            self._small += view
        return len(view)

    def flush(self) -> None:
        _pwrite(self.fd, memoryview(self._small), self.at)
        self.at += len(self._small)
        self._small = bytearray()


def _pwrite(fd: int, view: memoryview, at: int) -> None:
    while len(view):
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


@contextmanager
def _without_checksums() -> Iterator[None]:
    """`torch.save` without the CRC of each record, which costs as much as all the rest and which no loader looks at."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class Writer:
    """Writes the files of one target into a folder."""

    def __init__(self, target: Target, folder: Path, done: dict[str, list], workers: int):
        self.target, self.folder, self.done, self.workers = target, folder, done, workers
        self.budget = _Budget(IN_FLIGHT_BYTES)
        self.stop = threading.Event()
        self.progress = Progress(sum(f.size(target.dtype.itemsize) for f in self.pending()), "writing")

    def pending(self) -> list[OutFile]:
        return [file for file in self.target.files if file.name not in self.done]

    def run(self, journal: dict) -> None:
        """Write the files that are not done yet. `journal`: kept up to date on disk."""
        with ThreadPoolExecutor(self.workers) as pool, _without_checksums():
            try:
                for group in self._groups():
                    self._write_group(pool, group, journal)
            except BaseException:
                self.stop.set()
                raise

    def _groups(self) -> list[list[OutFile]]:
        """Files that are written at the same time: one after the other where a file can be written in parallel."""
        pending = self.pending()
        chained = bool(pending) and pending[0].parts[0].place is None
        size = self.workers if chained else 1
        return [pending[i : i + size] for i in range(0, len(pending), size)]

    def _write_group(self, pool: ThreadPoolExecutor, files: list[OutFile], journal: dict) -> None:
        opened = {file.name: _open(self.folder / f"{file.name}.tmp") for file in files}
        try:
            tasks = []
            for file in files:
                fd = opened[file.name]
                _pwrite(fd, memoryview(file.header), 0)
                tasks += [pool.submit(self._write_parts, fd, parts) for parts in self._batches(file)]
            finished, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            for task in finished:
                if task.exception():
                    self.stop.set()
                    wait(tasks)
                    raise task.exception()
            ends = {file.name: [] for file in files}
            tasks = iter(tasks)
            for file in files:
                for _ in self._batches(file):
                    ends[file.name] += next(tasks).result()
        finally:
            for fd in opened.values():
                os.close(fd)
        for file in files:
            os.replace(self.folder / f"{file.name}.tmp", self.folder / file.name)
            self.done[file.name] = ends[file.name]
        write_journal(self.folder, journal | {"done": self.done})

    def _batches(self, file: OutFile) -> list[list[Part]]:
        if not file.parts or file.parts[0].place is None:
            return [file.parts]
        out, size = [[]], 0
        for part in file.parts:
            nbytes = math.prod(part.shape) * self.target.dtype.itemsize
            if out[-1] and size + nbytes > BATCH_BYTES:
                out.append([])
                size = 0
            out[-1].append(part)
            size += nbytes
        return out

    def _write_parts(self, fd: int, parts: list[Part]) -> list[tuple[int, int]]:
        """Returns `(start, length)` of each part in the file."""
        ends, at = [], 0
        for part in parts:
            if self.stop.is_set():
                break
            nbytes = math.prod(part.shape) * self.target.dtype.itemsize
            self.budget.take(nbytes)
            try:
                tensor = part.make()
                if tuple(tensor.shape) != part.shape:
                    raise RuntimeError(f"{part.name} came with shape {tuple(tensor.shape)}, not {part.shape}")
                if part.place is None:
                    out = _At(fd, at)
                    torch.save(_alone(tensor), out)
                    out.flush()
                    ends.append((at, out.at - at))
                    at = -(-out.at // ALIGNMENT) * ALIGNMENT
                else:
                    _pwrite(fd, memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()), part.place)
                    ends.append((part.place, nbytes))
                del tensor
            finally:
                self.budget.give(nbytes)
            self.progress.add(nbytes)
        return ends


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage holds nothing else (`torch.save` writes whole storages), without copying its data."""
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize:
        return tensor
    raw = tensor.view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def write_journal(folder: Path, journal: dict) -> None:
    beside = folder / f"{JOURNAL}.tmp"
    beside.write_text(json.dumps(journal))
    os.replace(beside, folder / JOURNAL)


def read_journal(folder: Path) -> dict | None:
    try:
        return json.loads((folder / JOURNAL).read_text())
    except (OSError, ValueError):
        return None


def check_space(folder: Path, needed: int, *, freed: int = 0) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        UserError: fewer free bytes than `needed`.
    """
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free + freed
    if needed > free:
        raise UserError(f"{folder}: needs {needed / 1e9:.2f} GB but the disk has {free / 1e9:.2f} GB free: free some")
