"""`inspect`: what a model folder or checkpoint holds."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

from checkpoints_tools import hf_headers
from checkpoints_tools.detect import detect


def describe(path: Path) -> str:
    """A table of tensors and a summary; of a Megatron or inference checkpoint also its kind, layout and step.

    Raises:
        UserError: nothing that is known, or something that is damaged.
    """
    found = detect(path)
    if found.kind == "megatron":
        return _megatron(found.weights, found.step)
    if found.kind == "inference":
        return _inference(found.weights)
    return hf_headers.describe(path)


def _inference(folder: Path) -> str:
    from checkpoints_tools.sources import read_manifest

    manifest = read_manifest(folder)
    head = f"inference folder: {manifest.get('architecture')}, tp {manifest['tp']}, ep {manifest['ep']}"
    lines = [f"{head}, {manifest.get('dtype')}"]
    for rank, name in enumerate(manifest["files"]):
        lines += [f"rank {rank}: {name}", hf_headers.describe(folder / name)]
    return "\n".join(lines)


def _megatron(folder: Path, step: str | None) -> str:
    from megappo.checkpoint.torch_dist import TorchDistReader

    reader = TorchDistReader(folder)
    rows = []
    for name in sorted(reader.tensors):
        tensor = reader.tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = hf_headers.human(tensor.nbytes)
        rows.append((name, dtype, str(list(tensor.shape)), f"{len(tensor.chunks)} chunks", size))
    widths = [max(len(row[i]) for row in rows) for i in range(5)] if rows else [0] * 5
    lines = [f"Megatron torch_dist checkpoint{f', step {step}' if step else ''}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    weights = {n: t for n, t in reader.tensors.items() if not n.startswith("optimizer.")}
    elements = sum(math.prod(t.shape) for t in weights.values())
    total = sum(t.nbytes for t in reader.tensors.values())
    state = len(reader.tensors) - len(weights)
    text = f"{len(weights)} tensors of weights, {elements:,} elements; {state} of optimizer state; "
    lines.append(text + f"{len(reader.objects)} other objects; {total:,} bytes ({hf_headers.human(total)})")
    lines.append(f"largest split: {_layout(reader)}{_arguments(folder)}")
    return "\n".join(lines)


def _layout(reader) -> str:
    """In how many parts the attention weights lie: the tensor-parallel size of whoever wrote it."""
    qkv = next((t for n, t in reader.tensors.items() if n.endswith("linear_qkv.weight")), None)
    if qkv is None or not qkv.chunks:
        return "unknown"
    first = qkv.chunks[0]
    dim = len(qkv.shape) - 2
    return f"tp {qkv.shape[dim] // max(first.size[dim], 1)}"


def _arguments(folder: Path) -> str:
    """What common.pt says of the run, read as plain data; nothing where it holds more than that."""
    import argparse
    import pickle

    import torch

    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            common = torch.load(folder / "common.pt", map_location="cpu", weights_only=True)
        args = vars(common["args"]) if "args" in common else {}
        found = {"iteration": common.get("iteration")}
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        found |= {name.split("_")[0]: args.get(name) for name in names}
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError, TypeError, AttributeError, zipfile.BadZipFile):
        return "; common.pt holds more than plain data and was not read"
    return "".join(f", {name} {value}" for name, value in found.items() if value is not None)
