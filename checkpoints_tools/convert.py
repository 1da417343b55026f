"""Convert a model between Hugging Face, Megatron and inference folders, tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from checkpoints_tools.detect import MANIFEST, TRACKER, is_inference
from checkpoints_tools.sources import Source, open_source
from checkpoints_tools.targets import Target, hf_target, inference_target, megatron_target
from checkpoints_tools.write import JOURNAL, Writer, check_space, read_journal, write_journal
from megappo.bridge.inference import InferenceWeights
from megappo.checkpoint.hf import copy_companions
from megappo.errors import UserError
from megappo.models.spec import ModelSpec
from megappo.parallel.layout import ParallelLayout

KINDS = ("hf", "megatron", "inference")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Request:
    """What to write. Sizes are numbers of ranks; `dtype` None keeps the source's."""

    to: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Options:
    """How to write it."""

    model: Path | None = None
    force: bool = False
    resume: bool = False
    dry_run: bool = False
    workers: int = 0  # 0: as many as there are cores, at most 8


def convert(src: Path, dst: Path, request: Request, options: Options = Options()) -> str:
    """Write the model in `src` to `dst`. Returns a line (with `dry_run` a table) that says what was written.

    Raises:
        UserError: a broken source, a layout that does not fit the model, a target that must not be replaced, a full
            disk.
    """
    started = time.perf_counter()
    dtype = read_dtype(request.dtype)
    if request.to not in KINDS:
        raise UserError(f"--to {request.to}: unknown; use one of {', '.join(KINDS)}")
    check_target(src, dst, force=options.force)
    source = open_source(src, options.model)
    target = make_target(source, request, dtype or source.dtype())
    if options.dry_run:
        return describe(target, dst)
    written = write_target(target, source.companions, dst, fingerprint(source, request), options)
    seconds = time.perf_counter() - started
    rate = f"{written / 1e9:.2f} GB in {seconds:.1f} s ({written / 1e9 / seconds:.2f} GB/s)"
    return f"wrote {dst}: {target.kind}, {len(target.files)} files, {rate}"


def make_target(source: Source, request: Request, dtype: torch.dtype) -> Target:
    """The files that a request asks for.

    Raises:
        UserError: the layout does not fit the model.
    """
    if request.to == "hf":
        return hf_target(source, dtype)
    check_layout(source.spec, request)
    if request.to == "inference":
        weights = InferenceWeights(source.spec, request.tp, request.ep, critic=source.critic)
        return inference_target(source, weights, dtype)
    return megatron_target(source, megatron_layout(source.spec, request), dtype)


def megatron_layout(spec: ModelSpec, request: Request) -> ParallelLayout:
    """The smallest grid with these sizes."""
    etp = request.etp or (request.tp if spec.moe else 1)
    stage = math.lcm(request.tp, request.ep * etp)
    layout = ParallelLayout(
        world=stage * request.pp,
        tp=request.tp,
        pp=request.pp,
        vpp=request.vpp,
        ep=request.ep,
        etp=etp,
        first_stage_layers=request.first_stage_layers,
        last_stage_layers=request.last_stage_layers,
    )
    try:
        layout.stage_layers(spec.num_layers)
    except ValueError as err:
        raise UserError(f"--pp {request.pp} --vpp {request.vpp}: {err}; set --first-stage-layers") from None
    return layout


