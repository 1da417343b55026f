"""Claim: packing by token budget makes an update faster than padding or one sample at a time, at equal memory.

    python benchmarks/bench_packing.py [--samples 32 --layers 4 --hidden 256 --vocab 4096 --threads 1 --repeats 3]

One optimizer step (PPO loss with entropy, fp32 on a CPU, bf16 on a GPU) of a random Llama-like model on samples of
lognormal length (sigma 0.9) cut at `--longest`; a quarter of each is prompt. Rows, taking turns:

- packed: micro-batches of at most B tokens, planned by `megappo.data.schedule`.
- padded, sorted: `--micro` samples a micro-batch after sorting by length, each as long as the longest of them.
- padded: the same in random order, as most trainers do it. B is the size of its largest micro-batch.
- padded to the longest: every sample as long as the longest of all.
- one by one: one sample a micro-batch, unpadded.

Padding is real tokens here that are not trained on, so the output layer skips it in every row (a favour to padding).
Tokens are those of the samples. Processor time (all threads) is steadier on a busy machine. Memory is the peak of
resident memory (VmHWM, reset by writing 5 to /proc/self/clear_refs; Linux only) beyond what was there before the
step; on a GPU that of the allocator.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megappo.algorithms.policy_loss import PolicyLossConfig
from megappo.config.schema.optim import OptimConfig
from megappo.data.batch import Placement, RolloutBatch, SampleInfo
from megappo.data.schedule import Budget, plan
from megappo.engine.engine import EngineOptions, ModelEngine
from megappo.engine.losses import PolicyLoss
from megappo.models.spec import load_spec
from megappo.parallel import backend
from megappo.parallel.layout import ParallelLayout


@dataclass
class Variant:
    """Lengths as the engine sees them, and the micro-batches."""

    lengths: np.ndarray
    micro_batches: list[list[int]]

    @property
    def largest(self) -> int:
        return max(int(self.lengths[m].sum()) for m in self.micro_batches)


def heavy_tailed(n: int, median: float, longest: int, seed: int = 0) -> np.ndarray:
    draws = np.random.RandomState(seed).normal(np.log(median), 0.9, n)
    return np.clip(np.exp(draws), 8, longest).astype(np.int64)


def variants(lengths: np.ndarray, micro: int) -> dict[str, Variant]:
    def padded(order: np.ndarray, least: int = 0) -> Variant:
        groups = [order[i : i + micro] for i in range(0, len(order), micro)]
        out = lengths.copy()
        for group in groups:
            out[group] = max(least, lengths[group].max())
        return Variant(out, [sorted(group.tolist()) for group in groups])

    everything = np.arange(len(lengths))
    usual = padded(everything)
    budget = Budget(tokens=max(usual.largest, int(lengths.max())))
    packed = plan(lengths, [everything], 1, budget).micro_batches[0][0]
    return {
        "packed": Variant(lengths, packed),
        "padded, sorted": padded(np.argsort(-lengths, kind="stable")),
        "padded": usual,
        "padded to the longest": padded(everything, int(lengths.max())),
        "one by one": Variant(lengths, [[i] for i in everything.tolist()]),
    }


def random_batch(real: np.ndarray, lengths: np.ndarray, vocab: int) -> RolloutBatch:
    """Samples of `lengths` tokens of which the first `real` count; a quarter of those is prompt."""
    n, zeros = len(lengths), np.zeros(len(lengths), dtype=np.int64)
    prompt = np.maximum(real // 4, 1)
    mask = torch.cat(
        [(torch.arange(n) >= p) & (torch.arange(n) < r) for n, p, r in zip(lengths, prompt, real, strict=True)]
    )
    info = SampleInfo(np.arange(n), zeros, prompt, lengths, real - prompt, zeros * 1.0, zeros, zeros, ["s"] * n)
    g = torch.Generator().manual_seed(0)
    total = int(lengths.sum())
    columns = {"tokens": torch.randint(vocab, (total,), generator=g), "loss_mask": mask}
    columns["old_logprobs"] = torch.full((total,), -np.log(vocab))
    columns["advantages"] = torch.randn(total, generator=g)
    return RolloutBatch(info, Placement(ParallelLayout(), zeros), np.arange(n), columns)


def make_engine(folder: Path, dtype: torch.dtype, **sizes) -> ModelEngine:
    """A trained actor with random weights. `sizes`: keys of config.json beyond a Llama-like default."""
    hidden = sizes["hidden_size"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "intermediate_size": hidden * 11 // 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | sizes))
    backend.init_distributed()
    optim = OptimConfig(lr=1e-6)
    return ModelEngine(load_spec(folder), ParallelLayout(), EngineOptions(dtype=dtype), optim=optim, total_steps=1000)


def resident(key: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key + ":"))


def measured(run: Callable[[], object]) -> tuple[float, float, float]:
    """(seconds, processor seconds of all threads, MB beyond what was in use before)."""
    gc.collect()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM")
    return seconds, cpu, (peak - before) / 1e6


def compare(engine: ModelEngine, lengths: np.ndarray, micro: int, repeats: int) -> None:
    """Measure every variant, in turns after one step that does not count, and print the table."""
    cases = variants(lengths, micro)
    loss = PolicyLoss(PolicyLossConfig("ppo", 0.2, 0.2, 3.0), entropy_coeff=0.01)
    everything = np.arange(len(lengths))
    seconds: dict[str, float] = dict.fromkeys(cases, float("inf"))
    processor: dict[str, float] = dict.fromkeys(cases, float("inf"))
    memory: dict[str, float] = dict.fromkeys(cases, 0.0)
    losses: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            batch = random_batch(lengths, case.lengths, engine.spec.vocab_size)

            def step(batch=batch, case=case, name=name) -> None:
                stats = engine.train_step(batch, everything, case.micro_batches, loss, agg_mode="token-mean")
                losses[name] = stats.sums["actor/entropy"]

            s, cpu, mb = measured(step)
            if repeat:
                seconds[name], processor[name] = min(seconds[name], s), min(processor[name], cpu)
                memory[name] = max(memory[name], mb)
    assert max(losses.values()) - min(losses.values()) < 0.05, losses
    real = int(lengths.sum())
    columns = "what | micro-batches | largest, tokens | tokens run / real | s | × packed | × packed, processor"
    print(f"| {columns} | tokens/s | peak extra MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, case in cases.items():
        s, cpu = seconds[name], processor[name] / processor["packed"]
        print(
            f"| {name} | {len(case.micro_batches)} | {case.largest:,} | {case.lengths.sum() / real:.2f} | {s:.2f} "
            f"| {s / seconds['packed']:.2f} | {cpu:.2f} | {real / s:,.0f} | {memory[name]:,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("samples", 32), ("median", 80), ("longest", 768), ("micro", 4), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("layers", 4), ("hidden", 256), ("vocab", 4096), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = heavy_tailed(args.samples, args.median, args.longest)
    dtype = torch.bfloat16 if backend.has_cuda() else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "vocab_size": args.vocab}
        engine = make_engine(Path(folder) / "model", dtype, **sizes)
        print(
            f"{args.samples} samples, {lengths.sum():,} tokens, lengths {lengths.min()} to {lengths.max()} (median "
            f"{int(np.median(lengths))}); {args.layers} layers of {args.hidden}, vocabulary {args.vocab}, "
            f"{args.threads} threads, best of {args.repeats}"
        )
        compare(engine, lengths, args.micro, args.repeats)


if __name__ == "__main__":
    main()
