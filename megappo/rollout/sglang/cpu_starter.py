"""Start SGLang's server on a machine without a GPU: `python -P cpu_starter.py <server arguments>`.

The stock package imports there with three things in place, which this module sets up before anything imports sglang.
It has to be the main module: SGLang spawns its scheduler, and a spawned child imports the parent's main module again.
It imports nothing of MegaPPO, so that the server's environment need not have it. docs/rollouts.md lists the packages.
"""

import importlib.machinery
import importlib.util
import os
import sys
import types

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def declare_torchvision_operators() -> None:
    """torchvision's wheel cannot load its CUDA-linked library beside a CPU build of torch; its Python half then
    registers fake kernels of operators that nobody has defined."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        sys.modules[__name__]._library = library  # one that is collected takes its operators along


def stand_in_for_kernels() -> None:
    """SGLang's CPU code imports kernels by name from a package that no registry has; torch is used where they are
    absent, so the stand-in's functions are never called (they raise)."""
    if importlib.util.find_spec("sgl_kernel") is not None:
        return

    def kernel(name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise NotImplementedError(f"sgl_kernel.{name} is not available on this machine")

        return missing

    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    module.__getattr__ = kernel
    sys.modules["sgl_kernel"] = module


def bind_ranks(arguments: list[str]) -> None:
    """SGLang's CPU ranks ask which cores are theirs, one entry for each rank."""
    for option in ("--tp-size", "--tensor-parallel-size", "--tp"):
        if option in arguments:
            ranks = int(arguments[arguments.index(option) + 1])
            cores = sorted(os.sched_getaffinity(0))
            bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
            if ranks > 1:
                os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)


declare_torchvision_operators()
stand_in_for_kernels()

if __name__ == "__main__":
    bind_ranks(sys.argv[1:])
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
