"""What a conversion writes: files, each a list of tensors that can be made one at a time."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from checkpoints_tools.detect import COMPANIONS, MANIFEST, MANIFEST_FORMAT, TRACKER
from checkpoints_tools.sources import Source
from megappo.bridge.algebra import Box, Rule, local_shape, pieces, slices
from megappo.bridge.inference import InferenceWeights
from megappo.bridge.megatron import MegatronWeights
from megappo.checkpoint.hf import INDEX, plan_shards
from megappo.checkpoint.megatron_names import NORM, NORM_UNFUSED, extra_states, stored_name
from megappo.checkpoint.torch_dist import Chunk, StoredTensor, write_metadata
from megappo.parallel.layout import ParallelLayout

_HF_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Part:
    """One tensor of an output file. `place`: its first byte, None when parts follow each other as they come."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]
    place: int | None = None
    stored: tuple[str, tuple[int, ...]] | None = None  # Megatron: tensor and offset of the chunk


@dataclass
class OutFile:
    """One file to be: its path inside the target, what stands before the first tensor, and the tensors."""

    name: str
    header: bytes = b""
    parts: list[Part] = field(default_factory=list)

    def size(self, itemsize: int) -> int:
        """Bytes, a little less for Megatron's files, which describe each tensor once more."""
        return len(self.header) + sum(math.prod(part.shape) for part in self.parts) * itemsize


@dataclass
class Target:
    """Files, the folder for the companions, and what is written when all files are there.

    `finish(folder, ends)`: `ends` maps each file to the `(start, length)` of its parts.
    """

    kind: str
    files: list[OutFile]
    companions: str
    finish: Callable[[Path, dict[str, list[tuple[int, int]]]], None]
    dtype: torch.dtype

    def bytes(self) -> int:
        return sum(file.size(self.dtype.itemsize) for file in self.files)


