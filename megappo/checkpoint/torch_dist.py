"""Megatron's `torch_dist` checkpoint format without Megatron and without process groups: read boxes, write chunks.

A checkpoint is a folder: `.metadata` (which chunk of which tensor lies where), `*.distcp` (the chunks, each as
`torch.save` writes it), `common.pt` (what is no tensor) and `metadata.json` (the format's name). `.metadata` is a
pickle, so it is read by an unpickler that knows the few plain classes it is made of and refuses everything else;
the chunks are located by their zip directory and mapped, and the description of their strides goes through an
unpickler that can build nothing at all.

Sources: torch.distributed.checkpoint (filesystem.py, metadata.py), megatron.core.dist_checkpointing.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megappo.bridge.algebra import Box
from megappo.checkpoint.mapped import map_bytes, typed_view
from megappo.errors import UserError

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_PLAIN_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." in name:
            raise pickle.UnpicklingError(f"refused {module}.{name}")
        found = getattr(__import__(module, fromlist=[name]), name, None) if _may_import(module) else None
        plain_class = module in _PLAIN_MODULES and isinstance(found, type) and found.__module__ == module
        if plain_class or (module, name) in _PLAIN or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise pickle.UnpicklingError(f"refused {module}.{name}")


def _may_import(module: str) -> bool:
    return module == "torch" or module in _PLAIN_MODULES or any(module == known for known, _ in _PLAIN)


class _StrideUnpickler(pickle.Unpickler):
    """Turns the pickle beside a saved tensor into `(storage, offset, size, stride)` and builds no tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, size, stride)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"refused {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _record(raw: torch.Tensor, info: zipfile.ZipInfo) -> torch.Tensor:
    """The bytes of an uncompressed record, past its local header (30 bytes, then a name and extra fields)."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    header = raw[info.header_offset : info.header_offset + 30].tolist()
    start = info.header_offset + 30 + (header[26] | header[27] << 8) + (header[28] | header[29] << 8)
    return raw[start : start + info.file_size]


@dataclass(frozen=True)
class Chunk:
    """A box of a stored tensor, and where it lies: `length` bytes of `file` from `start` on."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass
