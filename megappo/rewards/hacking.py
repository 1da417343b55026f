"""Signs of reward hacking in a batch: copies among well-paid responses, copied prompts, length that pays.

Each rank sketches the responses that it holds (`sketch`); the sketches are gathered and `hacking_metrics` computes the
same numbers on every rank, whichever ranks held the responses. Everything works on token ids with 64-bit hashes: two
different responses pass for equal with a probability of about 1e-15 in a batch.

Cost: linear in tokens for the sketch (4,096 responses of 2,048 tokens: about two seconds of one core, shared by all
ranks), and at most `max_pairs` comparisons of sketches for near-duplicates. Beyond that, and beyond `max_grams`
n-grams, shares are estimates from a sample that depends on the contents only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megappo.rewards.base import SUCCESS_SCORE

BINS = 64  # of a sketch: the similarity of two responses is known to about ±0.05
_EMPTY = np.uint16(0xFFFF)
_CHUNK = 1 << 20  # tokens worked on at a time
_DISTINCT = 4  # the n of distinct_4
_SHORT = 512  # tokens; of longer responses a sample of the n-grams is looked up in the prompt
_MULTIPLY, _STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class HackingRules:
    """What counts as what.

    Attributes:
        success: score from which a response is well paid.
        ngram: tokens of an n-gram.
        similar: Jaccard similarity of the n-gram sets from which two responses are near-duplicates.
        copied: share of a response's n-grams that are in its prompt from which it is a copy of the prompt.
        max_pairs: comparisons of two responses.
        max_grams: 4-grams kept for `distinct_4`.
    """

    success: float = SUCCESS_SCORE
    ngram: int = 5
    similar: float = 0.8
    copied: float = 0.8
    max_pairs: int = 1 << 23
    max_grams: int = 1 << 18


@dataclass(frozen=True)
class Sketch:
    """What one rank tells of n responses: about 150 bytes each.

    Attributes:
        index: int64 `[n]`, each response's place in the batch.
        digest: uint64 `[n]`, of all its tokens.
        bins: uint16 `[n, 64]`, one-permutation MinHash of its n-grams; 0xFFFF: the bin is empty.
        prompt_share: float32 `[n]`, share of its n-grams that are in its prompt; 0 for very short responses.
        grams: uint64, the distinct 4-grams whose hash falls into the part that is kept.
        gram_count: all 4-grams, with repetitions.
        gram_bits: one in 2^bits of the hashes is kept.
    """

    index: np.ndarray
    digest: np.ndarray
    bins: np.ndarray
    prompt_share: np.ndarray
    grams: np.ndarray
    gram_count: int
    gram_bits: int


def sketch(
    tokens: np.ndarray,
    cu_seqlens: np.ndarray,
    prompt_len: np.ndarray,
    index: np.ndarray,
    total_tokens: int,
    rules: HackingRules = HackingRules(),
) -> Sketch:
    """Sketch the responses of this rank.

    Args:
        tokens: `[total]` ids; sample i is `tokens[cu_seqlens[i]:cu_seqlens[i+1]]`, prompt then response.
        prompt_len: `[n]` tokens.
        index: `[n]`, places in the batch.
        total_tokens: response tokens in the whole batch (all ranks), which decides how many 4-grams are kept.
    """
    count = len(prompt_len)
    bits = max(0, math.ceil(math.log2(max(1, total_tokens) / rules.max_grams)))
    digest, share = np.zeros(count, np.uint64), np.zeros(count, np.float32)
    bins, grams, gram_count = np.full((count, BINS), _EMPTY), [], 0
    for low, high in _chunks(cu_seqlens):
        part = _Segments(tokens, cu_seqlens[low : high + 1], prompt_len[low:high])
        digest[low:high] = part.digests()
        owner, hashes = part.grams(rules.ngram, prompt=False)
        bins[low:high] = _minhash(owner, hashes, digest[low:high], part.response_len < rules.ngram)
        share[low:high] = _prompt_shares(part, owner, hashes, rules.ngram)
        _, fours = part.grams(_DISTINCT, prompt=False)
        gram_count += len(fours)
        grams.append(_kept(fours, bits))
    return Sketch(
        np.asarray(index, np.int64), digest, bins, share, np.unique(_join(grams, np.uint64)), gram_count, bits
    )


def hacking_metrics(
    sketches: Sequence[Sketch],
    scores: np.ndarray,
    groups: np.ndarray,
    lengths: np.ndarray,
    counted: np.ndarray | None = None,
    rules: HackingRules = HackingRules(),
) -> dict[str, float]:
    """The `hacking/…` metrics of a batch, all finite.

    Args:
        sketches: of all ranks; their indices point into the arrays.
        scores: float64 `[n]`, raw scores.
        groups: `[n]`, the prompt that each response answers.
        lengths: `[n]`, response tokens.
        counted: bool `[n]`, False for aborted or dropped samples; None: all count.

    Returns:
        Shares of the well-paid responses (score >= 0.8; 0 when there are none): `duplicate_share` (the same tokens as
        another well-paid one), `cross_prompt_duplicate_share` (… that answers another prompt), `near_duplicate_share`
        (5-gram Jaccard >= 0.8 with another; includes the duplicates), `prompt_copy_share` (>= 0.8 of the 5-grams are
        in the prompt). Of all responses: `high_reward_share`, `length_correlation` (Pearson, of length and score),
        `length_correlation_in_group` (the same, within the prompts), `distinct_4` (different 4-grams / 4-grams; 1.0
        when there are none).
    """
    scores, lengths = np.asarray(scores, np.float64), np.asarray(lengths, np.float64)
    keep = np.ones(len(scores), bool) if counted is None else np.asarray(counted, bool)
    order = np.argsort(_join([s.index for s in sketches], np.int64), kind="stable")
    digest = _join([s.digest for s in sketches], np.uint64)[order]
    bins = np.concatenate([s.bins for s in sketches])[order]
    share = _join([s.prompt_share for s in sketches], np.float32)[order]
    paid = keep & (scores >= rules.success)
    out = {"high_reward_share": float(paid[keep].mean()) if keep.any() else 0.0}
    out |= _copies(digest[paid], bins[paid], np.asarray(groups)[paid], rules)
    out["prompt_copy_share"] = float((share[paid] >= rules.copied).mean()) if paid.any() else 0.0
    out["length_correlation"] = _correlation(lengths[keep], scores[keep])
    within = [_centred(values[keep], np.asarray(groups)[keep]) for values in (lengths, scores)]
    out["length_correlation_in_group"] = _correlation(*within)
    total = sum(s.gram_count for s in sketches)
    distinct = len(np.unique(_join([s.grams for s in sketches], np.uint64))) * 2 ** max(s.gram_bits for s in sketches)
    out["distinct_4"] = min(1.0, distinct / total) if total else 1.0
    return {f"hacking/{name}": value for name, value in out.items()}


# ------------------------------------------------------------------ n-grams
class _Segments:
    """A chunk of samples, cut into prompts and responses."""

    def __init__(self, tokens: np.ndarray, cu_seqlens: np.ndarray, prompt_len: np.ndarray) -> None:
        start, end = int(cu_seqlens[0]), int(cu_seqlens[-1])
        cuts = np.asarray(cu_seqlens, np.int64) - start
        self.bounds = np.empty(2 * len(prompt_len) + 1, np.int64)  # prompt, response, prompt, …
        self.bounds[0::2], self.bounds[1::2] = cuts, cuts[:-1] + prompt_len
        self._sizes = np.diff(self.bounds)
        self.response_len = self._sizes[1::2]
        self.hashed = _mix(np.asarray(tokens[start:end]).astype(np.uint64))
        self._segment = np.repeat(np.arange(len(self._sizes)), self._sizes)

    def grams(self, n: int, *, prompt: bool) -> tuple[np.ndarray, np.ndarray]:
        """(sample, hash) of every n-gram inside a prompt, or inside a response."""
        count = max(0, len(self.hashed) - n + 1)
        segment = self._segment[:count]
        inside = (segment % 2 == (0 if prompt else 1)) & (np.arange(count) + n <= self.bounds[1:][segment])
        value = self.hashed[:count].copy()
        for offset in range(1, n):
            value *= _MULTIPLY
            value += self.hashed[offset : count + offset]
        return segment[inside] // 2, _mix(value[inside])

    def digests(self) -> np.ndarray:
        """A hash of each whole response: depends on tokens, order and length."""
        first = self.bounds[1:-1:2]
        place = np.arange(len(self.hashed)) - np.repeat(self.bounds[:-1], self._sizes)
        sums = np.zeros(len(self.hashed) + 1, np.uint64)
        np.cumsum(_mix(self.hashed + place.astype(np.uint64) * _STEP), out=sums[1:])
        return _mix(sums[self.bounds[2::2]] - sums[first] + self.response_len.astype(np.uint64) * _MULTIPLY)


def _chunks(cu_seqlens: np.ndarray) -> Iterator[tuple[int, int]]:
    """[low, high) ranges of samples of about so many tokens."""
    low, count = 0, len(cu_seqlens) - 1
    while low < count:
        high = int(np.searchsorted(cu_seqlens, int(cu_seqlens[low]) + _CHUNK, side="right")) - 1
        high = min(count, max(high, low + 1))
        yield low, high
        low = high


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every bit of the result depends on every bit of x."""
    x = x + _MULTIPLY
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _kept(hashes: np.ndarray, bits: int) -> np.ndarray:
    return hashes if bits == 0 else hashes[hashes >> np.uint64(64 - bits) == 0]


