"""Time and memory on one GPU: the output layer, attention over packed sequences, a training step.

    python benchmarks/bench_gpu.py [--small] [--tokens 8192 --vocab 151936 --hidden 896 --repeats 5]
                                   [--samples 64 --median 500 --longest 4096 --micro 2]

Everything is bf16. Best of `--repeats`, rows in turns, after one run that does not count (compilation, cuBLAS).

1. Output layer, forward and backward of a clipped policy loss with an entropy bonus: the three bare matrix products,
   log_softmax over all logits in fp32, and ours with the elementwise work done by torch and by Triton. The tokens
   are halved until log_softmax fits. Memory is beyond the inputs and the gradients that are handed over.
2. Attention alone, forward and backward, heavy-tailed lengths: packed as in training, one sequence at a time, and
   padded to the longest.
3. An optimizer step of a random model with the sizes of Qwen2.5-0.5B: `compare` of `bench_packing.py`. With
   `--micro` samples of `--longest` tokens at once it wants about 30 GB.

`--small` shrinks everything and runs on a CPU too, where the figures mean nothing: it only shows that the script works.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_packing import compare, heavy_tailed, make_engine
from torch import Tensor

from megappo.models.layers import PackedAttention, pack
from megappo.parallel import backend, vocab, vocab_triton

QWEN_05B = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 1000}
DTYPE = torch.bfloat16


def measure(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """{name: (milliseconds, peak MB of device memory beyond the start)}; NaN MB without a GPU."""
    best = dict.fromkeys(runs, float("inf"))
    peaks = dict.fromkeys(runs, 0.0)
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            gc.collect()
            before = 0
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            run()
            backend.synchronize()
            milliseconds = 1e3 * (time.perf_counter() - start)
            if repeat:
                best[name] = min(best[name], milliseconds)
                if torch.cuda.is_available():
                    peaks[name] = max(peaks[name], (torch.cuda.max_memory_allocated() - before) / 1e6)
    return {name: (best[name], peaks[name] if torch.cuda.is_available() else float("nan")) for name in runs}


# ------------------------------------------------------------------ 1. output layer
class Head:
    def __init__(self, tokens: int, vocabulary: int, hidden: int, device: torch.device):
        g = torch.Generator(device).manual_seed(0)
        self.vocabulary = vocabulary
        self.hidden = torch.randn(tokens, hidden, generator=g, device=device, dtype=DTYPE)
        self.weight = torch.randn(vocabulary, hidden, generator=g, device=device, dtype=DTYPE) * hidden**-0.5
        self.targets = torch.randint(vocabulary, (tokens,), generator=g, device=device)
        self.advantages = torch.randn(tokens, generator=g, device=device)
        self.old, _ = vocab.token_logprobs(self.hidden, self.weight, self.targets, vocab_size=vocabulary)
        self.old += 0.2 * torch.randn(tokens, generator=g, device=device)

    def loss(self, logprobs: Tensor, entropy: Tensor, start: int, stop: int) -> Tensor:
        a = self.advantages[start:stop]
        ratio = (logprobs - self.old[start:stop]).exp()
        return torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)).sum() - 0.01 * entropy.sum()

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def bare(self) -> tuple[Tensor, Tensor]:
        logits = self.hidden @ self.weight.t()
        return logits @ self.weight, logits.t() @ self.hidden

    def log_softmax(self) -> tuple[Tensor, Tensor]:
        leaves = self.leaves()
        logprobs = (leaves[0] @ leaves[1].t()).float().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        picked = logprobs.gather(1, self.targets[:, None]).squeeze(1)
        return torch.autograd.grad(self.loss(picked, entropy, 0, len(picked)), leaves)

    def ours(self, method: str, use_triton: bool) -> tuple[Tensor, Tensor]:
        vocab.USE_TRITON = use_triton
        leaves = self.leaves()
        options = {"vocab_size": self.vocabulary, "want_entropy": True}
        if method == "fused":
            loss = vocab.fused_token_loss(*leaves, self.targets, self.loss, **options)[0]
        else:
            loss = self.loss(*vocab.token_logprobs(*leaves, self.targets, **options), 0, len(self.targets))
        vocab.USE_TRITON = True
        return torch.autograd.grad(loss, leaves)


def bench_head(tokens: int, vocabulary: int, hidden: int, repeats: int) -> None:
    device = backend.device()
    if device.type == "cuda":  # logits in bf16 and fp32, log-probs, their exponentials and products, and gradients
        while tokens > 256 and tokens * vocabulary * 28 > torch.cuda.mem_get_info()[0]:
            tokens //= 2
    head = Head(tokens, vocabulary, hidden, device)
    runs = {"bare products": head.bare, "log_softmax": head.log_softmax}
    kinds = {"torch": False} | ({"Triton": True} if vocab_triton.usable(device) else {})
    for method in ("fused", "recomputing"):
        runs |= {f"{method}, {k}": lambda m=method, on=on: head.ours(m, on) for k, on in kinds.items()}
    wanted = head.log_softmax()[1].float()
    errors = {name: float((run()[1].float() - wanted).norm() / wanted.norm()) for name, run in list(runs.items())[2:]}
    del wanted
    results = measure(runs, repeats)
    gradients = 2 * (head.hidden.numel() + head.weight.numel()) / 1e6
    print(f"\n## Output layer: {tokens} tokens x {vocabulary} vocabulary x {hidden} hidden, entropy in the loss")
    print("| what | ms | × bare | × log_softmax | extra MB | d weight vs log_softmax |")
    print("|---|---|---|---|---|---|")
    for name, (ms, mb) in results.items():
        bare, plain = results["bare products"][0], results["log_softmax"][0]
        wrong = f"{errors[name]:.1e}" if name in errors else "-"
        print(f"| {name} | {ms:.2f} | {ms / bare:.2f} | {ms / plain:.2f} | {mb - gradients:,.0f} | {wrong} |")
    if len(kinds) == 1:
        print("Triton is missing or cannot run here: its rows are left out.")


# ------------------------------------------------------------------ 2. attention
def bench_attention(samples: int, median: float, longest: int, repeats: int) -> None:
    device = backend.device()
    heads, shared, dim = 14, 2, 64
    lengths = heavy_tailed(samples, median, longest).tolist()
    total, most = sum(lengths), max(lengths)
    attention = PackedAttention.__new__(PackedAttention)  # the attention alone, without a model around it
    torch.nn.Module.__init__(attention)
    attention.softmax_scale, attention.cp_group = None, None
    row = pack(lengths, device)
    alone = [pack([n], device) for n in lengths]

    def rows(count: int, n: int) -> list[Tensor]:
        shapes = ((count, n, heads, dim), (count, n, shared, dim), (count, n, shared, dim))
        return [torch.randn(s, device=device, dtype=DTYPE, requires_grad=True) for s in shapes]

    flat, square = [x.detach().transpose(0, 1).requires_grad_() for x in rows(1, total)], rows(samples, most)

    def packed() -> None:
        torch.autograd.grad(attention(*flat, packed_seq_params=row).sum(), flat)

    def one_by_one() -> None:
        parts = zip(*(x.split(lengths) for x in flat), alone, strict=True)
        out = torch.cat([attention(q, k, v, packed_seq_params=p) for q, k, v, p in parts])
        torch.autograd.grad(out.sum(), flat)

    def padded() -> None:
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in square), is_causal=True, enable_gqa=True)
        torch.autograd.grad(out.sum(), square)

    results = measure({"packed": packed, "one by one": one_by_one, "padded to the longest": padded}, repeats)
    sizes = f"{samples} sequences, {total:,} tokens, longest {most}, {heads} heads of {dim}, {shared} for keys"
    print(f"\n## Attention: {sizes}")
    print("| what | ms | × packed | extra MB |")
    print("|---|---|---|---|")
    for name, (ms, mb) in results.items():
        print(f"| {name} | {ms:.2f} | {ms / results['packed'][0]:.2f} | {mb:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 8192), ("vocab", 151936), ("hidden", 896), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("samples", 64), ("median", 500), ("longest", 4096), ("micro", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not backend.has_cuda() and not args.small:
        parser.exit(1, "error: torch sees no CUDA device: use a machine that has one, or --small\n")
    backend.init_distributed()
    card = torch.cuda.get_device_name() if backend.has_cuda() else "no GPU"
    triton = importlib.util.find_spec("triton") is not None
    fused = "Transformer Engine" if backend.use_fused_layers(DTYPE) else "torch layers"
    print(f"{card}; torch {torch.__version__}; Triton {'installed' if triton else 'not installed'}; {fused}")
    tokens, vocabulary, hidden = (64, 500, 32) if args.small else (args.tokens, args.vocab, args.hidden)
    samples, median, longest = (6, 20, 60) if args.small else (args.samples, args.median, args.longest)
    repeats = 1 if args.small else args.repeats
    bench_head(tokens, vocabulary, hidden, repeats)
    bench_attention(samples, median, longest, repeats)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder) / "model", DTYPE, **(SMALL if args.small else QWEN_05B))
        count = sum(p.numel() for p in engine.chunks[0].parameters())
        lengths = heavy_tailed(samples, median, longest)
        print(f"\n## Optimizer step: {count / 1e9:.2f} G parameters, {samples} samples, {lengths.sum():,} tokens")
        compare(engine, lengths, args.micro, min(repeats, 2))


if __name__ == "__main__":
    main()
