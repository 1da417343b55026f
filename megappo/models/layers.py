"""Plain-torch layers for megatron-core's local layer spec: used where Transformer Engine is not.

They enter through megatron-core's own extension point (`ModuleSpec`), on CPU and on GPU alike:

* `RMSNorm`: megatron's torch norm refuses sequence parallelism; this one flags its weight for it.
* `PackedAttention`: megatron's torch attention refuses packed sequences; this one attends inside each sequence of
  a packed row, in a few padded groups of similar length so that many short sequences cost few kernel calls.
* `PackedRotary`: positions restart with every packed sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megappo.parallel import backend

backend.install()  # before the first import of megatron-core
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

# A group may hold at most this many times its real tokens; more would waste quadratic attention work.
_MAX_PADDING = 1.3


@dataclass
class AttentionGroup:
    """Sequences of similar length, attended to as one right-padded batch.

    Attributes:
        gather: `[n · longest]` packed positions, sequence by sequence; padding repeats position 0.
        keep: `[tokens]` positions of the real tokens in the padded batch, or None when there is no padding.
        shape: `(n, longest)`.
    """

    gather: Tensor
    keep: Tensor | None
    shape: tuple[int, int]


@dataclass
class PackedSequences(PackedSeqParams):
    """Boundaries of the sequences packed into one row, with what attention derives from them.

    `qkv_format` stays "sbhd" for the torch layers (they handle the boundaries themselves) and is "thd" for
    Transformer Engine. Under context parallelism the row is this rank's part of it; `cu_seqlens_*` speak of the whole.

    Attributes:
        positions: `[local tokens]` position of each token in its sequence.
        local: `[local tokens]` where this rank's tokens sit in the whole row.
        groups, restore: sequences of similar length attended to together, and the way back to the row's order.
        spans: under context parallelism, for each sequence `(start in the local row, chunk length, start in the row)`.
        natural: under context parallelism, `[whole row]` index of each token in the keys gathered from all ranks.
    """

    positions: Tensor | None = None
    local: Tensor | None = None
    groups: list[AttentionGroup] = field(default_factory=list)
    restore: Tensor | None = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    natural: Tensor | None = None


def pack(
    lengths: list[int], device: torch.device, *, thd: bool = False, cp: int = 1, cp_rank: int = 0
) -> PackedSequences:
    """Describe a packed row: sequence `i` has `lengths[i]` (>= 1) tokens, one after the other.

    With context parallelism every length must be a multiple of `2·cp`: each sequence is cut into `2·cp` chunks and
    rank r takes chunks r and `2·cp − 1 − r`, so that all ranks have the same causal work.
    """
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    cu[1:] = torch.tensor(lengths).cumsum(0)
    longest = max(lengths)
    positions = torch.arange(int(cu[-1])) - torch.repeat_interleave(cu[:-1], torch.tensor(lengths))
    local = torch.arange(int(cu[-1])) if cp == 1 else _zigzag(lengths, cu, cp, cp_rank)
    boundaries = cu.to(device, torch.int32)
    packed = PackedSequences(
        qkv_format="thd" if thd else "sbhd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions[local].to(device),
        local=local,
    )
    if cp > 1:
        chunks = [length // (2 * cp) for length in lengths]
        starts = torch.tensor([0, *chunks]).cumsum(0) * 2
        packed.spans = list(zip(starts.tolist(), chunks, cu.tolist(), strict=False))
        gathered = torch.cat([_zigzag(lengths, cu, cp, rank) for rank in range(cp)])
        packed.natural = torch.argsort(gathered).to(device)
    elif not thd:
        packed.groups, packed.restore = _attention_groups(lengths, cu, device)
    return packed


def _zigzag(lengths: list[int], starts: Tensor, cp: int, rank: int) -> Tensor:
    """Positions in the row of the tokens of one context-parallel rank, sequence by sequence."""
    parts = []
    for length, start in zip(lengths, starts.tolist(), strict=False):
        chunk = length // (2 * cp)
        for k in (rank, 2 * cp - 1 - rank):
            parts.append(torch.arange(start + k * chunk, start + (k + 1) * chunk))
    return torch.cat(parts)


def _attention_groups(lengths: list[int], starts: Tensor, device) -> tuple[list[AttentionGroup], Tensor | None]:
    """Cut the sequences, longest first, into groups whose padding stays small."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    members: list[list[int]] = []
    tokens = 0
    for i in order:
        if members:
            longest, count = lengths[members[-1][0]], len(members[-1]) + 1
            if longest * count <= _MAX_PADDING * (tokens + lengths[i]):
                members[-1].append(i)
                tokens += lengths[i]
                continue
        members.append([i])
        tokens = lengths[i]
    groups, sources = [], []
    for group in members:
        group.sort()
        size = torch.tensor([lengths[i] for i in group])
        longest = int(size.max())
        offset = torch.arange(longest).expand(len(group), longest)
        real = offset < size[:, None]
        index = torch.where(real, starts[torch.tensor(group)][:, None] + offset, 0).reshape(-1)
        keep = None if bool(real.all()) else real.reshape(-1).nonzero().squeeze(1)
        sources.append(index if keep is None else index[keep])
        groups.append(
            AttentionGroup(index.to(device), None if keep is None else keep.to(device), (len(group), longest))
        )
    source = torch.cat(sources)
    if torch.equal(source, torch.arange(len(source))):
        return groups, None
    return groups, torch.argsort(source).to(device)


