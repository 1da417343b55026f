"""Numbers for the logs: local contributions, made global with one SUM and one MAX collective, in float64.

Each entry is one of
* a sum over a *global* denominator that the caller already knows: `Σ_ranks Σ_calls local / denominator`;
* a mean, whose denominator is summed along: `Σ value·weight / Σ weight`;
* a maximum or a minimum.

Contributions stay on their device until `reduce`, so that adding one does not wait for a GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Number = float | int | bool | Tensor

# Entries; the MAX buffer is padded to a multiple, so that ranks which disagree still exchange the same size.
_CHUNK = 256
_HASH_BITS = 52  # exact in a float64


class MetricAccumulator:
    """Collects named contributions of this rank; `reduce` makes them global.

    Every rank of the group must have named the same metrics, in any order; a rank that owns no data names
    them with empty tensors or zero sums. Ranks that hold *copies* of the same data (tensor-parallel peers)
    must not share a group, or sums count twice.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Number] = {}
        self._totals: dict[str, Number] = {}
        self._weights: dict[str, Number] = {}
        self._highs: dict[str, Number] = {}  # minima are kept as maxima of the negated values
        self._kinds: dict[str, str] = {}

    def add_sum(self, name: str, local_sum: Number, denominator: Number) -> None:
        """Add `local_sum / denominator`, with `denominator` the same on all ranks (a global count).

        To average over k mini-batches divide by k times the count. A denominator of 0 contributes 0, whatever
        the sum is: there was nothing to count.
        """
        self._name(name, "sum")
        count = _double(denominator)
        value = _double(local_sum)
        if isinstance(count, Tensor) or isinstance(value, Tensor):
            device = value.device if isinstance(value, Tensor) else count.device
            count = torch.as_tensor(count, dtype=torch.float64, device=device)
            share = torch.where(count == 0, 0.0, value / count)
        else:
            share = value / count if count else 0.0
        self._sums[name] = self._sums.get(name, 0.0) + share

    def add_mean(self, name: str, values: Number | Sequence[float], weight: Number = 1.0) -> None:
        """Add elements (a tensor of any shape, or numbers), each of `weight`, to a global mean."""
        self._name(name, "mean")
        flat = _flat(values)
        self._totals[name] = self._totals.get(name, 0.0) + flat.sum() * weight
        self._weights[name] = self._weights.get(name, 0.0) + flat.numel() * _double(weight)

    def add_max(self, name: str, values: Number | Sequence[float]) -> None:
        """Add elements to a maximum; NaN if any element on any rank is NaN."""
        self._name(name, "max")
        self._raise_high(name, _flat(values))

    def add_min(self, name: str, values: Number | Sequence[float]) -> None:
        """Add elements to a minimum; NaN if any element on any rank is NaN."""
        self._name(name, "min")
        self._raise_high(name, -_flat(values))

    def add_stats(self, prefix: str, values: Number | Sequence[float]) -> None:
        """Add elements to `prefix/mean`, `prefix/max` and `prefix/min`."""
        self.add_mean(f"{prefix}/mean", values)
        self.add_max(f"{prefix}/max", values)
        self.add_min(f"{prefix}/min", values)

    def reduce(self, group: ProcessGroup | None = None, *, distributed: bool | None = None) -> dict[str, float]:
        """Global values by name, the same on every rank of `group`; what nobody contributed to is left out.

        Collective over `group` (default: all ranks) unless torch.distributed is not in use or `distributed`
        is False. Clears the accumulator.

        Raises:
            RuntimeError: on every rank, if the ranks named different metrics.
        """
        if distributed is None:
            distributed = dist.is_available() and dist.is_initialized()
        device = _collective_device(group) if distributed else torch.device("cpu")
        names = sorted(self._kinds)
        highs = [n for n in names if n in self._highs]
        sums = [n for n in names if n in self._sums]
        means = [n for n in names if n in self._totals]

        peak = _pack([self._highs[n] for n in highs], device)
        total = _pack(
            [self._sums[n] for n in sums] + [d[n] for d in (self._totals, self._weights) for n in means],
            device,
        )
        if distributed:
            peak = self._reduce_max(peak, names, group)
            if len(total):
                dist.all_reduce(total, group=group)
        shares, totals, weights = (part.tolist() for part in total.split([len(sums), len(means), len(means)]))
        out = dict(zip(sums, shares, strict=True))
        out |= {n: t / w for n, t, w in zip(means, totals, weights, strict=True) if w != 0}
        for name, value in zip(highs, peak.tolist(), strict=True):
            if value != -math.inf:
                out[name] = -value if self._kinds[name] == "min" else value
        for entries in (self._kinds, self._sums, self._totals, self._weights, self._highs):
            entries.clear()
        return {name: out[name] for name in names if name in out}

    def _name(self, name: str, kind: str) -> None:
        if self._kinds.setdefault(name, kind) != kind:
            raise ValueError(f"metric {name} is a {self._kinds[name]}, not a {kind}")

    def _raise_high(self, name: str, values: Tensor) -> None:
        before = self._highs.get(name, -math.inf)
        if values.numel() == 0:
            self._highs[name] = before
        else:  # torch.maximum and Tensor.max keep NaN
            high = values.max()
            self._highs[name] = torch.maximum(high, torch.as_tensor(before, dtype=high.dtype, device=high.device))

    def _reduce_max(self, peak: Tensor, names: list[str], group: ProcessGroup | None) -> Tensor:
        """MAX over ranks that keeps NaN; the same collective checks that all ranks named the same metrics.

        Layout: [hash, -hash, values with NaN as -inf, 1 where NaN, padding].
        """
        text = "\n".join(f"{n} {self._kinds[n]}" for n in names)
        digest = float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _HASH_BITS))
        broken = peak.isnan()
        buffer = torch.full(
            (math.ceil((2 + 2 * len(peak)) / _CHUNK) * _CHUNK,),
            -math.inf,
            dtype=torch.float64,
            device=peak.device,
        )
        buffer[:2] = torch.tensor([digest, -digest], dtype=torch.float64)
        values, flags = buffer[2 : 2 + len(peak)], buffer[2 + len(peak) : 2 + 2 * len(peak)]
        values.copy_(peak.masked_fill(broken, -math.inf))
        flags.copy_(broken)
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
        if buffer[0] != -buffer[1]:
            raise RuntimeError(f"ranks named different metrics; this one named: {', '.join(names) or 'none'}")
        return values.masked_fill(flags > 0, math.nan)


