"""Where a conversion reads from. Each source answers with boxes of Hugging Face tensors, as views where it can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoints_tools.detect import MANIFEST, detect
from checkpoints_tools.detect import companions as find_companions
from megappo.bridge.algebra import Box, Piece, slices
from megappo.bridge.inference import InferenceWeights
from megappo.bridge.megatron import MegatronWeights
from megappo.checkpoint.hf import HFReader
from megappo.checkpoint.mapped import map_safetensors
from megappo.checkpoint.megatron_names import find_stored, stored_name
from megappo.checkpoint.torch_dist import TorchDistReader
from megappo.errors import UserError
from megappo.models.spec import ModelSpec, load_spec
from megappo.parallel.layout import ParallelLayout

VALUE_HEAD = ("score.weight", "score.bias")
Fetch = Callable[[Piece, Box], torch.Tensor]


@dataclass
class Source:
    """A model somewhere.

    Attributes:
        companions: folder with config.json, tokenizer, chat template, licence.
        dtypes: of every Hugging Face tensor.
        shapes: of every Hugging Face tensor, in the family's order.
        files: what it is made of, to notice a change.
        read: `(name, box) → values`, not to be written to.
    """

    path: Path
    kind: str
    spec: ModelSpec
    critic: bool
    companions: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    files: list[Path]
    read: Callable[[str, Box], torch.Tensor] = field(repr=False)
    step: str | None = None

    def whole(self, name: str) -> torch.Tensor:
        return self.read(name, tuple((0, n) for n in self.shapes[name]))

    def dtype(self) -> torch.dtype:
        """The one dtype of the model.

        Raises:
            UserError: there are several.
        """
        first = next(iter(self.dtypes))
        for name, dtype in self.dtypes.items():
            if dtype != self.dtypes[first]:
                raise UserError(
                    f"{self.path}: mixed dtypes: {first} is {_short(self.dtypes[first])}, {name} is {_short(dtype)}: "
                    f"choose one with --dtype"
                )
        return self.dtypes[first]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def open_source(path: Path, model: Path | None = None) -> Source:
    """Open a model of any kind and check that it is whole.

    Args:
        model: Hugging Face folder with the configuration and tokenizer, for checkpoints that have none beside them.

    Raises:
        UserError: not a model, an unknown architecture, or tensors that are missing, unknown or of the wrong shape.
    """
    found = detect(path)
    if found.kind == "file":
        raise UserError(f"{path} is a file: give the folder with its config.json")
    folder = model or find_companions(found, path)
    if folder is None and found.kind != "hf":
        raise UserError(f"{path} has no config.json beside it: name the model's Hugging Face folder with --model")
    folder = folder or path
    spec = load_spec(folder)
    opener = {"hf": _open_hf, "megatron": _open_megatron, "inference": _open_inference}[found.kind]
    critic, shapes, dtypes, files, read = opener(found.weights, spec)
    return Source(path, found.kind, spec, critic, folder, shapes, dtypes, files, read, found.step)


def _whole_model(spec: ModelSpec, critic: bool) -> MegatronWeights:
    return MegatronWeights(spec, ParallelLayout(), critic=critic, fused=True)


# ------------------------------------------------------------------ Hugging Face
def _open_hf(folder: Path, spec: ModelSpec):
    reader = HFReader(folder)
    critic = VALUE_HEAD[0] in reader.where
    shapes = _whole_model(spec, critic).hf_shapes()
    optional = {VALUE_HEAD[1]} if critic else set()
    if critic or spec.tied_embeddings:
        optional.add("lm_head.weight")
    reader.check(shapes, optional)
    files = sorted(set(reader.where.values()))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= map_safetensors(file)
    shapes = {name: shape for name, shape in shapes.items() if name in tensors}

    def read(name: str, box: Box) -> torch.Tensor:
        return tensors[name][slices(box)]

    return critic, shapes, {name: tensors[name].dtype for name in shapes}, files, read


# ------------------------------------------------------------------ sources in pieces
def _reader(pieces: Iterable[tuple[object, Piece]], fetch: Callable[[object, Piece, Box], torch.Tensor]):
    """`read(name, box)` over pieces: `fetch(owner, piece, local box)` brings one box of a piece's local tensor."""
    where: dict[str, list[tuple[object, Piece]]] = {}
    seen: set[tuple[str, Box]] = set()
    for owner, piece in pieces:
        if (piece.hf, piece.hf_box) not in seen:
            seen.add((piece.hf, piece.hf_box))
            where.setdefault(piece.hf, []).append((owner, piece))

    def read(name: str, box: Box) -> torch.Tensor:
        wanted = tuple(stop - start for start, stop in box)
        out = None
        for owner, piece in where[name]:
            common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, piece.hf_box, strict=True))
            if any(start >= stop for start, stop in common):
                continue
            local = tuple(
                (low + at[0] - hf[0], high + at[0] - hf[0])
                for (low, high), at, hf in zip(common, piece.local_box, piece.hf_box, strict=True)
            )
            part = fetch(owner, piece, local)
            if tuple(part.shape) == wanted:
                return part
            out = torch.empty(wanted, dtype=part.dtype) if out is None else out
            out[tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, box, strict=True))] = part
        return out

    return read


