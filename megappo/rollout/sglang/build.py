"""A run's `SGLangEngine` from its configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.schema import ExperimentConfig
from megappo.models.spec import ModelSpec
from megappo.parallel import backend
from megappo.rollout.sglang.engine import SGLangEngine
from megappo.rollout.sglang.group import GroupWay
from megappo.rollout.sglang.http import load_httpx
from megappo.rollout.sglang.servers import Pool
from megappo.rollout.sglang.shards import ShardWay
from megappo.rollout.sglang.weights import DiskWay, TensorWay

_SMALL_MODEL = 1_000_000_000  # bytes: below, weights go by value in requests
_DTYPE = {"fp32": "float32", "bf16": "bfloat16"}


def build_sglang(
    config: ExperimentConfig,
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
    shapes: dict[str, tuple[int, ...]],
    spec: ModelSpec,
    dtype: torch.dtype,
) -> SGLangEngine:
    """The servers begin to start here, on rank 0; the first weight update waits for them.

    `weights` streams the policy's full tensors (collective), which have `shapes`.
    """
    settings = config.rollout.sglang
    pool = way = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        load_httpx()
        out = Path(config.trainer.output_dir) / "sglang"
        size = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        kind, bucket = settings.weight_sync, settings.bucket_mb * 1_000_000
        if kind == "auto":
            kind = "tensor" if size < _SMALL_MODEL else "disk"
        if kind == "tensor":
            way = TensorWay(bucket)
        elif kind == "shards":
            way = ShardWay(spec, bucket)
        elif kind == "distributed":
            way = GroupWay(
                settings.bucket_mb * 1_000_000, settings.sync_timeout_s, backend.device(), settings.sync_host
            )
        else:
            folder = Path(settings.sync_dir) if settings.sync_dir else out / "weights"
            way = DiskWay(folder, shapes, Path(config.model.path), dtype)
        pool = Pool(settings, config.rollout.servers, out, lambda port, i: server_command(config, port, i))
    return SGLangEngine(settings, pool, way, weights, spec.vocab_size)


def cpu_starter() -> Path:
    """The script that starts SGLang's server without a GPU, to be run by the Python that has sglang."""
    return Path(__file__).with_name("cpu_starter.py")


def server_command(config: ExperimentConfig, port: int, index: int) -> list[str]:
    """How server `index` is started on this machine."""
    settings, cuda = config.rollout.sglang, backend.has_cuda()
    if settings.launch is not None:
        words = list(settings.launch)
    elif cuda:
        words = [sys.executable, "-m", "sglang.launch_server"]
    else:
        words = [sys.executable, "-P", str(cpu_starter())]
    words += ["--model-path", config.model.path, "--tokenizer-path", config.model.tokenizer_path]
    words += ["--host", "127.0.0.1", "--port", str(port), "--tp-size", str(settings.tp)]
    words += ["--dtype", _DTYPE[config.rollout.dtype]]
    if cuda:
        words += ["--base-gpu-id", str(settings.first_gpu + index * settings.tp)]
    else:
        # An idle scheduler would take a core; the warm-up is a text, which a small tokenizer may turn into nothing.
        words += ["--device", "cpu", "--sleep-on-idle", "--skip-server-warmup"]
    if settings.mem_fraction_static is not None:
        words += ["--mem-fraction-static", str(settings.mem_fraction_static)]
    if settings.deterministic:
        words.append("--enable-deterministic-inference")
    return words + settings.extra_args