class PackedAttention(MegatronModule):
    """Causal attention inside each packed sequence, through `scaled_dot_product_attention`.

    Padding is on the right, where a causal query never looks, so no mask tensor is needed.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query `[local, 1, heads, dim]`, key and value `[local, 1, kv_heads, dim]` → `[local, 1, heads·dim]`."""
        if packed_seq_params is None:
            raise RuntimeError("PackedAttention needs packed_seq_params; call the model through ModelEngine")
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if self.cp_group is not None:
            return self._attend_context_parallel(query, key, value, packed_seq_params)
        outs = [self._attend(query, key, value, group) for group in packed_seq_params.groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if packed_seq_params.restore is not None:
            out = out.index_select(0, packed_seq_params.restore)
        return out.reshape(out.shape[0], 1, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, group: AttentionGroup) -> Tensor:
        n, longest = group.shape
        whole = group.keep is None and n * longest == query.shape[0] and n == 1

        def batch(x: Tensor) -> Tensor:
            rows = x if whole else x.index_select(0, group.gather)
            return rows.reshape(n, longest, x.shape[1], x.shape[2]).transpose(1, 2)

        out = _attention(batch(query), batch(key), batch(value), is_causal=True, scale=self.softmax_scale)
        out = out.transpose(1, 2).reshape(n * longest, query.shape[1], -1)
        return out if group.keep is None else out.index_select(0, group.keep)

    def _attend_context_parallel(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Gather the keys and values of all ranks; each of this rank's chunks attends to what precedes its end."""
        key, value = (
            gather_from_sequence_parallel_region(x, group=self.cp_group).index_select(0, packed.natural)
            for x in (key, value)
        )
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        outs = []
        for start, chunk, row in packed.spans:
            for number, begin in ((rank, start), (2 * cp - 1 - rank, start + chunk)):
                end = row + (number + 1) * chunk
                outs.append(self._attend_chunk(query[begin : begin + chunk], key[row:end], value[row:end]))
        return torch.cat(outs).reshape(query.shape[0], 1, -1)

    def _attend_chunk(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of the last `len(query)` positions of a sequence to all of `key`."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        mask = causal_lower_right(len(query), len(key))
        return _attention(q, k, v, attn_mask=mask, scale=self.softmax_scale)[0].transpose(0, 1)


def _attention(query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
    """Attention of `[n, heads, tokens, dim]`; several query heads may share a key head."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and query.is_cuda and query.dtype == torch.float32:
        # In fp32 torch shares heads only in the implementation that keeps tokens x tokens scores.
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        shared = 1
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=shared > 1, **how)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019): normalise in fp32, cast back, then scale, as transformers do."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each TP rank sees its own tokens only: megatron sums flagged gradients.
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class PackedRotary(torch.nn.Module):
    """Rotary embedding whose positions restart with every packed sequence.

    megatron-core asks first for a length (`get_rotary_seq_len`, which gets the packing) and then for the angles
    (`forward`, which does not): the first call leaves the positions for the second.
    """

    def __init__(self, inv_freq: Tensor):
        super().__init__()
        self.inv_freq = inv_freq  # no buffer: `.bfloat16()` would round it, and far positions would be wrong
        self._positions: Tensor | None = None

    def get_rotary_seq_len(self, inference_context, decoder, decoder_input, config, packed_seq_params=None) -> int:
        self._positions = packed_seq_params.positions
        return len(packed_seq_params.positions)

    def forward(self, max_seq_len: int, packed_seq: bool = False, cp_group=None) -> Tensor:
        """Angles `[local tokens, 1, 1, head_dim]` in fp32."""
        angles = self._positions.float()[:, None] * self.inv_freq
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
