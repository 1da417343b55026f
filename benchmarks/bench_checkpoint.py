"""Claim: a checkpoint that any layout can load costs about as much as `torch.save` of the same tensors.

    python benchmarks/bench_checkpoint.py [--layers 6 --hidden 512 --vocab 8192 --repeats 3 --bf16 --folder DIR]

One process, one trained role after one optimizer step: parameters and both Adam moments (with --bf16 also the fp32
master copy, which is what is kept of the parameters then). Rows, taking turns, best of `--repeats`, warm page cache:

- torch.save / torch.load: one file with exactly these tensors, loaded and copied back. Not sharded, and tied to one
  layout; it is the floor, not an alternative.
- MegaPPO save / load: `save_engine` and `load_engine`, a Megatron distributed checkpoint that waits for its files.
- MegaPPO background save: the time for which training stands still when a thread writes the files
  (`trainer.async_save`): laying out and copying the tensors, and later what describes them. Its ratio to "MegaPPO save"
  is printed, too. The files land in the page cache here; the slower the disk, the smaller that ratio.

Processor time (all threads) is steadier on a busy
machine. Neither includes the store's manifest and renaming (a few small files). Bytes are those on disk.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench_packing import make_engine, random_batch

from megappo.algorithms.policy_loss import PolicyLossConfig
from megappo.checkpoint.distributed import load_engine, save_engine
from megappo.engine.engine import ModelEngine
from megappo.engine.losses import PolicyLoss


def one_step(engine: ModelEngine) -> None:
    lengths = np.array([24, 17])
    batch = random_batch(lengths, lengths, engine.spec.vocab_size)
    loss = PolicyLoss(PolicyLossConfig("ppo", 0.2, 0.2, 3.0))
    engine.train_step(batch, np.arange(2), [[0, 1]], loss, agg_mode="token-mean")


def tensors_of(engine: ModelEngine) -> dict[str, torch.Tensor]:
    """Everything that the checkpoint must hold: weights, and master copies and moments where they are others."""
    tensors = {name: p.detach() for name, p in engine.chunks[0].named_parameters()}
    for part in engine.optimizer.inner.chained_optimizers:
        for number, (param, state) in enumerate(part.optimizer.state.items()):
            tensors |= {f"{id(part)}.{number}.{key}": x for key, x in state.items() if torch.is_tensor(x)}
            if param.dtype != next(engine.chunks[0].parameters()).dtype:
                tensors[f"{id(part)}.{number}.master"] = param.detach()
    return tensors


def size_of(path: Path) -> int:
    return sum(f.stat().st_size for f in ([path] if path.is_file() else path.rglob("*")) if f.is_file())


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processor seconds of all threads."""
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - start_cpu


def background_save(engine: ModelEngine, folder: Path) -> tuple[float, float]:
    """Seconds and processor seconds of this thread's part of a save that a thread writes."""
    start, start_cpu = time.perf_counter(), time.thread_time()
    pending = save_engine(engine, folder, background=True)
    waited, waited_cpu = time.perf_counter(), time.thread_time()
    while not pending.written:
        time.sleep(0.005)
    resumed, resumed_cpu = time.perf_counter(), time.thread_time()
    pending.finish()
    blocked = time.perf_counter() - resumed + waited - start
    return blocked, time.thread_time() - resumed_cpu + waited_cpu - start_cpu


def run_all(root: Path, args: argparse.Namespace) -> None:
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    sizes = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "vocab_size": args.vocab}
    engine = make_engine(root / "model", dtype, **sizes)
    one_step(engine)
    plain, folder = root / "plain.pt", root / "checkpoint"
    tensors = tensors_of(engine)

    def load_plain() -> None:
        loaded = torch.load(plain, weights_only=True)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(loaded[name])

    runs = {
        "torch.save": lambda: torch.save(tensors, plain),
        "MegaPPO save": lambda: save_engine(engine, folder).finish(),
        "MegaPPO background save": None,
        "torch.load": load_plain,
        "MegaPPO load": lambda: load_engine(engine, folder),
    }
    seconds, processor = dict.fromkeys(runs, float("inf")), dict.fromkeys(runs, float("inf"))
    for _ in range(args.repeats):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(root / "background", ignore_errors=True)
        plain.unlink(missing_ok=True)
        for name, run in runs.items():
            s, cpu = background_save(engine, root / "background") if run is None else timed(run)
            seconds[name], processor[name] = min(seconds[name], s), min(processor[name], cpu)
    bytes_ = {"torch": size_of(plain), "MegaPPO": size_of(folder)}
    count = sum(p.numel() for p in engine.chunks[0].parameters())
    print(f"{count / 1e6:.1f} M parameters, {'bf16' if args.bf16 else 'fp32'}, {args.threads} threads")
    print("| what | s | MB | MB/s | × torch | × torch, processor |")
    print("|---|---|---|---|---|---|")
    for name, s in seconds.items():
        mb = bytes_["MegaPPO" if name.startswith("MegaPPO") else "torch"] / 1e6
        base = "torch.save" if name.endswith("save") else "torch.load"
        cpu = processor[name] / processor[base]
        print(f"| {name} | {s:.3f} | {mb:.1f} | {mb / s:.0f} | {s / seconds[base]:.2f} | {cpu:.2f} |")
    blocked = seconds["MegaPPO background save"] / seconds["MegaPPO save"]
    print(f"a background save holds training up for {blocked:.0%} of the time of a save that waits for its files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("hidden", 512), ("vocab", 8192), ("repeats", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        run_all(Path(root), args)


if __name__ == "__main__":
    main()
