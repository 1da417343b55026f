"""Ragged batches for the algorithm tests: every shape that breaks masks, NaN wherever nobody may look."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

quick = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class Ragged:
    mask: Tensor
    cu: Tensor
    seed: int

    @property
    def n(self) -> int:
        return self.cu.numel() - 1

    @property
    def total(self) -> int:
        return self.mask.numel()

    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """(sequence, flat indices of its trainable tokens)."""
        for i in range(self.n):
            span = range(int(self.cu[i]), int(self.cu[i + 1]))
            yield i, [t for t in span if self.mask[t]]

    def column(self, name: str, scale: float = 1.0, poison: float = float("nan")) -> Tensor:
        """Random fp32 `[total]`, `poison` outside the mask; the same name gives the same numbers."""
        column = scale * torch.randn(self.total, generator=self._generator(name))
        return column.masked_fill(~self.mask, poison)

    def per_sequence(self, name: str, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(self.n, generator=self._generator(name))

    def part(self, first: int, last: int) -> tuple[slice, Tensor]:
        """Token slice and cu_seqlens of sequences first..last−1 as a batch of their own."""
        return slice(int(self.cu[first]), int(self.cu[last])), self.cu[first : last + 1] - self.cu[first]

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1_000_003 * sum(map(ord, name)))


def from_rows(rows: list[list[bool]], seed: int = 0) -> Ragged:
    lengths = torch.tensor([0] + [len(row) for row in rows])
    flat = [trainable for row in rows for trainable in row]
    return Ragged(torch.tensor(flat, dtype=torch.bool), lengths.cumsum(0), seed)


@st.composite
def ragged(draw: st.DrawFn, max_rows: int = 5, max_length: int = 12) -> Ragged:
    """Holes, empty rows, fully masked rows, rows of one token; sometimes one row longer than a scan block."""
    rows = draw(st.lists(st.lists(st.booleans(), max_size=max_length), max_size=max_rows))
    if draw(st.booleans()):
        rows.append([k % 7 != 3 for k in range(draw(st.integers(30, 70)))])
    return from_rows(rows, draw(st.integers(0, 1000)))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)
