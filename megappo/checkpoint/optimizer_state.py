"""The distributed optimizer's state, parameter by parameter, with one copy instead of megatron's five."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.staging import Staging

_KEYS = ("param", "exp_avg", "exp_avg_sq")


@contextmanager
def optimizer_states(staging: Staging) -> Iterator[None]:
    """While it lasts, megatron's distributed optimizers gather their state by `gathered_state`, into `staging`."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    real = DistributedOptimizer.get_parameter_state_dp_zero

    def gather(self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False):
        if use_gloo_comm or not return_on_all_ranks:  # a way of gathering that we never ask for
            return real(self, use_gloo_comm, empty_data, return_on_all_ranks)
        return gathered_state(self, staging, empty=empty_data)

    DistributedOptimizer.get_parameter_state_dp_zero = gather
    try:
        yield
    finally:
        DistributedOptimizer.get_parameter_state_dp_zero = real


@torch.no_grad()
def gathered_state(optimizer, staging: Staging, *, empty: bool) -> dict:
    """Main parameters and Adam moments of all data-parallel ranks as flat host tensors, in the buffers' layout.

    The structure of megatron-core's `get_parameter_state_dp_zero(return_on_all_ranks=True)`. megatron fills a zeroed
    shard from a copy of each parameter, gathers it into zeroed tensors, and concatenates them into a zeroed whole; here
    every shard is written once, where it belongs, and gathered in place. The padding between buckets stays, because the
    positions by which the parameters are then cut out count it. Collective over the optimizer's data-parallel group.

    Args:
        empty: allocate only; what is loaded from a checkpoint is written over it.
    """
    state: dict = {"buckets_coalesced": True}
    for number, ranges in enumerate(optimizer.gbuf_ranges):
        buffer = optimizer.buffers[number]
        ((dtype, buckets),) = ranges.items()
        padded = sum(bucket.grad_data.numel() for bucket in buffer.buckets)
        whole = {key: staging.empty(padded, torch.float32) for key in _KEYS}  # padding is never read
        if not empty:
            start = 0
            for bucket, ranges_of_bucket in zip(buffer.buckets, buckets, strict=True):
                size = bucket.grad_data.numel()
                parts = {key: tensor[start : start + size] for key, tensor in whole.items()}
                _fill(optimizer, parts, ranges_of_bucket["param_map"])
                start += size
        state[number] = {dtype: whole | {"numel_unpadded": buffer.numel_unpadded}}
    return state


def _fill(optimizer, parts: dict[str, Tensor], param_map: dict) -> None:
    """Write this rank's shard of a bucket into `parts`, and gather the others' into the rest."""
    group = optimizer.data_parallel_group
    ranks, rank = group.size(), group.rank()
    shards = {key: tensor.view(ranks, -1)[rank] for key, tensor in parts.items()}
    for param, where in param_map.items():
        states = optimizer._get_main_param_and_optimizer_states(param)
        begin, end = where["gbuf_local"].start, where["gbuf_local"].end
        for key, shard in shards.items():
            shard[begin:end].copy_(states[key].view(-1))
    if ranks == 1:
        return
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for key, tensor in parts.items():
        if device.type == "cpu":
            dist.all_gather_into_tensor(tensor, shards[key].clone(), group=group)
        else:
            there = torch.empty_like(tensor, device=device)
            dist.all_gather_into_tensor(there, shards[key].to(device), group=group)
            tensor.copy_(there)


def regrouped(loaded: dict, parts: int) -> dict:
    """What was loaded for a role's optimizer, as its `parts` optimizers expect it.

    With expert parallelism megatron gives the experts an optimizer of their own, without it they are with the rest.
    The parameters' states are stored by parameter and come in the new structure already. The settings of the
    parameter groups and their step, the same in all, come in the structure in which they were saved.
    """
    entries = [loaded] if parts == 1 else [loaded[number] for number in range(parts)]
    if all("optimizer" in entry for entry in entries):
        return loaded
    numbered = [entry for key, entry in loaded.items() if isinstance(key, int)]
    saved = [entry for entry in [loaded, *numbered] if "optimizer" in entry]
    if not saved:  # a plain optimizer's state has no such settings
        return loaded
    groups = [
        group | {"is_expert_parallel": experts}
        for experts in (False, True)
        for entry in saved
        for group in entry["optimizer"]["param_groups"]
    ]
    common = {key: value for key, value in saved[0].items() if key == "param_state_sharding_type"}
    fitted = [entry | common | {"optimizer": {"param_groups": groups}} for entry in entries]
    return fitted[0] if parts == 1 else dict(enumerate(fitted))
