"""Claim: putting an idle role to sleep and waking it costs two copies of its memory, and gives the memory back.

    python benchmarks/bench_offload.py [--layers 6 --hidden 512 --vocab 8192 --repeats 5 --threads 1]

One process, one trained role after one optimizer step, `offload: all`. Rows, taking turns, best of `--repeats`:

- copies: the same tensors copied to the host and back into place, nothing freed. On a CPU a copy within memory, on a
  GPU over the bus, pinned.
- round trip: `engine.sleep()` and `engine.wake()`: optimizer state and weights to the host and back; gradients are
  given up and come back as zeros.

Bytes are those freed on the device while the role sleeps, against all bytes of weights, gradients and optimizer state.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_checkpoint import one_step
from bench_packing import make_engine

from megappo.engine.engine import ModelEngine
from megappo.parallel import backend


def kept_storages(engine: ModelEngine) -> list[torch.Tensor]:
    """Weights and optimizer state as flat byte tensors, each storage once."""
    tensors = [*engine._weight_tensors(), *engine.optimizer.tensors()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages.values() if s.nbytes()]


def copies(tensors: list[torch.Tensor], host: list[torch.Tensor]) -> None:
    for there, here in zip(host, tensors, strict=True):
        there.copy_(here, non_blocking=True)
    for there, here in zip(host, tensors, strict=True):
        here.copy_(there, non_blocking=True)


def timed(run: Callable[[], object]) -> float:
    backend.synchronize()
    start = time.perf_counter()
    run()
    backend.synchronize()
    return time.perf_counter() - start


def run_all(root: Path, args: argparse.Namespace) -> None:
    sizes = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "vocab_size": args.vocab}
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    engine = make_engine(root / "model", dtype, **sizes)
    engine.options = type(engine.options)(**{**vars(engine.options), "offload": "all"})
    one_step(engine)
    tensors = kept_storages(engine)
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=torch.cuda.is_available()) for t in tensors]
    gradients = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in engine._buffers())
    size = sum(t.numel() for t in tensors) + gradients
    best = {"copies": float("inf"), "round trip": float("inf")}
    freed = 0
    for _ in range(args.repeats):
        best["copies"] = min(best["copies"], timed(lambda: copies(tensors, host)))
        start = time.perf_counter()
        freed = engine.sleep()
        backend.synchronize()
        asleep = time.perf_counter() - start
        best["round trip"] = min(best["round trip"], asleep + timed(engine.wake))
    print(f"{size / 1e6:.0f} MB of weights, gradients and optimizer state; {freed / size:.0%} of it freed while asleep")
    print("| what | s | GB/s | × copies |")
    print("|---|---|---|---|")
    for name, seconds in best.items():
        moved = 2 * sum(t.numel() for t in tensors)
        print(f"| {name} | {seconds:.3f} | {moved / seconds / 1e9:.2f} | {seconds / best['copies']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("hidden", 512), ("vocab", 8192), ("repeats", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as root:
        run_all(Path(root), args)


if __name__ == "__main__":
    main()
