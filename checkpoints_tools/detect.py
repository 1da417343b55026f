"""What kind of thing a path is: a Hugging Face folder, a Megatron checkpoint or an inference folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from megappo.errors import UserError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = "megappo-inference"
TRACKER = "latest_checkpointed_iteration.txt"
COMPANIONS = "hf"  # inside a Megatron checkpoint: config.json, tokenizer and the like


@dataclass(frozen=True)
class Found:
    """`kind`: hf, megatron, inference or file. `weights`: the folder that holds the tensors. `step`: as the folder
    names it, if it does."""

    kind: str
    weights: Path
    step: str | None = None


def detect(path: Path) -> Found:
    """Look at a path.

    Raises:
        UserError: nothing there, or nothing that is known.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_file():
        return Found("file", path)
    if (path / TRACKER).is_file():
        return _tracked(path)
    if (path / "metadata.json").is_file() or (path / ".metadata").is_file():
        step = re.fullmatch(r"iter_0*(\d+)", path.name) or re.fullmatch(r"iter_0*(\d+)", path.parent.name)
        return Found("megatron", path, step[1] if step else None)
    if is_inference(path):
        return Found("inference", path)
    if (path / "latest").is_file() and list(path.glob("iter_*")):
        newest = (path / "latest").read_text().strip()
        raise UserError(f"{path} holds the checkpoints of a run: give a role of one of them, as {path / newest}/actor")
    roles = sorted(p.parent.name for p in path.glob("*/metadata.json"))
    if roles:
        raise UserError(f"{path} holds several roles ({', '.join(roles)}): give one, as {path / roles[0]}")
    if list(path.glob("mp_rank_*")) or list(path.glob("iter_*/mp_rank_*")):
        raise UserError(f"{path}: Megatron's old torch format is a pickle; save it with --ckpt-format torch_dist")
    return Found("hf", path)


def _tracked(path: Path) -> Found:
    """A folder as Megatron-LM's training loop keeps it: the tracker names the newest iteration."""
    step = (path / TRACKER).read_text(errors="replace").strip()
    if step != "release" and not step.isdigit():
        raise UserError(f"{path / TRACKER}: {step[:40]!r} is neither an iteration nor 'release'")
    name = step if step == "release" else f"iter_{int(step):07d}"
    if not (path / name).is_dir():
        raise UserError(f"{path / TRACKER} names {name}, which is not there: copy the checkpoint again")
    return Found("megatron", path / name, step)


def is_inference(path: Path) -> bool:
    try:
        return json.loads((path / MANIFEST).read_text()).get("format") == MANIFEST_FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def companions(found: Found, path: Path) -> Path | None:
    """The folder with the model's config.json and tokenizer that belongs to a source, if there is one."""
    if found.kind == "file":
        return found.weights.parent
    places = [path, path / COMPANIONS, found.weights, found.weights / COMPANIONS, found.weights.parent / COMPANIONS]
    return next((place for place in places if (place / "config.json").is_file()), None)
