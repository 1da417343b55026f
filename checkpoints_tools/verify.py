"""Are two models the same? Compared tensor by tensor under their Hugging Face names, whatever the formats."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoints_tools.sources import Source, open_source
from checkpoints_tools.write import Progress

_ROWS = 1 << 24  # elements compared at a time


def verify(
    a: Path, b: Path, *, model: Path | None = None, tolerance: float = 0.0, all_tensors: bool = False
) -> tuple[str, bool]:
    """`(report, same)`: a line for each tensor that differs (or for all), and a summary.

    Values are compared in fp32. A NaN equals a NaN only.
    """
    first, second = open_source(a, model), open_source(b, model)
    lines, worst, worst_name, differing = [], 0.0, None, 0
    missing = sorted(first.shapes.keys() ^ second.shapes.keys())
    lines += [f"{name}: only in {a if name in first.shapes else b}" for name in missing]
    common = [name for name in first.shapes if name in second.shapes]
    progress = Progress(sum(first.whole(name).nbytes for name in common), "comparing")
    for name in common:
        if first.shapes[name] != second.shapes[name]:
            lines.append(f"{name}: shape {list(first.shapes[name])} against {list(second.shapes[name])}")
            worst = float("inf")
            continue
        largest, mean = difference(first, second, name)
        progress.add(first.whole(name).nbytes)
        differing += not largest <= tolerance
        if all_tensors or not largest <= tolerance:
            lines.append(f"{name}: max {largest:.3e}, mean {mean:.3e}")
        if not largest <= worst:
            worst, worst_name = largest, name
    same = not missing and worst <= tolerance
    where = f" ({worst_name})" if worst_name and worst > 0 else ""
    dtypes = " / ".join(sorted({str(t).removeprefix("torch.") for s in (first, second) for t in s.dtypes.values()}))
    verdict = "the same model" if same else "different"
    counts = f"{len(common)} tensors, {differing} differ"
    lines.append(f"{verdict}: {counts}, largest difference {worst:.3e}{where}, {dtypes}")
    return "\n".join(lines), same


def difference(a: Source, b: Source, name: str) -> tuple[float, float]:
    """Largest and mean absolute difference of a tensor; infinite where only one is NaN."""
    x, y = a.whole(name), b.whole(name)
    if x.dtype == y.dtype and torch.equal(x, y):
        return 0.0, 0.0
    x, y = x.reshape(-1), y.reshape(-1)
    largest, total = 0.0, 0.0
    for start in range(0, x.numel(), _ROWS):
        u, v = (t[start : start + _ROWS].float() for t in (x, y))
        both = (u == v) | (u.isnan() & v.isnan())
        gap = torch.where(both, 0.0, (u - v).abs()).nan_to_num(nan=float("inf"))
        largest, total = max(largest, gap.max().item()), total + gap.double().sum().item()
    return largest, total / x.numel()
