"""Hugging Face folders: read slices of safetensors, write a folder that `transformers` loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megappo.bridge.algebra import Box, slices
from megappo.errors import UserError

SHARD_BYTES = 4 << 30
# Tensors that some exporters write although they are derived from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class HFReader:
    """Random access to the tensors of a Hugging Face folder, one file or many, without loading them whole.

    Raises:
        UserError: no safetensors, a truncated file, a tensor missing from the index or the files.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files: dict[Path, object] = {}
        self.where = self._index()

    def _index(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            files = {self.folder / file for file in names.values()}
        else:
            files = set(self.folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{self.folder} holds no *.safetensors: model.path must be a Hugging Face folder")
        where: dict[str, Path] = {}
        for file in sorted(files):
            for name in self._open(file).keys():  # noqa: SIM118 (safe_open is not a dict)
                where[name] = file
        return {name: file for name, file in where.items() if not name.endswith(_DERIVED)}

    def _open(self, file: Path):
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except FileNotFoundError:
                raise UserError(f"{file} is missing, though the index names it: copy the folder again") from None
            except (SafetensorError, OSError) as err:
                raise UserError(f"{file} is damaged or cut short ({err}): copy it again") from None
        return self._files[file]

    def check(self, shapes: dict[str, tuple[int, ...]], optional: Iterable[str] = ()) -> None:
        """The folder must hold exactly these tensors with these shapes; `optional` ones may be there or not.

        Raises:
            UserError: naming the first tensor that is missing, unknown or of another shape.
        """
        optional = set(optional)
        for name, shape in shapes.items():
            if name not in self.where:
                if name in optional:
                    continue
                raise UserError(f"{self.folder}: tensor {name} is missing from the checkpoint")
            actual = tuple(self._open(self.where[name]).get_slice(name).get_shape())
            if actual != shape:
                raise UserError(
                    f"{self.where[name]}: tensor {name} has shape {list(actual)}, config.json implies {list(shape)}"
                )
        unknown = sorted(self.where.keys() - shapes.keys() - optional)
        if unknown:
            raise UserError(
                f"{self.where[unknown[0]]}: tensor {unknown[0]} is not part of this architecture "
                f"({len(unknown)} such tensors); it would be silently dropped"
            )

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values of `box` of tensor `name`."""
        try:
            return self._open(self.where[name]).get_slice(name)[slices(box)]
        except SafetensorError as err:
            raise UserError(f"{self.where[name]}: tensor {name} cannot be read ({err})") from None


def write_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: Path,
    out: Path,
    dtype: torch.dtype,
    *,
    write: bool = True,
    config_changes: dict | None = None,
) -> None:
    """Write a Hugging Face folder: weights from `tensors`, everything else copied from the folder `source`.

    Written beside `out` and renamed, so a folder that exists is a whole one. Ranks that pass `write=False` only
    drain `tensors` (which is a collective).

    Raises:
        UserError: the target cannot be written.
    """
    if not write:
        for _ in tensors:
            pass
        return
    partial = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _copy_companions(source, partial)
        config = json.loads((source / "config.json").read_text())
        config.update({"dtype": _DTYPE_NAMES[dtype]} | (config_changes or {}))
        config.pop("torch_dtype", None)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_shards(tensors, partial, dtype)
        previous = out.with_name(out.name + ".previous")
        shutil.rmtree(previous, ignore_errors=True)
        if out.exists():
            os.replace(out, previous)
        os.replace(partial, out)
        shutil.rmtree(previous, ignore_errors=True)
    except OSError as err:
        raise UserError(f"cannot write {out}: {err.strerror or err}") from None


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation settings, licence: everything small that is not weights."""
    for file in sorted(source.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copy2(file, target / file.name)


def _write_shards(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, dtype: torch.dtype) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    names: list[list[str]] = []

    def flush() -> None:
        file = folder / f"part-{len(names):05d}.safetensors"
        save_file(shards[0], file, metadata={"format": "pt"})
        names.append(list(shards[0]))
        shards[0], sizes[0] = {}, 0

    total = 0
    for name, tensor in tensors:
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        if shards[0] and sizes[0] + nbytes > SHARD_BYTES:
            flush()
        shards[0][name] = tensor
        sizes[0] += nbytes
        total += nbytes
    flush()
    if len(names) == 1:
        os.replace(folder / "part-00000.safetensors", folder / "model.safetensors")
        return
    weight_map = {}
    for i, shard in enumerate(names):
        final = f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        os.replace(folder / f"part-{i:05d}.safetensors", folder / final)
        weight_map.update(dict.fromkeys(shard, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
