"""From samples of a batch to what one forward of the model needs: a packed row, and which of its positions matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megappo.data.batch import RolloutBatch
from megappo.models.layers import PackedSequences, pack


@dataclass
class MicroBatch:
    """One packed row on the device, or this context-parallel rank's part of it.

    Attributes:
        samples: indices into the batch's `info` of what is in it.
        tokens: `[1, local]`, padded where the layout needs it.
        padding: `[1, local]` bool, True on padding.
        packed: boundaries for attention and rotary positions.
        targets: `[rows]` ids of the tokens that are scored.
        rows: `[rows]` position in `tokens` whose hidden state predicts each target (one before it).
        index: `[rows]` position of each target in the batch's local columns (on CPU).
        cu_rows: `[samples + 1]` boundaries of the samples in `rows`.
        last: position in `tokens` of the last token of each of `last_samples`, the samples that end here.
        last_places: which of the row's samples those are.
        columns: what the loss reads, cut to `rows`, or to the samples' last tokens.
    """

    samples: list[int]
    tokens: Tensor
    padding: Tensor
    packed: PackedSequences
    targets: Tensor
    rows: Tensor
    index: Tensor
    cu_rows: Tensor
    last: Tensor
    last_samples: list[int]
    last_places: Tensor
    columns: dict[str, Tensor]


@dataclass(frozen=True)
class RowFormat:
    """What a layout wants of a row.

    `multiple`: this rank's tokens must be a multiple (sequence parallelism). `cp`, `cp_rank`: context parallelism.
    `thd`: Transformer Engine's packed format.
    """

    multiple: int = 1
    cp: int = 1
    cp_rank: int = 0
    thd: bool = False

    def padded(self, lengths: list[int]) -> list[int]:
        """Row lengths of the sequences; a last sequence made of padding alone where one is needed."""
        unit = 2 * self.cp if self.cp > 1 else 1
        rounded = [-(-length // unit) * unit for length in lengths]
        local, extra = sum(rounded) // self.cp, 0
        while (local + extra * unit // self.cp) % self.multiple or local + extra == 0:
            extra += 1
        return rounded + ([extra * unit] if extra else [])


def prepare(
    batch: RolloutBatch,
    samples: list[int],
    columns: Iterable[str],
    row: RowFormat,
    device: torch.device,
    at: Literal["rows", "last"] = "rows",
) -> MicroBatch:
    """Pack `samples` into one row; none of them gives a dummy row without anything to score.

    Only tokens with loss mask 1 that have a predecessor become rows. `at`: what `columns` are cut to, the rows or
    the last token of every sample.
    """
    lengths = [int(batch.info.length[s]) for s in samples]
    padded = row.padded(lengths)
    packed = pack(padded, device, thd=row.thd, cp=row.cp, cp_rank=row.cp_rank)
    starts = torch.tensor([0, *padded]).cumsum(0)
    index = batch.token_index(samples)
    # Where the real tokens sit in the padded row.
    place = torch.cat(
        [torch.arange(length) + start for length, start in zip(lengths, starts.tolist(), strict=False)] or [index]
    )
    tokens = torch.zeros(int(starts[-1]), dtype=torch.int64)
    tokens[place] = batch["tokens"][index]
    real = torch.zeros(len(tokens), dtype=torch.bool)
    real[place] = True
    here = torch.full((len(tokens),), -1)
    here[packed.local] = torch.arange(len(packed.local))

    wanted = batch["loss_mask"][index] & ~torch.isin(place, starts)  # a first token has nothing before it
    wanted &= here[(place - 1).clamp(min=0)] >= 0  # predicted on this context-parallel rank
    target, local = place[wanted], index[wanted]
    sizes = torch.tensor(lengths, dtype=torch.int64)
    last = here[starts[: len(lengths)] + sizes - 1]
    cut = local if at == "rows" else index[sizes.cumsum(0) - 1]
    return MicroBatch(
        samples=samples,
        tokens=tokens[packed.local][None].to(device),
        padding=~real[packed.local][None].to(device),
        packed=packed,
        targets=tokens[target].to(device),
        rows=here[target - 1].to(device),
        index=local,
        cu_rows=torch.searchsorted(target, starts[: len(lengths) + 1]).to(device),
        last=last[last >= 0].to(device),
        last_samples=[s for s, place in zip(samples, last.tolist(), strict=True) if place >= 0],
        last_places=(last >= 0).nonzero().squeeze(1).to(device),
        columns={name: batch[name][cut].to(device) for name in columns},
    )