def _minhash(owner: np.ndarray, hashes: np.ndarray, digest: np.ndarray, short: np.ndarray) -> np.ndarray:
    """uint16 `[n, 64]`: in each bin of hash space a fingerprint of the smallest hash (Li, Owen, Zhang 2012).

    A response too short for an n-gram counts as one n-gram.
    """
    owner = np.concatenate([owner, np.flatnonzero(short)])
    hashes = np.concatenate([hashes, digest[short]])
    smallest = np.full(len(digest) * BINS, 0xFFFFFFFF, np.uint32)
    bins = (hashes >> np.uint64(58)).astype(np.int64)
    np.minimum.at(smallest, owner * BINS + bins, ((hashes >> np.uint64(26)) & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    prints = np.minimum(smallest & np.uint32(0xFFFF), np.uint32(0xFFFE)).astype(np.uint16)
    return np.where(smallest == 0xFFFFFFFF, _EMPTY, prints).reshape(-1, BINS)


def _prompt_shares(part: _Segments, owner: np.ndarray, hashes: np.ndarray, n: int) -> np.ndarray:
    """Share of each response's n-grams that are in its prompt. Of long responses only a sample is looked up."""
    bits = np.ceil(np.log2(np.maximum(part.response_len, 1) / _SHORT)).clip(0).astype(np.int64)
    shift = np.where(bits > 0, 64 - bits, 0).astype(np.uint64)

    def keys(who: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        long = (part.response_len >= 2 * n)[who]
        chosen = long & ((bits[who] == 0) | (values >> shift[who] == 0))
        who = who[chosen]
        return who, values[chosen] ^ _mix(who.astype(np.uint64))

    who, wanted = keys(owner, hashes)
    _, present = keys(*part.grams(n, prompt=True))
    found = np.isin(wanted, present)
    count = len(part.response_len)
    return np.bincount(who, found, minlength=count) / np.bincount(who, minlength=count).clip(1)


# ------------------------------------------------------------------ comparisons
def _copies(digest: np.ndarray, bins: np.ndarray, groups: np.ndarray, rules: HackingRules) -> dict[str, float]:
    names = ("duplicate_share", "cross_prompt_duplicate_share", "near_duplicate_share")
    if not len(digest):
        return dict.fromkeys(names, 0.0)
    _, first, text, copies = np.unique(digest, return_index=True, return_inverse=True, return_counts=True)
    pairs = np.unique(np.stack([text, np.unique(groups, return_inverse=True)[1]]), axis=1)
    prompts = np.bincount(pairs[0], minlength=len(first))
    same = float(copies[copies > 1].sum())
    singles = np.flatnonzero(copies == 1)  # in the order of the digests, hence random, but the same on all ranks
    asked = singles[: max(1, rules.max_pairs // len(first))]
    near = _have_twin(bins[first], asked, rules.similar).sum() * (len(singles) / max(1, len(asked)))
    values = (same, float(copies[prompts > 1].sum()), same + near)
    return {name: float(value / len(digest)) for name, value in zip(names, values, strict=True)}


def _have_twin(bins: np.ndarray, asked: np.ndarray, similar: float) -> np.ndarray:
    """bool: for each row of `asked`, is another row of `bins` at least that similar?

    Jaccard is estimated by the share of equal bins among those not empty in both (Li, Owen, Zhang 2012).
    """
    columns, empty = np.ascontiguousarray(bins.T), (bins == _EMPTY).astype(np.float32)
    found = np.zeros(len(asked), bool)
    block = max(1, (1 << 20) // max(1, len(bins)))
    for low in range(0, len(asked), block):
        rows = asked[low : low + block]
        equal = np.zeros((len(rows), len(bins)), np.uint8)
        for column in columns:
            equal += column[rows][:, None] == column[None, :]
        nothing = empty[rows] @ empty.T  # empty bins are equal, too
        alike = (equal - nothing) >= similar * (BINS - nothing)
        alike[np.arange(len(rows)), rows] = False
        found[low : low + block] = alike.any(axis=1)
    return found


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 where one of them does not vary."""
    if len(x) < 2:
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((x * x).sum())) * math.sqrt(float((y * y).sum()))
    return float(np.clip((x * y).sum() / scale, -1.0, 1.0)) if scale > 1e-12 else 0.0


def _centred(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Values minus their group's mean."""
    _, place = np.unique(groups, return_inverse=True)
    means = np.bincount(place, values) / np.bincount(place).clip(1) if len(values) else values
    return values - means[place]


def _join(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if len(parts) else np.empty(0, dtype)
