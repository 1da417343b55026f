"""Hugging Face folders: read slices of safetensors, write a folder that `transformers` loads."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from megappo.bridge.algebra import Box, slices
from megappo.config.model_folder import export_problem
from megappo.errors import UserError

SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
# Tensors that some exporters write although they are derived from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)
_FLOATS = ("F64", "F32", "F16", "BF16")
# In config.json and in safetensors.
_NAMES = {torch.float32: ("float32", "F32"), torch.bfloat16: ("bfloat16", "BF16"), torch.float16: ("float16", "F16")}
# Weights in any format: an export must not carry the source's along.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ot", ".onnx", ".index.json")


class HFReader:
    """Random access to the tensors of a Hugging Face folder, one file or many, without loading them whole.

    Raises:
        UserError: no safetensors, a damaged index, a file that is missing, unreadable, damaged or cut short.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[Path, object] = {}
        self.where = self._locate()

    def _locate(self) -> dict[str, Path]:
        """The file of every tensor. As in transformers, `model.safetensors` comes before an index; what else lies
        beside them (adapters, other formats) is not the model."""
        whole, index = self.folder / "model.safetensors", self.folder / INDEX
        promised = _read_index(index) if index.is_file() and not whole.is_file() else {}
        others = [whole] if whole.is_file() else sorted(self.folder.glob("*.safetensors"))
        files = sorted({self.folder / name for name in promised.values()}) or others
        if not files:
            what = "holds no *.safetensors" if self.folder.is_dir() else "does not exist"
            raise UserError(f"{self.folder} {what}: give a Hugging Face folder with safetensors weights")
        where: dict[str, Path] = {}
        for file in files:
            for name in self._open(file).keys():  # noqa: SIM118 (safe_open is not a dict)
                if name in where:
                    raise UserError(f"{file}: tensor {name} is also in {where[name].name}; remove the stale file")
                where[name] = file
        for name, file in promised.items():
            if where.get(name) != self.folder / file:
                raise UserError(f"{index}: tensor {name} is not in {file} as it says: copy the folder again")
        return {name: file for name, file in where.items() if not name.endswith(_DERIVED)}

    def _open(self, file: Path):
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except FileNotFoundError:
                raise UserError(f"{file} is missing, though {INDEX} names it: copy the folder again") from None
            except SafetensorError as err:
                raise UserError(f"{file} is damaged or cut short ({_one_line(err)}): copy it again") from None
            except OSError as err:
                raise UserError(f"{file} cannot be read ({_one_line(err)}): check the file") from None
        return self._files[file]

    def check(self, shapes: dict[str, tuple[int, ...]], optional: Iterable[str] = ()) -> None:
        """The folder must hold exactly these tensors with these shapes; `optional` ones may be there or not.

        Raises:
            UserError: naming the first tensor that is missing, unknown, of another shape or not of floating point.
        """
        optional = set(optional)
        for name, shape in shapes.items():
            if name not in self.where:
                if name in optional:
                    continue
                raise UserError(f"{self.folder}: tensor {name} is missing from the checkpoint: copy the folder again")
            found = self._open(self.where[name]).get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise UserError(
                    f"{self.where[name]}: tensor {name} has shape {found.get_shape()}, "
                    f"config.json implies {list(shape)}: the two do not belong together"
                )
            if found.get_dtype() not in _FLOATS:
                raise UserError(
                    f"{self.where[name]}: tensor {name} has dtype {found.get_dtype()}: quantized weights are not "
                    f"supported, give the model in bf16, fp16 or fp32"
                )
        unknown = sorted(self.where.keys() - shapes.keys() - optional)
        if unknown:
            raise UserError(
                f"{self.where[unknown[0]]}: tensor {unknown[0]} is not part of this architecture "
                f"({len(unknown)} such tensors) and would be lost: give the config.json that belongs to the weights"
            )

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values of `box` of tensor `name`."""
        try:
            return self._open(self.where[name]).get_slice(name)[slices(box)]
        except SafetensorError as err:
            raise UserError(f"{self.where[name]}: tensor {name} cannot be read ({_one_line(err)})") from None


def _read_index(file: Path) -> dict[str, str]:
    """`{tensor: file name}` of an index."""
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) and name == os.path.basename(name) for name in names.values()):
            raise ValueError("it names files outside the folder")
    except OSError as err:
        raise UserError(f"{file} cannot be read ({_one_line(err)}): check the file") from None
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise UserError(f"{file} is no safetensors index ({_one_line(err)}): copy the folder again") from None
    return names


def _one_line(err: Exception) -> str:
    text = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
    return " ".join(text.split())


def write_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    shapes: dict[str, tuple[int, ...]],
    source: Path,
    out: Path,
    dtype: torch.dtype,
    *,
    write: bool = True,
    config_changes: dict | None = None,
    extra_files: dict[str, str] | None = None,
) -> None:
    """Write a Hugging Face folder: weights from `tensors`, everything else copied from the folder `source`.

    `shapes` names every tensor that will come, in the order of the files; none is held longer than it takes to
    write it. `dtype` is fp32, bf16 or fp16.

    Written beside `out` and renamed, so a folder that exists is a whole one; an earlier export there stays until
    then, and stays for good if anything fails. Ranks that pass `write=False` only drain `tensors` (which is a
    collective). `extra_files`: text of further files by name.

    Raises:
        UserError: the target cannot be written, or is a folder that an export must not replace.
    """
    if not write:
        for _ in tensors:
            pass
        return
    wrong = export_problem(str(out), str(source))
    if wrong:
        raise UserError(f"cannot export to {out}: {wrong}")
    target = Path(os.path.realpath(out))
    partial = target.with_name(target.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        copy_companions(source, partial)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.update({"dtype": _NAMES[dtype][0]} | (config_changes or {}))
        config.pop("torch_dtype", None)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, text in (extra_files or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        _write_shards(tensors, shapes, partial, dtype)
        _replace(partial, target)
    except OSError as err:
        at = f" ({err.filename})" if err.filename else ""
        raise UserError(f"cannot write {out}: {_one_line(err)}{at}; nothing there was changed") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(partial: Path, target: Path) -> None:
    """Put the finished folder in place; what was there before comes back if that fails."""
    previous = target.with_name(target.name + ".previous")
    shutil.rmtree(previous, ignore_errors=True)
    if not target.exists():
        os.replace(partial, target)
        return
    os.replace(target, previous)
    try:
        os.replace(partial, target)
    except OSError:
        os.replace(previous, target)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def copy_companions(source: Path, target: Path, skip: Iterable[str] = ()) -> None:
    """Tokenizer, chat template, generation settings, licence: everything small that is not weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in ("config.json", *skip):
            shutil.copy2(file, target / file.name)


