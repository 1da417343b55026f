"""What a Hugging Face folder holds: read from its safetensors headers, checked against the file sizes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import UserError

_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def describe(path: Path) -> str:
    """A table of the tensors under `path`, ordered by name, and a line of totals.

    Raises:
        UserError: there is no safetensors file, or one is truncated, damaged or missing from the index.
    """
    tensors = read_tensors(path)
    rows = [(t.name, t.dtype, str(list(t.shape)), human(t.nbytes)) for t in tensors]
    widths = [max(len(row[i]) for row in rows) for i in range(4)] if rows else [0] * 4
    lines = [
        f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}"
        for name, dtype, shape, size in rows
    ]
    elements = sum(math.prod(t.shape) for t in tensors)
    total = sum(t.nbytes for t in tensors)
    return "\n".join([*lines, f"{len(tensors)} tensors, {elements:,} elements, {total:,} bytes ({human(total)})"])


def read_tensors(path: Path) -> list[TensorInfo]:
    """The tensors of a folder (all shards) or of one file, ordered by name. Raises as `describe`."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    found: dict[str, tuple[TensorInfo, Path]] = {}
    for file in _files(path):
        for tensor in _read_header(file):
            if tensor.name in found:
                raise UserError(f"{file}: tensor {tensor.name} is also in {found[tensor.name][1].name}")
            found[tensor.name] = (tensor, file)
    if path.is_dir() and (path / _INDEX).exists():
        for name, file_name in _read_index(path / _INDEX).items():
            if name not in found or found[name][1].name != file_name:
                raise UserError(f"{path / _INDEX}: names {name} in {file_name}, which does not hold it")
    return [found[name][0] for name in sorted(found)]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / _INDEX).exists():
        files = [path / name for name in sorted(set(_read_index(path / _INDEX).values()))]
        for file in files:
            if not file.exists():
                raise UserError(f"{file}: named by {_INDEX} but missing: download or copy the folder again")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"{path}: holds no .safetensors file (pickled weights are not read)")
    return files


def _read_index(file: Path) -> dict[str, str]:
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as err:
        raise UserError(f"{file}: not a safetensors index (no readable weight_map)") from err
    if not isinstance(names, dict) or not all(_is_shard(v) for v in names.values()):
        raise UserError(f"{file}: weight_map must map tensor names to .safetensors files of this folder")
    return names


def _is_shard(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and "/" not in name


def _read_header(file: Path) -> list[TensorInfo]:
    """Parse one header: 8 bytes little-endian length, then JSON {name: {dtype, shape, data_offsets}}."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise UserError(f"{file}: truncated or not a safetensors file ({size} bytes)")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        spans = sorted((_tensor(name, entry) for name, entry in header.items()), key=lambda span: span[:2])
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise UserError(f"{file}: damaged safetensors header ({err})") from err
    end = 0
    for start, stop, tensor in spans:
        if start != end:
            raise UserError(f"{file}: damaged safetensors header ({tensor.name} does not follow its predecessor)")
        end = stop
    if 8 + length + end != size:
        raise UserError(f"{file}: {size} bytes, but its header asks for {8 + length + end}: truncated or damaged")
    return [tensor for _, _, tensor in spans]


def _tensor(name: str, entry: dict[str, Any]) -> tuple[int, int, TensorInfo]:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{name}: shape and offsets must be whole numbers")
    nbytes = math.prod(shape) * _BITS[entry["dtype"]] // 8 if entry["dtype"] in _BITS else stop - start
    if stop - start != nbytes:
        raise ValueError(f"{name}: shape and dtype take {nbytes} bytes, offsets span {stop - start}")
    return start, stop, TensorInfo(name, entry["dtype"], shape, nbytes)


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
