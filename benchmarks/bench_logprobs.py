"""Fused log-prob + entropy + loss of the output layer against the bare matrix products, in the same run.

    python benchmarks/bench_logprobs.py [--tokens 8192 --vocab 32768 --hidden 1024 --repeats 2 --threads 2]

Forward and backward of a clipped policy loss in fp32. Rows:

- bare products: hidden @ weight.T, D @ weight and D.T @ hidden on preallocated outputs, nothing else.
- log_softmax: the plain way, logits of all tokens, torch.log_softmax, gather, entropy from p log p.
- MegaPPO fused, without entropy, with its value and with its gradient; MegaPPO recomputing (four products).

Time is the best of `--repeats` interleaved runs; processor time (all threads) is steadier on a busy machine.
Memory is the peak of resident memory during a run (VmHWM of
/proc/self/status, reset before each run by writing 5 to /proc/self/clear_refs; Linux only) minus resident
memory before it and minus the size of the two gradients.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch

from megappo.parallel.vocab import fused_token_loss, token_logprobs


def resident(key: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key + ":"))


class Problem:
    def __init__(self, tokens: int, vocab: int, hidden: int) -> None:
        torch.manual_seed(0)
        self.vocab = vocab
        self.hidden = torch.randn(tokens, hidden).requires_grad_()
        self.weight = (torch.randn(vocab, hidden) * hidden**-0.5).requires_grad_()
        self.targets = torch.randint(vocab, (tokens,))
        self.advantages = torch.randn(tokens)
        self.old = token_logprobs(self.hidden.detach(), self.weight.detach(), self.targets, vocab_size=vocab)[0]
        self.old += 0.2 * torch.randn(tokens)

    def loss(self, coefficient: float) -> Callable:
        def token_loss(logprobs, entropy, start, stop):
            a = self.advantages[start:stop]
            ratio = (logprobs - self.old[start:stop]).exp()
            total = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)).sum()
            if coefficient:
                total = total - coefficient * entropy.sum()
            return total / len(self.targets)

        return token_loss

    def bare(self) -> None:
        with torch.no_grad():
            torch.mm(self.hidden, self.weight.t(), out=self.big)
            torch.mm(self.big, self.weight, out=self.d_hidden)
            torch.mm(self.big.t(), self.hidden, out=self.d_weight)

    def prepare_bare(self) -> None:
        self.big = torch.zeros(len(self.hidden), self.vocab)
        self.d_hidden, self.d_weight = torch.zeros_like(self.hidden), torch.zeros_like(self.weight)

    def release_bare(self) -> None:
        self.big = self.d_hidden = self.d_weight = None

    def log_softmax(self) -> torch.Tensor:
        all_logprobs = torch.log_softmax(self.hidden @ self.weight.t(), -1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        logprobs = all_logprobs.gather(1, self.targets[:, None]).squeeze(1)
        return self.backward(self.loss(0.01)(logprobs, entropy, 0, len(logprobs)))

    def fused(self, want_entropy: bool, coefficient: float) -> torch.Tensor:
        loss, _, _ = fused_token_loss(
            self.hidden,
            self.weight,
            self.targets,
            self.loss(coefficient),
            vocab_size=self.vocab,
            want_entropy=want_entropy,
        )
        return self.backward(loss)

    def recomputing(self) -> torch.Tensor:
        columns = token_logprobs(self.hidden, self.weight, self.targets, vocab_size=self.vocab, want_entropy=True)
        return self.backward(self.loss(0.01)(*columns, 0, len(self.targets)))

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        return loss.detach()


def measure(problem: Problem, run: Callable) -> tuple[float, float, float, torch.Tensor | None]:
    """(seconds, processor seconds, MB beyond the two gradients, gradient of the weight)."""
    problem.hidden.grad = problem.weight.grad = None
    gc.collect()
    if run == problem.bare:
        problem.prepare_bare()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = resident("VmRSS")
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resident("VmHWM") - before
    problem.release_bare()
    gradients = 4 * (problem.hidden.numel() + problem.weight.numel())
    return seconds, cpu, (peak - gradients) / 1e6, problem.weight.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 8192), ("vocab", 32768), ("hidden", 1024), ("repeats", 2), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    problem = Problem(args.tokens, args.vocab, args.hidden)
    runs: dict[str, Callable] = {
        "bare products": problem.bare,
        "log_softmax": problem.log_softmax,
        "MegaPPO fused": lambda: problem.fused(False, 0.0),
        "MegaPPO fused, entropy value": lambda: problem.fused(True, 0.0),
        "MegaPPO fused, entropy gradient": lambda: problem.fused(True, 0.01),
        "MegaPPO recomputing, entropy gradient": problem.recomputing,
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    memory: dict[str, float] = dict.fromkeys(runs, 0.0)
    golden, error = None, {}
    for _ in range(args.repeats):
        for name, run in runs.items():
            s, c, mb, grad = measure(problem, run)
            seconds[name].append(s)
            cpu[name].append(c)
            memory[name] = max(memory[name], mb)
            if name == "log_softmax":
                golden = grad
            elif "gradient" in name:
                error[name] = ((grad - golden).norm() / golden.norm()).item()
    bare, bare_cpu = min(seconds["bare products"]), min(cpu["bare products"])
    print(f"{args.tokens} tokens x {args.vocab} vocabulary x {args.hidden} hidden, {args.threads} threads")
    print("| what | s | / bare | processor / bare | extra MB | d weight vs log_softmax |")
    print("|---|---|---|---|---|---|")
    for name in runs:
        extra = "-" if name == "bare products" else f"{memory[name]:.0f}"
        wrong = f"{error[name]:.1e}" if name in error else "-"
        s, c = min(seconds[name]), min(cpu[name])
        print(f"| {name} | {s:.2f} | {s / bare:.3f} | {c / bare_cpu:.3f} | {extra} | {wrong} |")


if __name__ == "__main__":
    main()