@dataclass
class Shard:
    """One safetensors file to be: `size` bytes of tensors, placed one after the other."""

    name: str = ""
    size: int = 0
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def header(self, shapes: dict[str, tuple[int, ...]], dtype: str) -> bytes:
        """8 bytes of length, then JSON, padded with spaces so that the tensors start at a multiple of 8."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, place in self.places.items():
            entries[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": place}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan_shards(shapes: dict[str, tuple[int, ...]], itemsize: int) -> list[Shard]:
    """Tensors in the order of `shapes`, at most SHARD_BYTES a file unless one alone is larger."""
    shards = [Shard()]
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
        if shards[-1].places and shards[-1].size + nbytes > SHARD_BYTES:
            shards.append(Shard())
        shard = shards[-1]
        shard.places[name] = (shard.size, shard.size + nbytes)
        shard.size += nbytes
    for i, shard in enumerate(shards):
        shard.name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
    return shards


def _write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], shapes: dict[str, tuple[int, ...]], folder: Path, dtype: torch.dtype
) -> None:
    """Every tensor goes straight to its place in its file, in whatever order it comes."""
    shards = plan_shards(shapes, dtype.itemsize)
    total = sum(shard.size for shard in shards)
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(errno.ENOSPC, f"needs {total / 1e9:.2f} GB but only {free / 1e9:.2f} GB are free")
    with ExitStack() as files:
        at: dict[str, tuple[BinaryIO, int]] = {}
        for shard in shards:
            file = files.enter_context((folder / shard.name).open("wb"))
            header = shard.header(shapes, _NAMES[dtype][1])
            file.write(header)
            at |= {name: (file, len(header) + start) for name, (start, _) in shard.places.items()}
        for name, tensor in tensors:
            if name not in at:
                raise RuntimeError(f"tensor {name} came twice or is not part of the model")
            file, offset = at.pop(name)
            if tuple(tensor.shape) != shapes[name]:
                raise RuntimeError(f"tensor {name} came with shape {tuple(tensor.shape)}, not {shapes[name]}")
            _put(file, offset, tensor.detach().to("cpu", dtype))
        if at:
            raise RuntimeError(f"{len(at)} tensors never came, first {next(iter(at))}")
    if len(shards) > 1:
        weight_map = {name: shard.name for shard in shards for name in shard.places}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _put(file: BinaryIO, offset: int, tensor: torch.Tensor) -> None:
    file.seek(offset)
    file.write(tensor.contiguous().view(torch.uint8).numpy().data)