def _open_megatron(folder: Path, spec: ModelSpec):
    reader = TorchDistReader(folder)
    stored = reader.tensors
    critic = "output_layer.bias" in stored or (
        "output_layer.weight" in stored and stored["output_layer.weight"].shape[0] == 1 != spec.vocab_size
    )
    model = _whole_model(spec, critic)
    layers = range(spec.num_layers)
    experts = range(spec.moe.num_experts) if spec.moe else None
    names = {
        rule.local: find_stored(stored_name(spec, rule.local, layers, experts), stored) for _, rule in model.rules(0)
    }
    padded = {"embedding.word_embeddings.weight", *(() if critic else ("output_layer.weight",))}
    for _, rule in model.rules(0):
        name = names[rule.local]
        shape = (*name.count, *rule.shape)
        _check_stored(folder, reader, name.key, shape, vocabulary=rule.local in padded)
    known = {name.key for name in names.values()}
    _check_nothing_left(folder, reader, known, spec)

    def fetch(_: object, piece: Piece, box: Box) -> torch.Tensor:
        name = names[piece.local]
        return reader.read(name.key, name.index, box)

    dtypes = {piece.hf: stored[names[piece.local].key].dtype for _, piece in model.pieces(0)}
    files = [folder / ".metadata", *reader.files()]
    return critic, model.hf_shapes(), dtypes, files, _reader(model.pieces(0), fetch)


def _check_stored(folder: Path, reader: TorchDistReader, key: str, shape: tuple[int, ...], *, vocabulary: bool) -> None:
    if key not in reader.tensors:
        raise UserError(f"{folder}: tensor {key} is missing: the checkpoint is of another model, or damaged")
    found = reader.tensors[key]
    fits = found.shape[0] >= shape[0] and found.shape[1:] == shape[1:] if vocabulary else found.shape == shape
    if not fits:
        raise UserError(
            f"{folder}: tensor {key} has shape {list(found.shape)}, config.json implies {list(shape)}: "
            f"the two do not belong together"
        )
    if not found.dtype.is_floating_point or found.dtype.itemsize < 2:
        raise UserError(f"{folder}: tensor {key} has dtype {_short(found.dtype)}: quantized weights are not supported")


def _check_nothing_left(folder: Path, reader: TorchDistReader, known: set[str], spec: ModelSpec) -> None:
    """Weights that no rule names would be lost; optimizer state and empty extra states are not weights."""
    model = ("decoder.", "embedding.", "output_layer.")
    ignored = known | ({"output_layer.weight"} if spec.tied_embeddings else set())
    # The norm before a router has two names, see megatron_names.
    twice = (".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight") if spec.moe else ()
    unknown = sorted(k for k in reader.tensors if k.startswith(model) and k not in ignored and not k.endswith(twice))
    if unknown:
        raise UserError(
            f"{folder}: tensor {unknown[0]} is not part of this architecture ({len(unknown)} such tensors) and would "
            f"be lost: give the config.json that belongs to the checkpoint with --model"
        )


# ------------------------------------------------------------------ inference folders
def read_manifest(folder: Path) -> dict:
    """The manifest of an inference folder, checked.

    Raises:
        UserError: it is damaged or of a later version.
    """
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        tp, ep, files = manifest["tp"], manifest["ep"], manifest["files"]
        if manifest["version"] != 1 or len(files) != tp or tp % ep or not all(Path(f).name == f for f in files):
            raise ValueError("its entries contradict each other or are of a later version")
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise UserError(f"{file} is damaged ({' '.join(str(err).split())}): copy the folder again") from None
    return manifest


def _open_inference(folder: Path, spec: ModelSpec):
    manifest = read_manifest(folder)
    critic = bool(manifest.get("critic"))
    weights = InferenceWeights(spec, manifest["tp"], manifest["ep"], critic=critic)
    files = [folder / name for name in manifest["files"]]
    ranks: list[dict[str, torch.Tensor]] = []
    for file in files:
        try:
            ranks.append(map_safetensors(file))
        except OSError as err:
            raise UserError(f"{file} cannot be read ({err.strerror}): copy the folder again") from None
    for rank, file in enumerate(files):
        check_tensors(file, {n: tuple(t.shape) for n, t in ranks[rank].items()}, weights.local_shapes(rank))

    def fetch(owner: object, piece: Piece, box: Box) -> torch.Tensor:
        tensor = ranks[owner][piece.local]
        return (tensor if piece.entry is None else tensor[piece.entry])[slices(box)]

    pieces = [(rank, piece) for rank in weights.ranks for _, piece in weights.pieces(rank)]
    dtypes = {piece.hf: ranks[rank][piece.local].dtype for rank, piece in pieces}
    shapes = _whole_model(spec, critic).hf_shapes()
    return critic, shapes, {name: dtypes[name] for name in shapes}, [folder / MANIFEST, *files], _reader(pieces, fetch)


def check_tensors(file: Path, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """A file must hold exactly these tensors.

    Raises:
        UserError: naming the first that is missing, unknown or of another shape.
    """
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{file}: tensor {name} is missing: copy the folder again")
        if found[name] != shape:
            raise UserError(f"{file}: tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise UserError(f"{file}: tensor {unknown[0]} is not part of this layout ({len(unknown)} such tensors)")