def summarize(prefix: str, values: Iterable[float]) -> dict[str, float]:
    """`prefix/{mean,std,median,max,min}` of numbers that every rank holds (scores, lengths). Empty: nothing.

    `std` is unbiased; 0 for one element.
    """
    flat = torch.as_tensor([float(v) for v in values], dtype=torch.float64)
    if flat.numel() == 0:
        return {}
    return {
        f"{prefix}/mean": flat.mean().item(),
        f"{prefix}/std": flat.std().item() if flat.numel() > 1 else 0.0,
        f"{prefix}/median": flat.quantile(0.5).item(),
        f"{prefix}/max": flat.max().item(),
        f"{prefix}/min": flat.min().item(),
    }


def non_finite(metrics: Mapping[str, float]) -> list[str]:
    """Names whose value is NaN or infinite."""
    return [name for name, value in metrics.items() if not math.isfinite(value)]


def _double(value: Number) -> float | Tensor:
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def _flat(values: Number | Sequence[float]) -> Tensor:
    return torch.as_tensor(values).detach().double().reshape(-1)


def _pack(values: list[Number], device: torch.device) -> Tensor:
    """Scalars as one float64 vector, with one transfer for each device that they are on."""
    out = torch.zeros(len(values), dtype=torch.float64, device=device)
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        where = value.device if isinstance(value, Tensor) else torch.device("cpu")
        by_device.setdefault(where, []).append(i)
    for where, indices in by_device.items():
        part = torch.stack([torch.as_tensor(values[i], dtype=torch.float64, device=where).reshape(()) for i in indices])
        out[torch.tensor(indices, device=device)] = part.to(device)
    return out


def _collective_device(group: ProcessGroup | None) -> torch.device:
    """CPU where the group has a CPU backend (nothing here is large), else this rank's GPU."""
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
