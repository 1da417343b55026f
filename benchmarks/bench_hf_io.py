"""Claim: HF folder -> Megatron parameters -> HF folder costs about as much as reading and writing the files.

    python benchmarks/bench_hf_io.py [--layers 8 --hidden 1024 --vocab 32000 --shard-mb 4096 --repeats 6 --folder DIR]

One process, TP 1, bf16, a random Llama-like model (default 0.3 GB; 32 layers of hidden 2048 make 3 GB). Rows,
measured in turns so that a busy machine disturbs all alike, best of `--repeats`, warm page cache (processor time
is steadier than wall time on a busy machine):

- copy: the files copied by the system (`shutil.copyfile`).
- safetensors load + save: `load_file` and `save_file` of each file, nothing in between.
- MegaPPO load: `ModelEngine.load_hf`, every slice checked and copied into the model's parameters.
- MegaPPO export: `stream_weights` through `write_hf`, a complete folder beside and renamed.
- the way there and back: both.

Building the model (random initialisation) is not counted. Memory is the peak of anonymous memory (RssAnon of
/proc/self/status, sampled every 2 ms; Linux only) beyond what was there before: mapped files are page cache and do
not count. MegaPPO's parameters are there before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megappo.checkpoint import hf
from megappo.checkpoint.hf import HFReader, write_hf
from megappo.engine.engine import EngineOptions, ModelEngine
from megappo.models.spec import ModelSpec, load_spec
from megappo.parallel import backend
from megappo.parallel.layout import ParallelLayout

DTYPE = torch.bfloat16


def anonymous_bytes() -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon:"))


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """(seconds, processor seconds)."""
    gc.collect()
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - start_cpu


def peak_memory(run: Callable[[], object]) -> float:
    """Peak of anonymous memory beyond the start in MB. Watching costs time, so nothing is timed here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator kept would hide part of the peak
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return (peak - before) / 1e6


def write_config(folder: Path, layers: int, hidden: int, vocab: int) -> ModelSpec:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "intermediate_size": hidden * 11 // 4,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(folder)


def make_engine(spec: ModelSpec) -> ModelEngine:
    backend.init_distributed()
    return ModelEngine(spec, ParallelLayout(), EngineOptions(dtype=DTYPE))


def load_and_save(source: Path, out: Path) -> None:
    out.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), out / file.name, metadata={"format": "pt"})


def copy(source: Path, out: Path) -> None:
    out.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, out / file.name)


def same(a: Path, b: Path) -> bool:
    readers = [HFReader(folder) for folder in (a, b)]
    names = readers[0].where.keys()
    if names != readers[1].where.keys():
        return False
    tensors = ([r._open(r.where[name]).get_tensor(name) for r in readers] for name in names)
    return all(torch.equal(x, y) for x, y in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 8), ("hidden", 1024), ("vocab", 32000), ("repeats", 6), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shard-mb", type=int, default=hf.SHARD_BYTES >> 20, help="size of the files written")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hf.SHARD_BYTES = args.shard_mb << 20
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        run_all(Path(root), args)


def run_all(root: Path, args: argparse.Namespace) -> None:
    source, out = root / "source", root / "out"
    engine = make_engine(write_config(root / "config", args.layers, args.hidden, args.vocab))

    def load() -> None:
        engine.load_hf(HFReader(source))

    def export(target: Path = out) -> None:
        write_hf(engine.stream_weights(DTYPE), engine.weights.hf_shapes(), root / "config", target, DTYPE)

    export(source)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 1e9
    runs = {
        "copy": lambda: copy(source, out),
        "safetensors load + save": lambda: load_and_save(source, out),
        "MegaPPO load": load,
        "MegaPPO export": export,
    }
    seconds: dict[str, float] = dict.fromkeys(runs, float("inf"))
    cpu = dict(seconds)
    memory: dict[str, float] = {}
    for turn in range(1 + args.repeats):  # the first turn, which also warms the page cache, watches memory
        for name, run in runs.items():
            if (
                run is not load
            ):  # so that all writers get pages that were freed just before: fresh ones are slow in a VM
                shutil.rmtree(out, ignore_errors=True)
            if turn == 0:
                memory[name] = peak_memory(run)
                continue
            s, c = timed(run)
            seconds[name], cpu[name] = min(seconds[name], s), min(cpu[name], c)
    assert same(source, out), "the export differs from the source"
    parts = ("MegaPPO load", "MegaPPO export")
    for times in (seconds, cpu):
        times["there and back"] = sum(times[name] for name in parts)
    memory["there and back"] = max(memory[name] for name in parts)
    largest = max(torch.Size(shape).numel() for shape in engine.weights.hf_shapes().values()) * 2 / 1e6
    print(f"{size:.2f} GB bf16, {args.layers} layers, largest tensor {largest:.0f} MB, {args.threads} threads")
    print("| what | s | GB/s | / load + save | processor s | / load + save | peak extra MB |")
    print("|---|---|---|---|---|---|---|")
    base, base_cpu = (times["safetensors load + save"] for times in (seconds, cpu))
    for name, s in seconds.items():
        c = cpu[name]
        numbers = f"{s:.3f} | {size / s:.2f} | {s / base:.2f} | {c:.3f} | {c / base_cpu:.2f} | {memory[name]:.0f}"
        print(f"| {name} | {numbers} |")


if __name__ == "__main__":
    main()
