"""Micro-batch schedule against two greedy schedulers, on the same samples in the same run.

    python benchmarks/bench_schedule.py [--seeds 3] [--small]

Lengths are lognormal (median 1,500 or 1,560 tokens, sigma 1) cut at 16,384, which is also the token budget of
a micro-batch. Columns: micro-batches a rank and their lower bound, max/mean over ranks of tokens and of
attention work (sum of length squared), max/mean over all micro-batches of tokens, share of the budget used,
seconds (best of 2).

- in order: samples dealt to ranks in equal contiguous runs, each rank fills micro-batches in order.
- greedy: longest sample first to the rank with fewest tokens, each rank packs first-fit decreasing.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable

import numpy as np

from megappo.data.schedule import Budget, lower_bound, plan

TOKENS = 16_384
Ranks = list[list[list[int]]]


def lognormal(n: int, seed: int, median: float) -> np.ndarray:
    draws = np.random.RandomState(seed).normal(np.log(median), 1.0, n)
    return np.clip(np.exp(draws), 1, TOKENS).astype(np.int64)


def first_fit(lengths: list[int], indices: list[int]) -> list[list[int]]:
    micros: list[list[int]] = []
    rooms: list[int] = []
    for i in indices:
        k = next((k for k, room in enumerate(rooms) if room >= lengths[i]), len(rooms))
        if k == len(rooms):
            micros.append([])
            rooms.append(TOKENS)
        micros[k].append(i)
        rooms[k] -= lengths[i]
    return micros


def even_counts(ranks: Ranks) -> Ranks:
    count = max(len(r) for r in ranks)
    return [r + [[]] * (count - len(r)) for r in ranks]


def in_order(lengths: np.ndarray, dp: int) -> Ranks:
    sizes, n = lengths.tolist(), len(lengths)
    return even_counts([first_fit(sizes, list(range(r * n // dp, (r + 1) * n // dp))) for r in range(dp)])


def greedy(lengths: np.ndarray, dp: int) -> Ranks:
    sizes = lengths.tolist()
    heap = [(0, r) for r in range(dp)]
    mine: list[list[int]] = [[] for _ in range(dp)]
    for i in np.argsort(-lengths, kind="stable").tolist():
        load, r = heap[0]
        mine[r].append(i)
        heapq.heapreplace(heap, (load + sizes[i], r))
    return even_counts([first_fit(sizes, indices) for indices in mine])


def ours(lengths: np.ndarray, dp: int) -> Ranks:
    return plan(lengths, [np.arange(len(lengths))], dp, Budget(tokens=TOKENS)).micro_batches[0]


def measure(name: str, schedule: Callable[[np.ndarray, int], Ranks], lengths: np.ndarray, dp: int) -> None:
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        ranks = schedule(lengths, dp)
        seconds.append(time.perf_counter() - start)
    tokens = np.array([[lengths[m].sum() for m in r] for r in ranks])
    work = np.array([[(lengths[m] ** 2).sum() for m in r] for r in ranks]).sum(1)
    bound = -(-lower_bound(lengths, TOKENS) // dp)
    assert sorted(i for r in ranks for m in r for i in m) == list(range(len(lengths)))
    assert tokens.max() <= TOKENS
    print(
        f"| {len(lengths):,} x {dp} | {name} | {tokens.shape[1]} | {bound} "
        f"| {tokens.sum(1).max() / tokens.sum(1).mean():.4f} | {work.max() / work.mean():.4f} "
        f"| {tokens.max() / tokens.mean():.4f} | {tokens.mean() / TOKENS:.3f} | {min(seconds):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="leave out 100,000 samples on 1,024 ranks")
    args = parser.parse_args()
    print("| samples x ranks | scheduler | micro-batches | bound | tokens | work | micro | used | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n, dp in ((4096, 64),) if args.small else ((4096, 64), (100_000, 1024)):
        for seed in range(args.seeds if n < 10_000 else 1):
            for median in (1500, 1560):
                lengths = lognormal(n, seed, median)
                for name, schedule in (("in order", in_order), ("greedy", greedy), ("MegaPPO", ours)):
                    measure(name, schedule, lengths, dp)


if __name__ == "__main__":
    main()
