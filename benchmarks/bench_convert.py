"""Claim: a conversion costs about what reading and writing the files costs, in flat memory.

    python benchmarks/bench_convert.py [--layers 8 --hidden 1024 --vocab 32000 --repeats 3 --workers 2 --folder DIR]

A random Llama-like model in bf16 (default 0.3 GB). Rows, in turns so that a busy machine disturbs all alike, best of
`--repeats`, warm page cache: the files copied by the system; `load_file` and `save_file` of each; `megappo-ckpt
convert` between the formats (complete folders, written beside and renamed). Memory as in bench_hf_io.py: peak of
anonymous memory beyond what was there before; `--grow N` adds a row of memory for a model with N times the layers.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from bench_hf_io import copy, load_and_save, peak_memory, timed, write_config

from checkpoints_tools.convert import Options, Request, convert
from checkpoints_tools.verify import verify
from megappo.bridge.megatron import MegatronWeights
from megappo.checkpoint import hf
from megappo.parallel.layout import ParallelLayout


def make_model(root: Path, layers: int, hidden: int, vocab: int) -> Path:
    spec = write_config(root / f"config{layers}", layers, hidden, vocab)
    shapes = MegatronWeights(spec, ParallelLayout()).hf_shapes()
    tensors = ((name, torch.randn(shape, dtype=torch.bfloat16)) for name, shape in shapes.items())
    hf.write_hf(tensors, shapes, spec.path, root / f"model{layers}", torch.bfloat16)
    return root / f"model{layers}"


def conversions(root: Path, source: Path, options: Options) -> dict:
    """`{row: (from, to, request)}`; the sources of the later ones are made here."""
    megatron, inference = root / f"{source.name}-megatron", root / f"{source.name}-inference"
    layouts = {"megatron": Request("megatron", tp=2, pp=2), "inference": Request("inference", tp=4)}
    convert(source, megatron, layouts["megatron"], options)
    convert(source, inference, layouts["inference"], options)
    assert verify(source, megatron)[1] and verify(source, inference)[1]
    return {
        "HF to HF": (source, Request("hf")),
        "HF to Megatron TP2 PP2": (source, layouts["megatron"]),
        "Megatron TP2 PP2 to HF": (megatron, Request("hf")),
        "HF to inference TP4": (source, layouts["inference"]),
        "Megatron TP2 PP2 to inference TP4": (megatron, layouts["inference"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 8), ("hidden", 1024), ("vocab", 32000), ("repeats", 3), ("workers", 2), ("grow", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    torch.set_num_threads(1)

    options = Options(force=True, workers=args.workers)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name)
        source, out = make_model(root, args.layers, args.hidden, args.vocab), root / "out"
        size = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 1e9
        runs = {"copy": lambda: copy(source, out), "safetensors load + save": lambda: load_and_save(source, out)}
        for row, (path, request) in conversions(root, source, options).items():
            runs[row] = lambda path=path, request=request: convert(path, out, request, options)
        seconds, cpu, memory = measure(runs, out, args.repeats)
        larger = {}
        if args.grow:
            big = make_model(root, args.layers * args.grow, args.hidden, args.vocab)
            for row, (path, request) in conversions(root, big, options).items():
                shutil.rmtree(out, ignore_errors=True)
                larger[row] = peak_memory(lambda path=path, request=request: convert(path, out, request, options))
        report(size, seconds, cpu, memory, larger)


def measure(runs: dict, out: Path, repeats: int) -> tuple[dict, dict, dict]:
    seconds, cpu, memory = dict.fromkeys(runs, float("inf")), dict.fromkeys(runs, float("inf")), {}
    for turn in range(1 + repeats):
        for name, run in runs.items():
            shutil.rmtree(out, ignore_errors=True)
            if turn == 0:
                memory[name] = peak_memory(run)
                continue
            s, c = timed(run)
            seconds[name], cpu[name] = min(seconds[name], s), min(cpu[name], c)
    return seconds, cpu, memory


def report(size: float, seconds: dict, cpu: dict, memory: dict, larger: dict) -> None:
    print(f"{size:.2f} GB bf16")
    print("| what | s | GB/s | / load + save | processor s | / load + save | peak extra MB | of the larger model |")
    print("|---|---|---|---|---|---|---|---|")
    base, base_cpu = seconds["safetensors load + save"], cpu["safetensors load + save"]
    for name, s in seconds.items():
        numbers = f"{s:.3f} | {size / s:.2f} | {s / base:.2f} | {cpu[name]:.3f} | {cpu[name] / base_cpu:.2f}"
        more = f"{larger[name]:.0f}" if name in larger else "-"
        print(f"| {name} | {numbers} | {memory[name]:.0f} | {more} |")


if __name__ == "__main__":
    main()
