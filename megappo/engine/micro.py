"""From samples of a batch to what one forward of the model needs: a packed row, and which of its positions matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.data.batch import RolloutBatch
from megappo.models.layers import PackedSequences, pack


@dataclass
class MicroBatch:
    """One packed row on the device.

    Attributes:
        tokens: `[1, total]`, padded at the end by a sequence of its own where the layout needs it.
        packed: boundaries for attention and rotary positions.
        targets: `[rows]` ids of the tokens that are scored.
        rows: `[rows]` position in the row whose hidden state predicts each target (one before it).
        index: `[rows]` position of each target in the batch's local columns (on CPU).
        cu_rows: `[samples + 1]` boundaries of the samples in `rows`.
        last: `[samples]` position in the row of each sample's last token, for bootstrapping.
        samples: indices into the batch's metadata.
        columns: what the loss reads, cut to `rows`.
    """

    tokens: Tensor
    packed: PackedSequences
    targets: Tensor
    rows: Tensor
    index: Tensor
    cu_rows: Tensor
    last: Tensor
    samples: list[int]
    columns: dict[str, Tensor]


def prepare(
    batch: RolloutBatch,
    samples: list[int],
    columns: Iterable[str],
    *,
    device: torch.device,
    multiple: int,
    thd: bool,
) -> MicroBatch:
    """Pack `samples` into one row whose length is a multiple of `multiple`; none of them gives a dummy row.

    Only tokens with loss mask 1 that have a predecessor become rows.
    """
    lengths = [int(batch.info.length[s]) for s in samples]
    total = sum(lengths)
    index = batch.token_index(samples)
    padding = -total % multiple or (0 if total else multiple)
    tokens = torch.cat([batch["tokens"][index], torch.zeros(padding, dtype=torch.int64)])
    starts = torch.zeros(len(samples) + 1, dtype=torch.int64)
    starts[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    wanted = batch["loss_mask"][index].clone()
    wanted[starts[:-1]] = False  # the first token of a sample has nothing before it
    where = wanted.nonzero().squeeze(1)
    local = index[where]
    return MicroBatch(
        tokens=tokens[None].to(device),
        packed=pack(lengths + ([padding] if padding else []), device, thd=thd),
        targets=tokens[where].to(device),
        rows=(where - 1).to(device),
        index=local,
        cu_rows=torch.searchsorted(where, starts).to(device),
        last=(starts[1:] - 1).to(device),
        samples=samples,
        columns={name: batch[name][local].to(device) for name in columns},
    )
