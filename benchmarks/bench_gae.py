"""Claim: jagged, mask-correct GAE beats a padded per-token loop by far, and a padded blocked one too.

Baselines, in the same run on the same data: the loop most systems use (padded `[batch, time]`, one Python
step a time step, vectorised over the batch), and a blocked one that ignores masks (padded, triangular matrix
products, carries walked block by block). The time to pad and unpad is not charged to them.

    python benchmarks/bench_gae.py [--sequences 512] [--max-length 8192] [--threads 2] [--repeats 7]
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megappo.algorithms.advantages import gae

GAMMA, LAM = 1.0, 0.95


def padded_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Masked tokens are skipped by carrying the state over them; `[batch, time]`."""
    following = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(following)
    reversed_advantages = []
    valid = mask.to(values.dtype)
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + GAMMA * following - values[:, t]
        candidate = delta + GAMMA * LAM * running
        following = values[:, t] * valid[:, t] + (1 - valid[:, t]) * following
        running = candidate * valid[:, t] + (1 - valid[:, t]) * running
        reversed_advantages.append(running)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def padded_blocked(rewards: Tensor, values: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """No masks: every position up to the padded end is a time step; `[batch, time]`."""
    batch, time_steps = values.shape
    following = torch.cat([values[:, 1:], values.new_zeros(batch, 1)], dim=1)
    delta = torch.flip(rewards + GAMMA * following - values, dims=[1])
    delta = torch.nn.functional.pad(delta, (0, -time_steps % block)).view(batch, -1, block)
    steps = torch.arange(block)
    distance = steps.unsqueeze(0) - steps.unsqueeze(1)
    powers = torch.where(distance >= 0, (GAMMA * LAM) ** distance.clamp(min=0).float(), 0.0)
    local = delta @ powers
    carry_decay = (GAMMA * LAM) ** (steps + 1).float()
    carry, blocks = values.new_zeros(batch, 1), []
    for k in range(local.shape[1]):
        blocks.append(local[:, k] + carry * carry_decay)
        carry = blocks[-1][:, -1:]
    advantages = torch.flip(torch.cat(blocks, dim=1)[:, :time_steps], dims=[1])
    return advantages, advantages + values


def jagged_batch(lengths: Tensor, prompt: int, hole_share: float, seed: int) -> tuple[Tensor, ...]:
    """A masked prompt before each response, and `hole_share` of the response masked in spans of 32 tokens."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + prompt).cumsum(0)])
    total = int(cu_seqlens[-1])
    spans = torch.rand(total // 32 + 1, generator=generator) >= hole_share
    mask = spans.repeat_interleave(32)[:total].clone()
    for start in cu_seqlens[:-1].tolist():
        mask[start : start + prompt] = False
    rewards, values = torch.randn(2, total, generator=generator)
    return rewards.contiguous(), values.contiguous(), mask, cu_seqlens


def padded(column: Tensor, cu_seqlens: Tensor, prompt: int) -> Tensor:
    responses = [column[a + prompt : b] for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)]
    return torch.nn.utils.rnn.pad_sequence(responses, batch_first=True)


def fastest(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Best wall time of each in ms; the candidates take turns, so that a busy machine disturbs all alike."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def lengths_up_to(sequences: int, max_length: int, share: float, seed: int) -> Tensor:
    """Lengths between 1 and twice the mean, `share` of the padded size in all, one at the maximum."""
    lengths = (torch.rand(sequences, generator=torch.Generator().manual_seed(seed)) * 2 * share * max_length).long()
    lengths = lengths.clamp(1, max_length)
    lengths[0] = max_length
    return lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    prompt, lengths = 128, lengths_up_to(args.sequences, args.max_length, 0.44, seed=0)
    rewards, values, mask, cu = jagged_batch(lengths, prompt, 0.0, seed=1)
    holed = jagged_batch(lengths, prompt, 0.1, seed=1)
    dense = [padded(column, cu, prompt) for column in (rewards, values, mask)]
    print(f"{args.sequences} sequences, {int(mask.sum()):,} trainable of {mask.numel():,} jagged tokens;")
    print(f"padded {tuple(dense[1].shape)} = {dense[1].numel():,}")
    print(f"{args.threads} threads, best of {args.repeats}")

    reference, _ = padded_loop(*dense)
    ours = padded(gae(rewards, values, mask, cu, GAMMA, LAM)[0], cu, prompt)
    error = (ours - reference * dense[2]).abs().max()
    print(f"largest difference from the loop: {float(error):.1e}")

    best = fastest(
        {
            "padded per-token loop": lambda: padded_loop(*dense),
            "padded blocked, no mask": lambda: padded_blocked(*dense[:2]),
            "gae": lambda: gae(rewards, values, mask, cu, GAMMA, LAM),
            "gae, 10 % tool tokens": lambda: gae(*holed, GAMMA, LAM),
            "gae, VAPO (two lambdas)": lambda: gae(
                rewards, values, mask, cu, GAMMA, LAM, lam_returns=1.0, adaptive_alpha=0.05
            ),
        },
        args.repeats,
    )
    for name, milliseconds in best.items():
        print(f"  {name:26s}{milliseconds:9.1f} ms   {milliseconds / best['gae']:6.2f} × gae")

    print("linearity (same lengths, more sequences):")
    sizes = [args.sequences // 4, args.sequences // 2, args.sequences]
    batches = {size: jagged_batch(lengths[-size:], prompt, 0.0, seed=1) for size in sizes}
    runs = {str(size): lambda size=size: gae(*batches[size], GAMMA, LAM) for size in sizes}
    for size, milliseconds in zip(sizes, fastest(runs, args.repeats).values(), strict=True):
        tokens = batches[size][1].numel()
        per_token = 1e6 * milliseconds / tokens
        print(f"  {size:6d} sequences {tokens:12,} tokens {milliseconds:8.1f} ms {per_token:7.1f} ns/token")


if __name__ == "__main__":
    main()
