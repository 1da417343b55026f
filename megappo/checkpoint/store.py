"""A folder of checkpoints in which every checkpoint that can be seen is whole.

    checkpoints/
      latest                 name of the newest checkpoint
      stable                 name of the last checkpoint that the guard trusts; never deleted
      iter_000010/           manifest.json, state.json, one folder a role, …

A checkpoint is written as `iter_000010.partial`, gets a manifest of its files and sizes, and is renamed; one that
is deleted is renamed first. So a run that is killed at any moment leaves only whole checkpoints, and at least the
previous one. What a kill left half done is removed by the next save.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.errors import UserError

_NAME = re.compile(r"iter_(\d{6,})")
_PARTIAL = ".partial"  # not a checkpoint yet, or not any more


class CheckpointStore:
    """Checkpoints of one run under `root`, the newest `keep` of them. Shared by all ranks (one file system)."""

    def __init__(self, root: str | Path, keep: int = 3):
        self.root = Path(root)
        self.keep = keep

    def folder(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:06d}"

    def iterations(self) -> list[int]:
        """Iterations of the complete checkpoints, ascending."""
        if not self.root.is_dir():
            return []
        names = [_NAME.fullmatch(p.name) for p in self.root.iterdir() if p.is_dir()]
        return sorted(int(name[1]) for name in names if name)

    # -------------------------------------------------------------- writing
    def begin(self, iteration: int) -> Path:
        """An empty folder to write a checkpoint into. Collective."""
        partial = _partial(self.folder(iteration))
        if _rank() == 0:
            try:
                for left in self.root.glob(f"*{_PARTIAL}"):
                    shutil.rmtree(left, ignore_errors=True)
                partial.mkdir(parents=True)
            except OSError as err:
                raise UserError(f"cannot write {partial} ({err.strerror}): check trainer.output_dir") from None
        _barrier()
        return partial

    def commit(self, iteration: int) -> Path:
        """Make the checkpoint that was begun visible, and delete the oldest ones. Collective."""
        _barrier()
        final = self.folder(iteration)
        if _rank() == 0:
            partial = _partial(final)
            write_json(partial / "manifest.json", {"files": _sizes(partial)})
            replaced = final.with_name(f"{final.name}.replaced{_PARTIAL}")
            if final.exists():
                os.replace(final, replaced)
            os.replace(partial, final)
            _write_atomically(self.root / "latest", final.name + "\n")
            shutil.rmtree(replaced, ignore_errors=True)
            stable = self.stable_iteration()
            for old in (i for i in self.iterations()[: -self.keep] if i != stable):
                os.replace(self.folder(old), _partial(self.folder(old)))
                shutil.rmtree(_partial(self.folder(old)), ignore_errors=True)
        _barrier()
        return final

    def promote(self, iteration: int) -> None:
        """Mark a checkpoint as stable; on rank 0. A reader on another rank needs a barrier in between."""
        if _rank() == 0 and self.stable_iteration() != iteration:
            _write_atomically(self.root / "stable", self.folder(iteration).name + "\n")

    def set_aside(self) -> Path | None:
        """Rename a folder that holds checkpoints to the first free `checkpoints.N`; returns it. Collective.

        A new run in the folder of an earlier one must neither continue from its checkpoints nor delete them.
        """
        if not self.iterations():
            return None
        number = 1
        while self.root.with_name(f"{self.root.name}.{number}").exists():
            number += 1
        aside = self.root.with_name(f"{self.root.name}.{number}")
        _barrier()  # every rank has chosen the name
        if _rank() == 0:
            os.replace(self.root, aside)
        _barrier()
        return aside

    # -------------------------------------------------------------- reading
    def latest(self) -> Path | None:
        """The newest checkpoint after checking that it is whole, or None when there is none.

        Raises:
            UserError: a file is missing or has another size than it was written with; names the previous one.
        """
        iterations = self.iterations()
        if not iterations:
            return None
        newest = self.folder(iterations[-1])
        problem = _damage(newest)
        if problem:
            previous = f"iteration {iterations[-2]}" if len(iterations) > 1 else "the start"
            raise UserError(f"checkpoint {newest} is damaged: {problem}; delete it to continue from {previous}")
        return newest

    def stable_iteration(self) -> int | None:
        """Iteration of the last stable checkpoint; None if there is none (any more)."""
        try:
            name = _NAME.fullmatch((self.root / "stable").read_text().strip())
        except OSError:
            return None
        return int(name[1]) if name and self.folder(int(name[1])).is_dir() else None

    def stable(self) -> Path | None:
        """The last stable checkpoint after checking that it is whole, or None.

        Raises:
            UserError: a file is missing or has another size than it was written with.
        """
        iteration = self.stable_iteration()
        if iteration is None:
            return None
        problem = _damage(self.folder(iteration))
        if problem:
            raise UserError(f"checkpoint {self.folder(iteration)} is damaged: {problem}; delete it")
        return self.folder(iteration)


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + _PARTIAL)


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.stat().st_size for p in files}


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    manifest = _read_json(folder / "manifest.json")
    expected = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(expected, dict):
        return "manifest.json is missing or unreadable"
    actual = _sizes(folder)
    for name, size in expected.items():
        if name not in actual:
            return f"{name} is missing"
        if actual[name] != size:
            return f"{name} has {actual[name]} bytes instead of {size}"
    if "state.json" in expected:
        state = _read_json(folder / "state.json")
        iteration = state.get("iteration") if isinstance(state, dict) else None
        if not isinstance(iteration, int) or folder.name != f"iter_{iteration:06d}":
            return "state.json is unreadable, or of another iteration"
    return None


def _read_json(path: Path) -> Any:
    """What the file holds; None if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: dict) -> None:
    _write_atomically(path, json.dumps(value, indent=1) + "\n")


def _write_atomically(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(beside, path)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