class StoredTensor:
    """One tensor of the checkpoint. Leading dimensions may count layers and experts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Window(io.RawIOBase):
    """A stretch of a mapped file as a file, for the zip reader."""

    def __init__(self, raw: torch.Tensor):
        self._data, self._at = memoryview(raw.numpy()), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        found = self._data[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


class TorchDistReader:
    """Random access to the tensors of a `torch_dist` checkpoint.

    Raises:
        UserError: no such checkpoint, another format, or a description that is damaged or not plain data.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._check_format()
        self.tensors, self.objects = self._read_metadata()
        self._check_files()
        self._map = cache(self._map_file)
        self._where: dict[str, dict[tuple[int, ...], list[Chunk]]] = {}

    def _check_format(self) -> None:
        file = self.folder / "metadata.json"
        try:
            backend = json.loads(file.read_text()).get("sharded_backend")
        except (OSError, ValueError, AttributeError):
            raise UserError(f"{file} is missing or unreadable: give a Megatron torch_dist checkpoint") from None
        if backend != "torch_dist":
            raise UserError(f"{file}: format {backend} is not supported, only torch_dist: convert it with Megatron-LM")

    def _read_metadata(self) -> tuple[dict[str, StoredTensor], dict[str, int]]:
        """`({name: tensor}, {name of what is no tensor: bytes})`."""
        file = self.folder / ".metadata"
        try:
            with file.open("rb") as stream:
                found = _MetadataUnpickler(stream).load()
            tensors, objects = {}, {}
            places = {(index.fqn, tuple(index.offset or ())): info for index, info in found.storage_data.items()}
            for name, entry in found.state_dict_metadata.items():
                if not hasattr(entry, "chunks"):
                    objects[name] = places[(name, ())].length
                    continue
                tensor = tensors[name] = StoredTensor(tuple(entry.size), entry.properties.dtype)
                for chunk in entry.chunks:
                    info = places[(name, tuple(chunk.offsets))]
                    place = (str(info.relative_path), info.offset, info.length)
                    if "/" in place[0]:
                        raise ValueError(f"{name} lies outside the folder")
                    tensor.chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *place))
        except OSError:
            raise UserError(f"{file} is missing or unreadable: was the checkpoint written to its end?") from None
        except pickle.UnpicklingError as err:
            raise UserError(f"{file} is damaged, or holds more than plain data ({err}): it is not read") from None
        except (EOFError, AttributeError, KeyError, TypeError, ValueError, ImportError, IndexError) as err:
            raise UserError(f"{file} is damaged ({type(err).__name__}: {err}): copy the checkpoint again") from None
        return tensors, objects

    def _check_files(self) -> None:
        """Every chunk must lie inside its file."""
        ends: dict[str, tuple[int, str]] = {}
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, (0, "")), (chunk.start + chunk.length, name))
        for name, (end, tensor) in sorted(ends.items()):
            file = self.folder / name
            if not file.is_file():
                raise UserError(f"{file} is missing, though .metadata names it: copy the checkpoint again")
            if file.stat().st_size < end:
                raise UserError(f"{file}: tensor {tensor} is damaged or cut short (the file ends before it does)")

    def files(self) -> list[Path]:
        """Every file that holds tensors."""
        names = {chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks}
        return [self.folder / name for name in sorted(names)]

    def _map_file(self, name: str) -> torch.Tensor:
        try:
            return map_bytes(self.folder / name)
        except OSError as err:
            raise UserError(
                f"{self.folder / name} cannot be read ({err.strerror}): copy the checkpoint again"
            ) from None

    def _chunk(self, name: str, chunk: Chunk) -> torch.Tensor:
        """View of a chunk, shape `chunk.size`."""
        file = self.folder / chunk.file
        raw = self._map(chunk.file)[chunk.start : chunk.start + chunk.length]
        dtype = self.tensors[name].dtype
        try:
            if len(raw) != chunk.length:
                raise ValueError(f"ends {chunk.length - len(raw)} bytes too early")
            with zipfile.ZipFile(_Window(raw)) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            description, storage = (_record(raw, records[name]) for name in ("data.pkl", "data/0"))
            _, offset, size, stride = _StrideUnpickler(io.BytesIO(description.numpy().tobytes())).load()
            if tuple(size) != chunk.size or len(storage) % dtype.itemsize:
                raise ValueError(f"holds shape {list(size)} where .metadata says {list(chunk.size)}")
            flat = typed_view(storage, dtype, (-1,))
            return flat.as_strided(size, stride, flat.storage_offset() + offset)
        except (ValueError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError, KeyError, TypeError) as err:
            why = " ".join(str(err).split())
            raise UserError(f"{file}: tensor {name} is damaged or cut short ({why}): copy it again") from None

    def read(self, name: str, index: tuple[int, ...], box: Box) -> torch.Tensor:
        """The values of `box` of entry `index` (its leading dimensions) of tensor `name`; a view if one chunk has it.

        Raises:
            UserError: a chunk is damaged, or no chunk holds a part of the box.
        """
        wanted = tuple(stop - start for start, stop in box)
        out, filled = None, 0
        for chunk in self._entry(name, index):
            offset, size = chunk.offset[len(index) :], chunk.size[len(index) :]
            low = [max(b[0], o) for b, o in zip(box, offset, strict=True)]
            high = [min(b[1], o + s) for b, o, s in zip(box, offset, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            entry = tuple(i - o for i, o in zip(index, chunk.offset, strict=False))
            part = self._chunk(name, chunk)[entry]
            part = part[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
            if tuple(part.shape) == wanted:
                return part
            if out is None:
                out = torch.empty(wanted, dtype=part.dtype)
            out[tuple(slice(a - s, b - s) for a, b, (s, _) in zip(low, high, box, strict=True))] = part
            filled += part.numel()
        if out is None or filled != out.numel():
            raise UserError(f"{self.folder}/.metadata: tensor {name} is incomplete at {list(index)} {list(box)}")
        return out

    def _entry(self, name: str, index: tuple[int, ...]) -> list[Chunk]:
        """The chunks that hold something of entry `index`."""
        depth = len(index)
        if name not in self._where:
            where = self._where[name] = {}
            for chunk in self.tensors[name].chunks:
                ranges = [range(o, o + s) for o, s in zip(chunk.offset[:depth], chunk.size[:depth], strict=True)]
                for at in _product(ranges):
                    where.setdefault(at, []).append(chunk)
        return self._where[name].get(index, [])


def _product(ranges: list[range]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for values in ranges:
        out = [(*head, value) for head in out for value in values]
    return out


def write_metadata(folder: Path, tensors: dict[str, StoredTensor], objects: dict[str, Chunk]) -> None:
    """Write `.metadata` and `metadata.json`, which make the chunks in `folder` a checkpoint."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in objects}
    places = {MetadataIndex(name): _StorageInfo(c.file, c.start, c.length) for name, c in objects.items()}
    for name, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.size)) for c in tensor.chunks]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)
        for i, c in enumerate(tensor.chunks):
            places[MetadataIndex(name, torch.Size(c.offset), i)] = _StorageInfo(c.file, c.start, c.length)
    with (folder / ".metadata").open("wb") as out:
        pickle.dump(Metadata(entries, None, places), out)
    (folder / "metadata.json").write_text(json.dumps(FORMAT))