def assemble(source: Source, rule: Rule, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """One parameter on shard `index` of `count`: without a copy where the source has it in one piece."""
    shape = local_shape(rule, count)
    found = pieces(rule, index, count)
    if len(found) == 1 and found[0].numel == math.prod(shape) and found[0].hf in source.shapes:
        return source.read(found[0].hf, found[0].hf_box).to(dtype)
    out = torch.empty(shape, dtype=dtype)
    if sum(piece.numel for piece in found) < out.numel():
        out.zero_()  # padding
    for piece in found:
        if piece.hf in source.shapes:
            out[slices(piece.local_box)] = source.read(piece.hf, piece.hf_box)
        else:
            out[slices(piece.local_box)] = 0  # a value head's bias that the source does not have
    return out


# ------------------------------------------------------------------ Hugging Face
def hf_target(source: Source, dtype: torch.dtype) -> Target:
    files: list[OutFile] = []
    shards = plan_shards(source.shapes, dtype.itemsize)
    for shard in shards:
        header = shard.header(source.shapes, _HF_NAMES[dtype])
        file = OutFile(shard.name, header)
        for name, (start, _) in shard.places.items():
            file.parts.append(Part(name, source.shapes[name], _whole(source, name, dtype), len(header) + start))
        files.append(file)

    def finish(folder: Path, _: object) -> None:
        if len(shards) > 1:
            weight_map = {name: shard.name for shard in shards for name in shard.places}
            index = {"metadata": {"total_size": sum(shard.size for shard in shards)}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    return Target("hf", files, ".", finish, dtype)


def _whole(source: Source, name: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: source.whole(name).to(dtype)


# ------------------------------------------------------------------ inference
def inference_target(source: Source, weights: InferenceWeights, dtype: torch.dtype) -> Target:
    files = []
    for rank in weights.ranks:
        shapes = weights.local_shapes(rank)
        header, places = _header(shapes, dtype)
        entries: dict[str, list[Rule]] = {}
        for _, rule in weights.rules(rank):
            entries.setdefault(rule.local, []).append(rule)
        file = OutFile(f"model-rank-{rank}-part-0.safetensors", header)
        for name, rules in entries.items():
            size = math.prod(local_shape(rules[0], weights.shard(rules[0], rank)[1])) * dtype.itemsize
            for i, rule in enumerate(rules):  # entries of a stack lie one after the other
                shard = weights.shard(rule, rank)
                make = _local(source, rule, shard, dtype)
                file.parts.append(Part(name, local_shape(rule, shard[1]), make, places[name] + i * size))
        files.append(file)
    manifest = {
        "format": MANIFEST_FORMAT,
        "version": 1,
        "architecture": source.spec.architecture,
        "tp": weights.tp,
        "ep": weights.ep,
        "critic": weights.critic,
        "dtype": str(dtype).removeprefix("torch."),
        "files": [file.name for file in files],
    }

    def finish(folder: Path, _: object) -> None:
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    return Target("inference", files, ".", finish, dtype)


def _header(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, dict[str, int]]:
    """A safetensors header, and the first byte of each tensor in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _HF_NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + entry["data_offsets"][0] for name, entry in list(entries.items())[1:]}
    return header, starts


def _local(source: Source, rule: Rule, shard: tuple[int, int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: assemble(source, rule, *shard, dtype)


# ------------------------------------------------------------------ Megatron
def megatron_target(source: Source, layout: ParallelLayout, dtype: torch.dtype) -> Target:
    """Two files a rank, as megatron-core writes; what several ranks hold is written by the first of them."""
    weights = MegatronWeights(source.spec, layout, critic=source.critic, fused=True)
    tensors: dict[str, StoredTensor] = {}
    files: list[OutFile] = []
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for rank in layout.ranks:
        mine = [part for part in _chunks(source, weights, rank, dtype, tensors) if part.stored not in seen]
        seen |= {part.stored for part in mine}
        pair, sizes = [OutFile(f"release/__{rank}_{i}.distcp") for i in range(2)], [0, 0]
        for part in sorted(mine, key=lambda part: -math.prod(part.shape)):
            which = sizes.index(min(sizes))
            pair[which].parts.append(part)
            sizes[which] += math.prod(part.shape)
        files += [file for file in pair if file.parts]

    def finish(folder: Path, ends: dict[str, list[tuple[int, int]]]) -> None:
        for file in files:
            for part, (start, length) in zip(file.parts, ends[file.name], strict=True):
                name, offset = part.stored
                tensors[name].chunks.append(Chunk(offset, part.shape, Path(file.name).name, start, length))
        objects = _write_objects(folder / "release" / "__0_2.distcp", source)
        write_metadata(folder / "release", tensors, objects)
        torch.save(_common(source, layout), folder / "release" / "common.pt")
        (folder / TRACKER).write_text("release")

    return Target("megatron", files, COMPANIONS, finish, dtype)


def _chunks(
    source: Source, weights: MegatronWeights, rank: int, dtype: torch.dtype, tensors: dict[str, StoredTensor]
) -> Iterator[Part]:
    """The chunks that `rank` holds; their tensors are added to `tensors`."""
    spec, layout = source.spec, weights.layout
    for chunk, rule in weights.rules(rank):
        if rule.local == "output_layer.weight" and spec.tied_embeddings and not source.critic:
            continue  # stored once, as the embedding
        layers = layout.layers(spec.num_layers, layout.coordinates(rank).pp, chunk)
        name = stored_name(spec, rule.local, layers, weights.experts(rank))
        index, count = weights.shard(rule, rank)
        dim, base = rule.dim or 0, 0
        for group in rule.groups:  # gate and up are chunks of their own
            total = sum(span.size for span in group)
            shape = tuple(total if d == dim else n for d, n in enumerate(rule.shape))
            one = replace(rule, groups=(group,), shape=shape)
            local = local_shape(one, count)
            start = base + (index * local[dim] if rule.dim is not None else 0)
            offset = tuple(start if d == dim else 0 for d in range(len(shape)))
            for key in (name.key, NORM_UNFUSED) if name.key == NORM else (name.key,):
                tensors.setdefault(key, StoredTensor((*name.count, *rule.shape), dtype))
                lead = (1,) * len(name.index)
                make = _entry(source, one, (index, count), dtype, (*lead, *local))
                yield Part(rule.local, (*lead, *local), make, None, (key, (*name.index, *offset)))
            base += total


def _entry(source: Source, rule: Rule, shard: tuple[int, int], dtype: torch.dtype, shape: Box):
    return lambda: assemble(source, rule, *shard, dtype).reshape(shape)


def _write_objects(file: Path, source: Source) -> dict[str, Chunk]:
    """The empty extra states: one record in a file, named by all."""
    with file.open("wb") as out:
        torch.save([None], out)
    record = Chunk((), (), file.name, 0, file.stat().st_size)
    return dict.fromkeys(extra_states(source.spec), record)


def _common(source: Source, layout: ParallelLayout) -> dict:
    """What Megatron-LM's loader looks for besides the tensors: the arguments that must agree with its own."""
    spec = source.spec
    args = argparse.Namespace(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        group_query_attention=spec.num_kv_heads != spec.num_heads,
        kv_channels=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        padded_vocab_size=spec.padded_vocab(layout.tp),
        untie_embeddings_and_output_weights=not spec.tied_embeddings,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        num_experts=spec.moe.num_experts if spec.moe else None,
        moe_ffn_hidden_size=spec.moe.ffn_size if spec.moe else None,
        moe_router_topk=spec.moe.top_k if spec.moe else 2,
        add_position_embedding=False,
        position_embedding_type="rope",
        normalization="RMSNorm",
        norm_epsilon=spec.norm_eps,
        swiglu=True,
        add_bias_linear=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        use_distributed_optimizer=False,
        use_dist_ckpt=True,
        ckpt_format="torch_dist",
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        iteration=0,
    )
    return {"args": args, "checkpoint_version": 3.0, "iteration": 0, "num_floating_point_operations_so_far": 0}
