"""The device this process computes on, and the one door through which megatron-core is imported.

`install()` must run before anything else imports `megatron.core`: it silences the import noise, and on a machine
without a CUDA device it applies the patches of `cpu_patches`. On a GPU machine nothing CUDA-related is patched.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from megappo.errors import UserError

TESTED_MEGATRON = "0.16.1"
_installed = False

# Modules that are imported lazily by megatron-core would miss patch A1; these are the ones that we reach.
_MEGATRON_MODULES = (
    "megatron.core",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.multi_latent_attention",
)
_IMPORT_NOISE = (
    r"(?s).*(Apex|Transformer Engine).*not installed.*",
    r".*If you are using transformer_engine as the transformer impl.*",
)
_RUN_NOISE = (
    r"full scope is deprecated.*",
    r".*CUDA_DEVICE_MAX_CONNECTIONS.*",
    r".*grad attribute of a Tensor that is not a leaf.*",
    r".*If you are using transformer_engine as the transformer impl.*",
    r".*(all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base).*",
    r".*torch.distributed._(shard|sharded_tensor).*",
    r".*TypedStorage is deprecated.*",
)


def has_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank: its own GPU when there is one, otherwise the CPU."""
    if has_cuda():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def has_transformer_engine() -> bool:
    """Transformer Engine is used only with a GPU: its import fails, loudly, on a machine without one."""
    return has_cuda() and importlib.util.find_spec("transformer_engine") is not None


def use_fused_layers(dtype: torch.dtype) -> bool:
    """Whether a model in `dtype` is made of Transformer Engine's layers: its packed attention knows no fp32."""
    return has_transformer_engine() and dtype != torch.float32


def install() -> None:
    """Import megatron-core quietly and apply the patches that this machine needs. Idempotent.

    Raises:
        UserError: megatron-core is missing, or Transformer Engine is installed on a machine without a GPU
            (megatron-core cannot be imported then).
    """
    global _installed
    if _installed:
        return
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UserError(f"megatron-core is not installed: pip install megatron-core=={TESTED_MEGATRON}")
    if importlib.util.find_spec("psutil") is None:
        # megatron-core's checkpoint workers need it without declaring it, and hang instead of failing.
        raise UserError("psutil is not installed, without which checkpoints cannot be written: pip install psutil")
    if not has_cuda() and importlib.util.find_spec("transformer_engine") is not None:
        raise UserError(
            "transformer-engine is installed but this machine has no CUDA device, which breaks megatron-core's "
            "import: pip uninstall transformer-engine"
        )
    from megappo.parallel import cpu_patches

    with warnings.catch_warnings():
        for message in _IMPORT_NOISE:
            warnings.filterwarnings("ignore", message=message)
        for module in _MEGATRON_MODULES:
            importlib.import_module(module)
    for message in _RUN_NOISE:
        warnings.filterwarnings("ignore", message=message)
    if not has_transformer_engine():
        cpu_patches.patch_missing_extensions()
    cpu_patches.patch_distributed_optimizer()
    if not has_cuda():
        cpu_patches.patch_no_cuda()
    _installed = True


def init_distributed(timeout_s: float = 600.0) -> None:
    """Join the process group (one process when no launcher set RANK), NCCL with a GPU and gloo without.

    `timeout_s` bounds every collective, so that a lost rank ends the run instead of hanging it.

    Raises:
        UserError: the port of the launcher is taken, or the ranks do not find one another.
    """
    install()
    if dist.is_initialized():
        return
    if has_cuda():
        torch.cuda.set_device(device())
    # One backend for each device type: metadata and CPU columns travel over gloo also on a GPU machine.
    backend = "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"
    # A run of one process needs no address: a store in memory cannot collide with another run's port.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **alone)
    except dist.DistNetworkError as err:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"the ranks cannot meet at {where} ({str(err).splitlines()[0]}): give another MASTER_PORT "
            "(--master-port), or check the address"
        ) from None


def synchronize() -> None:
    """Wait for queued device work, so that a timer measures it. Nothing to wait for on CPU."""
    if has_cuda():
        torch.cuda.synchronize()
