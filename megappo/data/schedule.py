"""The global micro-batch schedule: which sample goes to which mini-batch, data-parallel rank and micro-batch.

Everything here is a pure function of replicated metadata (lengths, seed, number of ranks, budget), so every
rank computes the same schedule without asking anyone. Pure Python and numpy.

How a mini-batch is planned:

1. K, the number of micro-batches a rank, starts at the bin-packing lower bound L2 (Martello and Toth, 1990)
   and grows only when no packing is found.
2. The samples are packed into `dp * K` bins, balanced in tokens: longest processing time first (Graham,
   1969), pairwise exchanges, and where a bin still overflows MULTIFIT (Coffman, Garey and Johnson, 1978) or,
   when tiny, an exact search. With a budget of samples, equal numbers of samples are dealt instead.
3. Bins are dealt to ranks, K each, so that tokens and attention work (sum of length squared) are even.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

GOOD_ENOUGH = 1.001  # max / mean at which exchanging stops
MAX_EXCHANGES = 4_000
EXACT_MAX_SAMPLES, EXACT_MAX_NODES = 24, 20_000

MicroBatches = list[list[int]]  # of one rank: sample indices of each micro-batch


@dataclass(frozen=True)
class Budget:
    """Size of a micro-batch: at most `samples` samples, or at most `tokens` tokens. Exactly one is set.

    Raises ValueError when none or both are set, or when the number is below 1.
    """

    samples: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.samples is None) == (self.tokens is None):
            raise ValueError(f"Budget needs one of samples ({self.samples}) and tokens ({self.tokens})")
        if (self.samples or self.tokens or 0) < 1:
            raise ValueError(f"Budget must be at least 1, got samples={self.samples} tokens={self.tokens}")


@dataclass(frozen=True)
class Schedule:
    """`micro_batches[mini][dp_rank]` lists micro-batches (costliest first), each of ascending sample indices.

    All ranks have the same number of micro-batches in a mini-batch; an empty list is a dummy micro-batch that
    the engine must still run. `owner[n]` (int64) is the data-parallel rank of each sample, -1 for a sample in
    no mini-batch.
    """

    micro_batches: list[list[MicroBatches]]
    owner: np.ndarray

    def num_micro_batches(self, mini: int) -> int:
        """Micro-batches of each rank in mini-batch `mini`."""
        return len(self.micro_batches[mini][0])


def mini_batches(n: int, mini_batch_size: int, seed: int | Sequence[int], shuffle: bool = True) -> list[np.ndarray]:
    """Split samples 0..n-1 into mini-batches of `mini_batch_size` (the last may be smaller).

    Depends on the arguments only, never on a layout. `seed` may be a tuple such as (seed, iteration, epoch),
    each in 0 .. 2**32-1. Returns ascending int64 indices for each mini-batch.
    """
    if mini_batch_size < 1:
        raise ValueError(f"mini_batch_size must be at least 1, got {mini_batch_size}")
    order = np.arange(n, dtype=np.int64)
    if shuffle:  # RandomState: its stream is frozen across numpy releases, so that a run resumes identically
        order = np.random.RandomState(seed).permutation(n).astype(np.int64)
    return [np.sort(order[i : i + mini_batch_size]) for i in range(0, n, mini_batch_size)]


def plan(
    lengths: Sequence[int] | np.ndarray,
    batches: Sequence[Sequence[int] | np.ndarray],
    dp: int,
    budget: Budget,
    *,
    multiple_of: int = 1,
    attention_weight: float = 1.0,
    owner: np.ndarray | None = None,
) -> Schedule:
    """Assign each sample of each mini-batch to one data-parallel rank and one micro-batch.

    `lengths[n]` in tokens; `batches` disjoint index lists; `multiple_of` the group a virtual pipeline needs.
    `attention_weight` weighs even attention work against even tokens when ranks are chosen (0: tokens only).
    With `owner[n]` given, samples stay on their rank and only the micro-batches are planned.

    Raises ValueError: a sample longer than the token budget, of length < 1, or in two mini-batches; a bad
    owner.
    """
    lengths = _checked_lengths(lengths)
    if dp < 1 or multiple_of < 1:
        raise ValueError(f"dp ({dp}) and multiple_of ({multiple_of}) must be at least 1")
    batches = [np.sort(np.asarray(b, dtype=np.int64)) for b in batches]
    _check_batches(batches, lengths, budget)
    owners = np.full(len(lengths), -1, dtype=np.int64)
    micro: list[list[MicroBatches]] = []
    for batch in batches:
        if owner is None:
            ranks = _plan_free(lengths, batch, dp, budget, multiple_of, attention_weight)
        else:
            ranks = _plan_owned(lengths, batch, np.asarray(owner), dp, budget, multiple_of)
        micro.append(ranks)
        for rank, micros in enumerate(ranks):
            for indices in micros:
                owners[indices] = rank
    return Schedule(micro, owners)


def plan_forward(
    lengths: Sequence[int] | np.ndarray,
    owner: np.ndarray,
    dp: int,
    budget: Budget,
    multiple_of: int = 1,
) -> list[MicroBatches]:
    """Micro-batches of a forward-only pass: `result[dp_rank]`, over the samples that each rank owns already.

    `owner[n]` as in `Schedule`; samples with owner -1 are left out. Equal counts over ranks, a multiple of
    `multiple_of`. Raises ValueError as `plan` does.
    """
    everything = np.flatnonzero(np.asarray(owner) >= 0)
    return plan(lengths, [everything], dp, budget, multiple_of=multiple_of, owner=owner).micro_batches[0]


def lower_bound(lengths: np.ndarray, tokens: int) -> int:
    """Fewest bins of `tokens` tokens that can hold `lengths`: bound L2 of Martello and Toth (1990)."""
    if len(lengths) == 0:
        return 0
    s = np.sort(lengths)
    total = np.concatenate([[0], np.cumsum(s)])
    half = int(np.searchsorted(s, tokens // 2, side="right"))  # s[half:]: one bin each
    small = np.concatenate([[0], np.unique(s[:half])])  # thresholds worth trying
    first = np.searchsorted(s, small, side="left")  # smaller samples than the threshold are left out
    big = np.searchsorted(s, tokens - small, side="right")  # s[big:] leave no room for any sample considered
    big = np.maximum(big, half)
    room = (big - half) * tokens - (total[big] - total[half])
    extra = np.maximum(0, -(-(total[half] - total[np.minimum(first, half)] - room) // tokens))
    return int((len(s) - half + extra).max())


# --- checks ------------------------------------------------------------------------------------------


def _checked_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"sample {int(lengths.argmin())} has length {int(lengths.min())}, less than 1")
    return lengths


def _check_batches(batches: list[np.ndarray], lengths: np.ndarray, budget: Budget) -> None:
    flat = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
    if len(flat) and not (flat.min() >= 0 and flat.max() < len(lengths)):
        raise ValueError(f"mini-batches name samples outside 0..{len(lengths) - 1}")
    values, counts = np.unique(flat, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"sample {int(values[counts > 1][0])} is in more than one mini-batch")
    if budget.tokens is not None and len(flat):
        longest = int(values[lengths[values].argmax()])
        if lengths[longest] > budget.tokens:
            raise ValueError(
                f"sample {longest} has {int(lengths[longest])} tokens, more than the budget of "
                f"{budget.tokens} tokens a micro-batch; raise the budget (*_max_token_len_per_gpu) "
                "or shorten the sample"
            )


# --- one mini-batch --------------------------------------------------------------------------------


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(count: int, multiple: int) -> int:
    return max(1, _ceil(count, multiple)) * multiple


def _plan_free(lengths, batch, dp, budget: Budget, multiple_of, attention_weight) -> list[MicroBatches]:
    """Owners are ours to choose: pack all samples into dp * K bins, then deal K bins to each rank."""
    own = lengths[batch]
    if budget.samples is not None:
        count = _round_up(_ceil(_ceil(len(batch), dp), budget.samples), multiple_of)
        groups = _deal(own.astype(np.float64), dp * count)
    else:
        groups = _pack(own, dp, budget.tokens, multiple_of)
        count = len(groups) // dp
    tokens = np.array([own[g].sum() for g in groups], dtype=np.float64)
    work = np.array([(own[g].astype(np.float64) ** 2).sum() for g in groups])
    cost = _relative(tokens) + attention_weight * _relative(work)
    ranks = _deal(cost, dp) if count > 1 else [np.array([i]) for i in range(dp)]
    return [_to_lists(batch, [groups[b] for b in rank], lengths) for rank in ranks]


def _plan_owned(lengths, batch, owner, dp, budget: Budget, multiple_of) -> list[MicroBatches]:
    """Owners are given: the rank that needs most micro-batches sets the count for all."""
    if len(owner) != len(lengths):
        raise ValueError(f"owner names {len(owner)} samples, lengths {len(lengths)}")
    owners = owner[batch]
    if len(owners) and not (owners.min() >= 0 and owners.max() < dp):
        raise ValueError(f"owners must be ranks 0..{dp - 1}, got {owners.min()}..{owners.max()}")
    order = np.argsort(owners, kind="stable")
    cuts = np.searchsorted(owners[order], np.arange(dp + 1))
    mine = [batch[order[cuts[r] : cuts[r + 1]]] for r in range(dp)]
    if budget.samples is not None:
        count = _round_up(max(_ceil(len(m), budget.samples) for m in mine), multiple_of)
        packed = [_deal(lengths[m].astype(np.float64), count) for m in mine]
    else:
        packed = [_pack(lengths[m], 1, budget.tokens, multiple_of) for m in mine]
        count = max(len(p) for p in packed)
        packed = [
            p if len(p) == count else _pack(lengths[m], 1, budget.tokens, multiple_of, at_least=count)
            for m, p in zip(mine, packed, strict=True)
        ]
    return [_to_lists(m, p, lengths) for m, p in zip(mine, packed, strict=True)]


def _relative(x: np.ndarray) -> np.ndarray:
    return x / max(x.mean(), 1e-9)


def _to_lists(batch: np.ndarray, groups: list[np.ndarray], lengths: np.ndarray) -> MicroBatches:
    """Sample indices, ascending inside a micro-batch; costliest micro-batch first.

    So ranks that meet in a collective at each micro-batch (experts) meet with similar work, and a lack of
    memory shows at once.
    """
    micros = [np.sort(batch[g]) for g in groups]
    work = [(-int((lengths[m] ** 2).sum()), -int(lengths[m].sum())) for m in micros]
    order = sorted(range(len(micros)), key=lambda i: (work[i], micros[i].tolist()))
    return [micros[i].tolist() for i in order]


# --- partitions --------------------------------------------------------------------------------------


def _pack(lengths: np.ndarray, dp: int, tokens: int, multiple_of: int, at_least: int = 1) -> list[np.ndarray]:
    """Split samples into dp * K groups of at most `tokens`, K the smallest found.

    A group is empty only if there are fewer samples than groups.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order]
    count = _round_up(max(_ceil(lower_bound(lengths, tokens), dp), at_least), multiple_of)
    while True:
        groups = _pack_into(sizes, dp * count, tokens)
        if groups is not None:
            return [order[g] for g in groups]
        count += multiple_of