def check_layout(spec: ModelSpec, request: Request) -> None:
    """Does the model divide as asked?

    Raises:
        UserError: naming the option and the number that it does not divide.
    """
    for name in ("tp", "pp", "vpp", "ep", "etp"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if request.to == "inference" and (request.pp > 1 or request.vpp > 1 or request.etp not in (None, 1)):
        raise UserError("an inference folder has no pipeline stages: give --tp and --ep only")
    tp, ep, kv = request.tp, request.ep, spec.num_kv_heads
    if spec.num_heads % tp:
        raise UserError(f"--tp {tp} does not divide the model's {spec.num_heads} attention heads")
    if kv % tp and tp % kv:
        raise UserError(f"--tp {tp}: must divide the model's {kv} key/value heads or be a multiple of them")
    if spec.moe is None:
        if ep > 1:
            raise UserError(f"--ep {ep}: the model has no experts")
        if spec.ffn_size % tp:
            raise UserError(f"--tp {tp} does not divide the model's {spec.ffn_size} feed-forward columns")
        return
    if spec.moe.num_experts % ep:
        raise UserError(f"--ep {ep} does not divide the model's {spec.moe.num_experts} experts")
    if request.to == "inference" and tp % ep:
        raise UserError(f"--ep {ep} does not divide --tp {tp}: an engine deals its ranks out to the experts")
    width = tp // ep if request.to == "inference" else request.etp or tp
    if spec.moe.ffn_size % width:
        raise UserError(f"{width} ranks an expert do not divide its {spec.moe.ffn_size} feed-forward columns")


def read_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if _SHORT.get(name, name) not in DTYPES:
        raise UserError(f"--dtype {name}: unknown; use float32, bfloat16 or float16")
    return DTYPES[_SHORT.get(name, name)]


def check_target(src: Path, dst: Path, *, force: bool) -> None:
    """May `dst` be written?

    Raises:
        UserError: it holds something (without `force`) or something else than a model, or source and target overlap.
    """
    here, there = Path(os.path.realpath(src)), Path(os.path.realpath(dst))
    if here == there or here in there.parents or there in here.parents:
        raise UserError(f"{dst} and the source {src} lie in each other: choose another folder")
    if not os.path.lexists(there) or (there.is_dir() and not any(there.iterdir())):
        return
    if not there.is_dir():
        raise UserError(f"{dst} is a file: choose another folder")
    if not force:
        raise UserError(f"{dst} exists: give --force to replace it")
    if not _is_model(there):
        raise UserError(f"{dst} holds something else than a model: --force does not delete it")


def _is_model(folder: Path) -> bool:
    """A folder that a conversion or an export wrote: no sub-folders but a checkpoint's."""
    folders = {p.name for p in folder.iterdir() if p.is_dir()}
    if (folder / TRACKER).is_file():
        return all((folder / name / "metadata.json").is_file() or name == "hf" for name in folders)
    weights = list(folder.glob("*.safetensors"))
    return not folders and bool(weights) and ((folder / "config.json").is_file() or is_inference(folder))


def fingerprint(source: Source, request: Request) -> dict:
    """What must be the same for an interrupted conversion to be continued."""
    files = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in source.files]
    return json.loads(json.dumps({"request": asdict(request), "files": files}))


def write_target(target: Target, companions: Path, dst: Path, mark: dict, options: Options) -> int:
    """Write beside `dst` and rename. Returns the bytes of weights written by this call.

    Raises:
        UserError: the disk is full or the target cannot be written; what was there stays.
    """
    final = Path(os.path.realpath(dst))
    partial = final.with_name(final.name + ".partial")
    try:
        done = _begin(partial, mark, resume=options.resume)
        for file in target.files:
            (partial / file.name).parent.mkdir(parents=True, exist_ok=True)
        writer = Writer(target, partial, done, options.workers or min(8, os.cpu_count() or 1))
        check_space(partial, writer.progress.total)
        writer.run({"fingerprint": mark})
        target.finish(partial, writer.done)
        _write_companions(companions, partial / target.companions, target.dtype)
        (partial / JOURNAL).unlink()
        _replace(partial, final)
    except OSError as err:
        raise UserError(f"cannot write {dst}: {err.strerror or err}; {partial} can be resumed or deleted") from None
    except RuntimeError as err:
        if "PytorchStreamWriter" in str(err) or "No space" in str(err):  # torch's word for a full disk
            raise UserError(f"cannot write {dst}: is the disk full? {partial} can be resumed or deleted") from err
        raise
    return writer.progress.done


def _begin(partial: Path, mark: dict, *, resume: bool) -> dict[str, list]:
    """The files that an earlier attempt finished; an attempt that is not continued is removed."""
    journal = read_journal(partial)
    if resume and journal is not None:
        if journal.get("fingerprint") != mark:
            raise UserError(f"{partial} is of another conversion or source: start again without --resume")
        return journal.get("done", {})
    if partial.exists():
        if journal is None and any(partial.iterdir()):
            raise UserError(f"{partial} is in the way and not from a conversion: move it")
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    write_journal(partial, {"fingerprint": mark, "done": {}})
    return {}


def _write_companions(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """config.json with the new dtype; tokenizer, generation settings, chat template, licence as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    copy_companions(source, folder, skip=(MANIFEST, TRACKER))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _replace(partial: Path, final: Path) -> None:
    """Put the finished folder in place; what was there comes back if that fails."""
    previous = final.with_name(final.name + ".previous")
    if not final.exists():
        os.replace(partial, final)
        return
    shutil.rmtree(previous, ignore_errors=True)
    os.replace(final, previous)
    try:
        os.replace(partial, final)
    except OSError:
        os.replace(previous, final)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def describe(target: Target, dst: Path) -> str:
    """What would be written: a line a file and the total."""
    rows = [(str(Path(f.name)), len(f.parts), f.size(target.dtype.itemsize)) for f in target.files]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:<{width}}  {count:>6} tensors  {size / 1e6:>12.2f} MB" for name, count, size in rows]
    dtype = str(target.dtype).removeprefix("torch.")
    total = f"{target.bytes() / 1e9:.3f} GB in {len(rows)} files"
    return "\n".join([*lines, f"would write {dst}: {target.kind}, {dtype}, {total}; nothing was written"])
