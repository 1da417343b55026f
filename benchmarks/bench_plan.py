"""Claim: the plan of a thousand ranks takes a second or two, and moves no byte more than it must.

    python benchmarks/bench_plan.py [--repeats 3]

Shapes only, no weights. Models: Llama-3-405B-like (126 layers, 16,384 wide, 1,138 tensors) and Qwen3-235B-A22B-like
(94 layers, 128 experts, 36,661 tensors), bf16. Each rank computes the whole plan by itself, so this is what one rank
waits before its first synchronisation; later ones reuse it. `sent`: the busiest sender against the mean of those that
could send.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megappo.bridge.inference import InferenceWeights
from megappo.bridge.megatron import MegatronWeights
from megappo.bridge.plan import Plan, plan
from megappo.models.spec import ModelSpec, MoESpec
from megappo.parallel.layout import ParallelLayout


def spec(architecture: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more) -> ModelSpec:
    fixed = {"norm_eps": 1e-5, "max_positions": 1, "tied_embeddings": False, "qkv_bias": False, "sliding_window": None}
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv, "ffn_size": ffn}
    settings = {**fixed, **sizes, "vocab_size": vocab, "head_dim": 128, "qk_norm": False, **more}
    return ModelSpec(path=Path(), architecture=architecture, **settings)


LLAMA = spec("LlamaForCausalLM", 126, 16384, 128, 8, 53248, 128256)
QWEN = spec(
    "Qwen3MoeForCausalLM", 94, 4096, 64, 4, 12288, 151936, qk_norm=True, moe=MoESpec(128, 8, 1536, normalize=True)
)


def cases() -> dict:
    uneven = {"first_stage_layers": 7, "last_stage_layers": 7}
    return {
        "405B, 1,024 ranks TP8 PP16 to 8 engines of TP8": (
            MegatronWeights(LLAMA, ParallelLayout(world=1024, tp=8, pp=16, **uneven)),
            InferenceWeights(LLAMA, tp=8, replicas=8),
        ),
        "405B, the same to 64 other ranks": (
            MegatronWeights(LLAMA, ParallelLayout(world=1024, tp=8, pp=16, **uneven)),
            InferenceWeights(LLAMA, tp=8, replicas=8, first_rank=1024),
        ),
        "405B, 1,024 ranks TP8 PP16 to TP16 PP6 on 960": (
            MegatronWeights(LLAMA, ParallelLayout(world=1024, tp=8, pp=16, **uneven)),
            MegatronWeights(LLAMA, ParallelLayout(world=960, tp=16, pp=6)),
        ),
        "235B-A22B, 1,024 ranks TP4 PP8 EP32 to 2 engines of TP32 EP32": (
            MegatronWeights(
                QWEN, ParallelLayout(world=1024, tp=4, pp=8, ep=32, first_stage_layers=11, last_stage_layers=11)
            ),
            InferenceWeights(QWEN, tp=32, ep=32, replicas=2, first_rank=1024),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print("| from, to | plan s | processor s | routes | GB needed | GB moved | / bound | all-gather GB | sent |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (source, destination) in cases().items():
        best = best_cpu = float("inf")
        for _ in range(args.repeats):
            start, start_cpu = time.perf_counter(), time.process_time()
            found = plan(source, destination)
            best, best_cpu = min(best, time.perf_counter() - start), min(best_cpu, time.process_time() - start_cpu)
        print(row(name, found, source, best, best_cpu, len(destination.ranks)), flush=True)


def row(name: str, found: Plan, source: MegatronWeights, seconds: float, cpu: float, receivers: int) -> str:
    full = sum(_numel(shape) for shape in source.hf_shapes().values()) * 2 / 1e9
    sent = found.sent()
    busiest = max(sent.values(), default=0) / (sum(sent.values()) / len(source.ranks)) if sent else 1.0
    moved, needed = found.moved * 2 / 1e9, found.needed * 2 / 1e9
    ratio = found.moved / max(found.lower_bound, 1)
    return (
        f"| {name} | {seconds:.2f} | {cpu:.2f} | {len(found.routes):,} | {needed:,.0f} | {moved:,.0f} | {ratio:.3f} "
        f"| {full * receivers:,.0f} | {busiest:.2f} |"
    )


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


if __name__ == "__main__":
    main()
