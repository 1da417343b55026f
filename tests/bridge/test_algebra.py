"""Every rule kind, cut for every tensor-parallel size, against plain tensor arithmetic written another way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megappo.bridge import algebra
from megappo.bridge.algebra import Rule, local_shape, pieces, slices

# A busy machine must not fail a test, and every run looks at the same examples.
quick = settings(deadline=None, derandomize=True)


@dataclass
class Case:
    """A rule, the Hugging Face tensors it is made of (every element another number) and what ranks must hold."""

    rule: Rule
    tp: int
    hf: dict[str, Tensor]
    want: list[Tensor]

    @property
    def copies(self) -> int:
        """How many ranks hold each Hugging Face element."""
        return self.tp if self.rule.dim is None else 1


def numbered(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    out, start = {}, 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        out[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return out


TP = st.sampled_from([1, 2, 3, 4, 8])
SMALL = st.integers(1, 5)


def replicated_case(tp: int, rows: int, tail: tuple[int, ...]) -> Case:
    hf = numbered(w=(rows, *tail))
    return Case(algebra.replicated("p", "w", rows, *tail), tp, hf, [hf["w"]] * tp)


def column_case(tp: int, rows: int, tail: tuple[int, ...]) -> Case:
    hf = numbered(w=(rows * tp, *tail))
    return Case(algebra.column("p", "w", rows * tp, *tail), tp, hf, list(hf["w"].chunk(tp)))


def row_case(tp: int, rows: int, columns: int) -> Case:
    hf = numbered(w=(rows, columns * tp))
    return Case(algebra.row("p", "w", rows, columns * tp), tp, hf, list(hf["w"].chunk(tp, dim=1)))


def vocabulary_case(tp: int, vocab: int, hidden: int) -> Case:
    hf = numbered(w=(vocab, hidden))
    padded = -(-vocab // tp) * tp
    full = F.pad(hf["w"], (0, 0, 0, padded - vocab))
    return Case(algebra.vocabulary("p", "w", vocab, padded, hidden), tp, hf, list(full.chunk(tp)))


def gate_up_case(tp: int, ffn: int, hidden: int) -> Case:
    hf = numbered(g=(ffn * tp, hidden), u=(ffn * tp, hidden))
    want = [torch.cat(both) for both in zip(hf["g"].chunk(tp), hf["u"].chunk(tp), strict=True)]
    return Case(algebra.gate_up("p", "g", "u", ffn * tp, hidden), tp, hf, want)


def qkv_case(tp: int, per_group: int, kv_heads: int, dim: int, tail: tuple[int, ...]) -> Case:
    """Megatron reshapes `[kv_heads, (heads / kv_heads + 2) · dim, hidden]`: queries, key and value of each group."""
    heads = per_group * kv_heads
    hf = numbered(q=(heads * dim, *tail), k=(kv_heads * dim, *tail), v=(kv_heads * dim, *tail))
    grouped = [x.reshape(kv_heads, -1, *tail) for x in hf.values()]
    full = torch.cat(grouped, dim=1).reshape(-1, *tail)
    rule = algebra.grouped_qkv("p", "q", "k", "v", heads, kv_heads, dim, *tail)
    return Case(rule, tp, hf, list(full.chunk(tp)))


@st.composite
def cases(draw) -> Case:
    tp, tail = draw(TP), draw(st.sampled_from([(), (3,)]))
    kind = draw(st.sampled_from(["replicated", "column", "row", "vocabulary", "gate_up", "qkv", "few kv heads"]))
    if kind == "replicated":
        return replicated_case(tp, draw(SMALL), tail)
    if kind == "column":
        return column_case(tp, draw(SMALL), tail)
    if kind == "row":
        return row_case(tp, draw(SMALL), draw(SMALL))
    if kind == "vocabulary":
        return vocabulary_case(tp, draw(st.integers(1, 40)), draw(SMALL))
    if kind == "gate_up":
        return gate_up_case(tp, draw(SMALL), draw(SMALL))
    if kind == "qkv":
        return qkv_case(tp, draw(SMALL), draw(SMALL) * tp, 2 * draw(SMALL), tail)
    kv_heads, share = draw(st.sampled_from([(1, 2), (1, 4), (2, 2)]))
    return qkv_case(kv_heads * share, 2 * share, kv_heads, 2 * draw(SMALL), tail)


@quick
@given(cases())
def test_ranks_hold_what_plain_tensor_arithmetic_says(case):
    for rank in range(case.tp):
        local = torch.zeros(local_shape(case.rule, case.tp))
        for piece in pieces(case.rule, rank, case.tp):
            local[slices(piece.local_box)] = case.hf[piece.hf][slices(piece.hf_box)]
        assert torch.equal(local, case.want[rank]), rank


@quick
@given(cases())
def test_each_local_element_is_written_once_and_only_padding_is_not(case):
    for rank in range(case.tp):
        written = torch.zeros(local_shape(case.rule, case.tp), dtype=torch.int)
        for piece in pieces(case.rule, rank, case.tp):
            written[slices(piece.local_box)] += 1
        padding = case.want[rank] == 0  # real elements are numbered from 1
        assert torch.equal(written, (~padding).int()), rank


@quick
@given(cases())
def test_ranks_together_hold_each_source_element_once_or_all_of_them(case):
    read = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in case.hf.items()}
    for rank in range(case.tp):
        for piece in pieces(case.rule, rank, case.tp):
            read[piece.hf][slices(piece.hf_box)] += 1
    assert all((count == case.copies).all() for count in read.values())


@quick
@given(cases())
def test_values_survive_the_way_to_the_ranks_and_back_bit_for_bit(case):
    g = torch.Generator().manual_seed(0)
    hf = {name: torch.randn(t.shape, dtype=torch.bfloat16, generator=g) for name, t in case.hf.items()}
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in hf.items()}
    for rank in range(case.tp):
        local = torch.zeros(local_shape(case.rule, case.tp), dtype=torch.bfloat16)
        for piece in pieces(case.rule, rank, case.tp):
            local[slices(piece.local_box)] = hf[piece.hf][slices(piece.hf_box)]
        for piece in pieces(case.rule, rank, case.tp):
            assert piece.numel == local[slices(piece.local_box)].numel()
            back[piece.hf][slices(piece.hf_box)] = local[slices(piece.local_box)]
    assert all(torch.equal(back[name], hf[name]) for name in hf)


def test_four_ranks_share_two_key_value_heads():
    """Megatron divides the interleaved rows evenly: ranks 0 and 2 hold queries only, 1 and 3 keys and values too."""
    rule = algebra.grouped_qkv("p", "q", "k", "v", 4, 2, 8, 16)
    held = [[(p.hf, p.hf_box[0]) for p in pieces(rule, rank, 4)] for rank in range(4)]
    assert held == [
        [("q", (0, 16))],
        [("k", (0, 8)), ("v", (0, 8))],
        [("q", (16, 32))],
        [("k", (8, 16)), ("v", (8, 16))],
    ]


def test_a_vocabulary_smaller_than_the_padding_leaves_the_last_rank_empty():
    rule = algebra.vocabulary("p", "w", 9, 12, 4)
    assert [sum(p.numel for p in pieces(rule, rank, 4)) for rank in range(4)] == [12, 12, 12, 0]


@pytest.mark.parametrize(
    ("rule", "tp"),
    [
        (algebra.column("col", "w", 6, 4), 4),
        (algebra.row("row", "w", 6, 4), 3),
        (algebra.gate_up("mlp", "g", "u", 6, 4), 4),  # 12 rows in all divide, the halves do not
        (algebra.grouped_qkv("qkv", "q", "k", "v", 3, 3, 2, 4), 4),
    ],
)
def test_rows_that_ranks_cannot_share_evenly_are_refused(rule, tp):
    with pytest.raises(ValueError, match=f"{rule.local}: .* cannot be divided over {tp}"):
        pieces(rule, 0, tp)
