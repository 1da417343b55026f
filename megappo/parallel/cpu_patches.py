"""Make megatron-core 0.16.1 run without a CUDA device, and repair what it gets wrong without TE or Apex.

Two independent sets, each patch with its reason:

A. **No CUDA device** (`patch_no_cuda`): megatron-core asks for CUDA by name in many places.
   1. Inside `megatron.core.*` modules only, the global name `torch` becomes a proxy whose factory functions
      turn `device="cuda"` into the CPU and drop `pin_memory`, and whose `.cuda` answers device, stream and RNG
      questions. The real `torch` that everybody else uses stays untouched. `ShardedTensor.init_data` has it as a
      default argument: loading a checkpoint in which replicas hold different experts needs it.
   2. `Tensor.cuda()` is the identity; `Tensor.type()` without arguments, when called by megatron-core, answers
      with the CUDA name, because its optimizers compare against `"torch.cuda.FloatTensor"`.
   3. The tensor-parallel RNG tracker saves and restores the CPU generator.
   4. The MoE token dispatcher hands gloo split sizes as numbers, not tensors.
B. **No Transformer Engine / Apex** (`patch_missing_extensions`): upstream defects that are independent of CUDA.
   5. `moe_utils.te_general_gemm` is undefined (NameError in the router).
   6. MLA tests `isinstance` against a mock class.
   7. MLA with TP: the gradient of the RoPE key shared by all heads is never summed over TP.
   8. `DistributedOptimizer` with torch's AdamW: a fresh optimizer has no `step`, loaders skip it, and one step
      tensor becomes shared by every parameter, so a resumed run silently drifts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types

import torch

_CPU = torch.device("cpu")


# ------------------------------------------------------------------ A1: the torch that megatron-core sees
def _is_cuda(device) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _cpu_factory(name: str):
    real = getattr(torch, name)

    @functools.wraps(real)
    def factory(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return real(*args, **kwargs)

    return factory


class _NullStream:
    """Stand-in for `torch.cuda.Stream`: CPU work is synchronous, so every method is a no-op."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


class _CudaOnCpu(types.ModuleType):
    Stream = _NullStream
    _stream = _NullStream()

    def __getattr__(self, name):
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device():
        return _CPU

    @staticmethod
    def synchronize(device=None):
        return None

    @staticmethod
    def get_rng_state(device=None):
        return torch.get_rng_state()

    @staticmethod
    def manual_seed(seed):
        torch.default_generator.manual_seed(int(seed))

    @classmethod
    def current_stream(cls, device=None):
        return cls._stream

    @staticmethod
    @contextlib.contextmanager
    def stream(stream):
        yield


class _TorchOnCpu(types.ModuleType):
    def __getattr__(self, name):
        return getattr(torch, name)


def _torch_proxy() -> types.ModuleType:
    proxy = _TorchOnCpu("torch")
    proxy.cuda = _CudaOnCpu("torch.cuda")
    for name in ("zeros", "ones", "empty", "empty_like", "tensor"):
        setattr(proxy, name, _cpu_factory(name))
    return proxy


# ------------------------------------------------------------------ A2: two Tensor methods
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
_real_tensor_type = torch.Tensor.type


def _tensor_type(self, *args, **kwargs):
    if not args and not kwargs and self.dtype in _CUDA_TYPE_NAMES:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron.core."):
            return _CUDA_TYPE_NAMES[self.dtype]
    return _real_tensor_type(self, *args, **kwargs)


class _DropForkWarning(logging.Filter):
    """On CPU the tracked generator *is* the CPU generator, so the tracker's warning about it is void."""

    def filter(self, record):
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def patch_no_cuda() -> None:
    """Patch set A. Call after every megatron-core module in use has been imported."""
    import megatron.core.tensor_parallel.random as tp_random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from megatron.core.dist_checkpointing import ShardedTensor

    proxy = _torch_proxy()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and vars(module).get("torch") is torch:
            module.torch = proxy
    init_data = ShardedTensor.init_data
    ShardedTensor.init_data = lambda self, device, init_fn=proxy.empty: init_data(self, device, init_fn)
    tp_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    tp_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(tp_random.__name__).addFilter(_DropForkWarning())
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = _tensor_type

    def split_sizes(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = split_sizes


# ------------------------------------------------------------------ B: no Transformer Engine / Apex
def patch_missing_extensions() -> None:
    """Patch set B, items 5 to 7."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as mla
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(mla.TELinear, type):
        mla.HAVE_TE = False
    apply_rope = mla.apply_rotary_pos_emb

    def apply_rope_summing_shared_key(t, freqs, *args, **kwargs):
        # One key head shared by all local query heads: each TP rank sees only its own heads' gradient.
        shared = t.shape[-2] == 1
        return apply_rope(copy_to_tensor_model_parallel_region(t) if shared else t, freqs, *args, **kwargs)

    mla.apply_rotary_pos_emb = apply_rope_summing_shared_key


def patch_distributed_optimizer() -> None:
    """Patch set B, item 8: checkpoints of `DistributedOptimizer` over torch's AdamW."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    cls = distrib_optimizer.DistributedOptimizer
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    def state_dict_with_steps(self):
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                if "step" not in state:
                    state["step"] = torch.tensor(0.0)
                    state.setdefault("exp_avg", torch.zeros_like(param))
                    state.setdefault("exp_avg_sq", torch.zeros_like(param))
        return state_dict(self)

    def load_with_own_steps(self, state):
        load_state_dict(self, state)
        for entry in self.optimizer.state.values():
            if torch.is_tensor(entry.get("step")):
                entry["step"] = entry["step"].detach().clone()

    def set_states_without_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        entry = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = entry.pop("step", None)
        try:
            set_states(self, model_param, {k: v for k, v in tensors.items() if k != "step"})
        finally:
            if step is not None:
                entry["step"] = step

    cls.state_dict = state_dict_with_steps
    cls.load_state_dict = load_with_own_steps
    cls._set_main_param_and_optimizer_states = set_states_without_step
