"""Choosing tokens: reproducible, independent of batch composition, in plain torch.

A response is a function of (weights, prompt, seed). The random numbers come from a counter-based generator
keyed by (seed, position, token), see Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
So it does not matter which other samples share the batch, in which order, or on how many ranks.

The draw is an exponential race: with E_v ~ Exp(1) independent, argmax_v p_v / E_v is distributed as p (the
Gumbel-max trick without its second logarithm). It was preferred to one uniform number and a cumulative sum
because of rounding: batches of different shape give logits that differ in the last bits. In the race noise of
relative size e changes the winner with a probability of about e; in a cumulative sum the noise of all earlier
tokens adds up at each of the V boundaries. The race also costs less: no float64 pass over the vocabulary, no
search.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megappo.rollout.base import SamplingParams

_CPU_CHUNK = 1 << 17  # elements: the temporaries of a chunk of rows stay in a core's L2 cache
_GPU_CHUNK = 1 << 25

_GOLDEN = 0x9E3779B97F4A7C15
# u = (h + 1/2) * _UNIT lies in (0, 1): h has 31 bits, and the factor is a little below 2^-31 so that u cannot
# round up to 1 in float32. Where it matters (small E) a factor on u scales every E alike and cancels.
_UNIT = 2.0**-31 * (1 - 2.0**-20)


def _signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _xorshift_(x: Tensor, shift: int, bits: int) -> Tensor:
    """x ^= x >>> shift, in place; torch's >> on signed integers is arithmetic, hence the mask."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (bits - shift)) - 1))


def _splitmix64_(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on an int64 tensor, in place."""
    _xorshift_(x, 30, 64).mul_(_signed(0xBF58476D1CE4E5B9, 64))
    _xorshift_(x, 27, 64).mul_(_signed(0x94D049BB133111EB, 64))
    return _xorshift_(x, 31, 64)


def seeds_tensor(seeds: list[int], device: torch.device | str = "cpu") -> Tensor:
    """int64 `[n]` from Python integers of any size or sign (taken modulo 2^64)."""
    return torch.tensor([_signed(s, 64) for s in seeds], dtype=torch.int64, device=device)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """64-bit keys, int64, one for each (seed, position); the int64 `seeds` and `positions` broadcast.

    `position` counts response tokens from 0, whatever the prompt length and padding.
    """
    x = _splitmix64_(seeds + _signed(_GOLDEN, 64))
    return _splitmix64_(x + (positions + 1) * _signed(_GOLDEN, 64))


@lru_cache(maxsize=8)
def _token_hashes(vocab: int, device: torch.device) -> Tensor:
    """int32 `[vocab]`: token ids, well mixed, so that the per-step hash can be short."""
    mixed = _splitmix64_(torch.arange(vocab, dtype=torch.int64) + _signed(0xD1B54A32D192ED03, 64))
    return (mixed >> 32).to(torch.int32).to(device)


def race_times(keys: Tensor, vocab: int) -> Tensor:
    """Minus the exponential variates of the race: float32 `[n, vocab]`, `-E` with E ~ Exp(1), all < 0.

    `keys`: int64 `[n]` from `row_keys`. Two rounds of multiply-xorshift (constants of the two-round hash in
    github.com/skeeto/hash-prospector) in int32, which CPUs multiply eight at a time; a half of the 64-bit key
    enters before each round, so that rows do not collide as they would with a 32-bit key.
    """
    low = ((keys << 32) >> 32).to(torch.int32).unsqueeze(1)
    high = (keys >> 32).to(torch.int32).unsqueeze(1)
    x = torch.bitwise_xor(_token_hashes(vocab, keys.device), low)
    x.mul_(0x7FEB352D)
    _xorshift_(x, 15, 32).add_(high).mul_(_signed(0x846CA68B, 32))
    _xorshift_(x, 16, 32).bitwise_and_(0x7FFFFFFF)
    return x.to(torch.float32).add_(0.5).mul_(-_UNIT).log1p_()


def keep_mask(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Tokens that top-k, then top-p, leave in play: bool, shape of `probs` `[n, vocab]` (rows sum to 1).

    Top-k keeps all tokens at least as likely as the k-th. Top-p keeps the smallest set of most likely tokens
    whose probability, renormalised after top-k, reaches `top_p`; the most likely token is always kept.
    """
    vocab = probs.shape[-1]
    keep = torch.ones_like(probs, dtype=torch.bool)
    if 0 < top_k < vocab:
        keep = probs >= probs.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1:
        ordered, order = (probs * keep).sort(dim=-1, descending=True)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        kept = before < top_p * ordered.sum(-1, keepdim=True, dtype=torch.float64)
        kept[:, 0] = True
        keep = keep & torch.zeros_like(keep).scatter_(-1, order, kept)
    return keep


def sample_tokens(logits: Tensor, keys: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of `logits` `[n, vocab]`: (ids int64 `[n]`, log-probs float32 `[n]`).

    `keys`: int64 `[n]` from `row_keys` (unused when greedy). Logits of any dtype; the arithmetic is float32.

    The log-prob is that of the chosen token under the *full* softmax(logits / temperature), also where top-k
    or top-p truncated the draw: the trainer recomputes log-probs from logits alone and cannot know the kept
    set, so a renormalised value would make the ratio at the first step differ from 1 (trl#6789, verl#6240).
    At temperature 0 it is that of temperature 1.
    """
    n, vocab = logits.shape
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device), logits.new_empty(0, dtype=torch.float32)
    rows = max(1, (_CPU_CHUNK if logits.device.type == "cpu" else _GPU_CHUNK) // vocab)
    if rows >= n:
        return _sample_chunk(logits, keys, sampling)
    parts = [_sample_chunk(logits[i : i + rows], keys[i : i + rows], sampling) for i in range(0, n, rows)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _sample_chunk(logits: Tensor, keys: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    probs = logits.softmax(-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        score = race_times(keys, logits.shape[-1])
        torch.div(probs, score, out=score)  # -p/E: the winner is the minimum
        if sampling.truncated:
            score.masked_fill_(~keep_mask(probs, sampling.top_k, sampling.top_p), float("inf"))
        tokens = score.argmin(-1)
    return tokens, probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
