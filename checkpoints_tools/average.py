"""Averages and merges of models, one tensor at a time, summed in fp32."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from checkpoints_tools.convert import Options, Request, check_target, describe, fingerprint, read_dtype, write_target
from checkpoints_tools.sources import Source, open_source
from checkpoints_tools.targets import hf_target
from megappo.bridge.algebra import Box
from megappo.errors import UserError


def average(
    dst: Path, paths: list[Path], weights: str | None, base: Path | None, dtype: str | None, options: Options
) -> str:
    """Write `Σ w·source` (with `base`: `base + Σ w·(source − base)`) to `dst`; returns a line that says so.

    Args:
        weights: comma-separated, one a source; None: `1 / n` each.

    Raises:
        UserError: models of different architectures, weights that do not fit, or as `convert`.
    """
    started = time.perf_counter()
    factors = _factors(weights, len(paths))
    wanted = read_dtype(dtype)
    everything = [*paths, *([base] if base else [])]
    for path in everything:
        check_target(path, dst, force=options.force)
    sources = [open_source(path) for path in paths]
    origin = open_source(base) if base else None
    for other in [*sources[1:], *([origin] if origin else [])]:
        _check_same(sources[0], other)
    mixed = replace(sources[0], read=_mixture(sources, factors, origin))
    target = hf_target(mixed, wanted or sources[0].dtype())
    if options.dry_run:
        return describe(target, dst)
    marks = [fingerprint(source, Request("hf", dtype=dtype)) for source in (*sources, *([origin] if origin else []))]
    written = write_target(target, sources[0].companions, dst, {"sources": marks, "factors": factors}, options)
    seconds = time.perf_counter() - started
    what = f"{len(paths)} models merged into their base" if base else f"mean of {len(paths)} models"
    return f"wrote {dst}: {what}, {written / 1e9:.2f} GB in {seconds:.1f} s"


def _mixture(sources: list[Source], factors: list[float], origin: Source | None):
    def read(name: str, box: Box) -> torch.Tensor:
        start = None if origin is None else origin.read(name, box).float()
        out = torch.zeros([b - a for a, b in box]) if start is None else start.clone()
        for source, factor in zip(sources, factors, strict=True):
            value = source.read(name, box)
            if start is not None:
                value = value.float() - start
            out.add_(value, alpha=factor)
        return out

    return read


def _factors(text: str | None, count: int) -> list[float]:
    if text is None:
        return [1 / count] * count
    try:
        factors = [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--weights {text}: give numbers separated by commas") from None
    if len(factors) != count:
        raise UserError(f"--weights {text}: {len(factors)} numbers for {count} models: give one each")
    return factors


def _check_same(a: Source, b: Source) -> None:
    for name in a.shapes.keys() | b.shapes.keys():
        if a.shapes.get(name) != b.shapes.get(name):
            sizes = [list(s.shapes[name]) if name in s.shapes else "missing" for s in (a, b)]
            raise UserError(f"{b.path}: tensor {name} is {sizes[1]}, in {a.path} {sizes[0]}: different models")