def _pack_into(sizes: np.ndarray, bins: int, tokens: int) -> list[np.ndarray] | None:
    """Balanced groups of the descending `sizes` in `bins` bins of `tokens`, or None when none was found."""
    if len(sizes) <= bins:
        return [np.array([i] if i < len(sizes) else [], dtype=np.int64) for i in range(bins)]
    groups = _longest_first(sizes, bins)
    worst = _exchange(sizes, groups, fixed_count=False, effort=min(bins, MAX_EXCHANGES), limit=tokens)
    if worst <= tokens:
        return groups
    best, low, high = _best_fit(sizes, bins, tokens), int(sizes.sum()) // bins, tokens
    while best is not None and high - low > max(1, tokens // 500):  # MULTIFIT: smallest bin that suffices
        middle = (low + high) // 2
        attempt = _best_fit(sizes, bins, middle)
        low, high, best = (middle, high, best) if attempt is None else (low, middle, attempt)
    if best is None and len(sizes) <= EXACT_MAX_SAMPLES:
        best = _exact(sizes.tolist(), bins, tokens)
    if best is None:  # best fit wastes a little in each bin; many exchanges may still do
        worst = _exchange(sizes, groups, fixed_count=False, effort=20 * bins, limit=tokens)
        return groups if worst <= tokens else None
    _fill_empty(best, sizes)
    _exchange(sizes, best, fixed_count=False, effort=min(bins, MAX_EXCHANGES))
    return best


def _longest_first(sizes: np.ndarray, bins: int) -> list[np.ndarray]:
    """LPT: each of the descending sizes goes to the emptiest bin. O(n log bins)."""
    heap = list(range(bins))  # load * bins + bin, one integer: faster than tuples, ties to the lowest bin
    where = []
    for size in sizes.tolist():
        top = heap[0]
        where.append(top % bins)
        heapq.heapreplace(heap, top + size * bins)
    return _groups(np.array(where, dtype=np.int64), bins)


def _best_fit(sizes: np.ndarray, bins: int, tokens: int) -> list[np.ndarray] | None:
    """Best-fit decreasing into at most `bins` bins of `tokens`; None when that is not enough.

    A sample larger than a bin gets one of its own.
    """
    rooms: list[int] = []  # room * bins + bin, ascending
    where, opened = [], 0
    for size in sizes.tolist():
        i = bisect_left(rooms, size * bins)
        if i < len(rooms):
            room = rooms.pop(i)
        elif opened < bins:
            room, opened = tokens * bins + opened, opened + 1
        else:
            return None
        where.append(room % bins)
        insort(rooms, max(room - size * bins, room % bins))
    return _groups(np.array(where, dtype=np.int64), bins)


def _exact(sizes: list[int], bins: int, tokens: int) -> list[np.ndarray] | None:
    """Depth-first search for a packing, within a bound of nodes. `sizes` descending."""
    loads, where, nodes = [0] * bins, [0] * len(sizes), 0
    slack = bins * tokens - sum(sizes)

    def place(i: int) -> bool:
        nonlocal nodes
        nodes += 1
        if i == len(sizes):
            return True
        if nodes > EXACT_MAX_NODES or sum(tokens - x for x in loads if tokens - x < sizes[-1]) > slack:
            return False
        tried = set()
        for b in range(bins):
            if loads[b] in tried or loads[b] + sizes[i] > tokens:  # equal bins are interchangeable
                continue
            tried.add(loads[b])
            loads[b] += sizes[i]
            where[i] = b
            if place(i + 1):
                return True
            loads[b] -= sizes[i]
        return False

    return _groups(np.array(where, dtype=np.int64), bins) if place(0) else None


def _groups(where: np.ndarray, bins: int) -> list[np.ndarray]:
    """Positions of each bin's members, ascending."""
    order = np.argsort(where, kind="stable")
    cuts = np.searchsorted(where[order], np.arange(1, bins))
    return np.split(order, cuts)


def _fill_empty(groups: list[np.ndarray], sizes: np.ndarray) -> None:
    """Give each empty group one sample of the fullest group that has two, in place."""
    heap = [(-int(sizes[g].sum()), i) for i, g in enumerate(groups) if len(g) > 1]
    heapq.heapify(heap)
    for i, group in enumerate(groups):
        if len(group) == 0 and heap:
            load, j = heapq.heappop(heap)
            groups[i], groups[j] = groups[j][:1], groups[j][1:]
            if len(groups[j]) > 1:
                heapq.heappush(heap, (load + int(sizes[groups[i]].sum()), j))


def _deal(costs: np.ndarray, bins: int) -> list[np.ndarray]:
    """Split items into `bins` groups whose sizes differ by at most one, with even costs.

    Rounds of LPT: in each round the `bins` costliest items left go one to each group, costliest to cheapest.
    """
    order = np.argsort(-costs, kind="stable")
    loads = np.zeros(bins)
    where = np.empty(len(costs), dtype=np.int64)
    for start in range(0, len(costs), bins):
        items = order[start : start + bins]
        cheapest = np.argsort(loads, kind="stable")[: len(items)]
        where[items] = cheapest
        loads[cheapest] += costs[items]
    groups = _groups(where, bins)
    _exchange(costs, groups, fixed_count=True, effort=min(4 * bins, MAX_EXCHANGES))
    return groups


def _exchange(
    sizes: np.ndarray, groups: list[np.ndarray], *, fixed_count: bool, effort: int, limit: float = np.inf
) -> float:
    """Level groups in place by swapping one item of a fuller group with (or moving it to) an emptier one.

    First the fullest groups come down (to `limit` at least, if they can), then the emptiest come up; each
    step narrows the gap of the two groups it touches, so the maximum never grows. At most `effort` steps each
    way.
    `fixed_count` allows swaps only. Returns the maximum.
    """
    return _Leveller(sizes.astype(np.float64), groups, fixed_count).run(effort, limit)


class _Leveller:
    def __init__(self, sizes: np.ndarray, groups: list[np.ndarray], fixed_count: bool) -> None:
        self.sizes, self.groups, self.fixed_count = sizes, groups, fixed_count
        self.loads = np.array([sizes[g].sum() for g in groups], dtype=np.float64)
        self.counts = np.array([len(g) for g in groups])

    def run(self, effort: int, limit: float) -> float:
        mean = self.loads.mean()
        goal = min(limit, mean * GOOD_ENOUGH)
        for _ in range(effort):
            i = int(self._donors().argmax())
            if self.loads[i] <= goal or not self._lower(i):
                break
        for _ in range(effort):
            j, highest = int(self.loads.argmin()), self._donors().max()
            if highest - self.loads[j] <= mean * (GOOD_ENOUGH - 1) or not self._raise(j):
                break
        return float(self.loads.max())

    def _donors(self) -> np.ndarray:
        """Loads, with groups that have nothing to give (a single sample, where moves are allowed) at -1."""
        return self.loads if self.fixed_count else np.where(self.counts > 1, self.loads, -1.0)

    def _lower(self, i: int) -> bool:
        return any(self._swap(i, j) for j in _smallest_first(self.loads, i))

    def _raise(self, j: int) -> bool:
        return any(self._swap(i, j) for i in _smallest_first(-self._donors(), j))

    def _swap(self, i: int, j: int) -> bool:
        """Make the exchange that best levels groups i (fuller) and j; False when none narrows their gap."""
        gap = self.loads[i] - self.loads[j]
        give, take = self.sizes[self.groups[i]], self.sizes[self.groups[j]]
        if not self.fixed_count and len(give) > 1:
            take = np.append(take, 0.0)  # the last column: nothing comes back
        if gap <= 0 or len(give) == 0 or len(take) == 0:
            return False
        difference = give[:, None] - take[None, :]
        miss = np.abs(difference - gap / 2)
        best = int(miss.argmin())
        if miss.flat[best] >= gap / 2 * (1 - 1e-9):  # no better than standing still
            return False
        a, b = divmod(best, len(take))
        self._apply(i, j, a, b, float(difference[a, b]))
        return True

    def _apply(self, i: int, j: int, a: int, b: int, moved: float) -> None:
        gives, takes = self.groups[i][a : a + 1], self.groups[j][b : b + 1]
        rest = np.delete(self.groups[j], b) if len(takes) else self.groups[j]
        self.groups[i] = np.concatenate([np.delete(self.groups[i], a), takes])
        self.groups[j] = np.concatenate([rest, gives])
        for k, change in ((i, -moved), (j, moved)):
            self.loads[k] += change
            self.counts[k] = len(self.groups[k])


def _smallest_first(key: np.ndarray, other_than: int) -> Iterator[int]:
    """Positions of the 8 smallest keys, then, asked for more, of the 64 smallest. Ties go to the first."""
    seen = 0
    for few in (8, 64):
        few = min(few, len(key))
        near = np.argpartition(key, few - 1)[:few]
        yield from (int(k) for k in near[np.lexsort((near, key[near]))][seen:] if k != other_than)
        seen = few
