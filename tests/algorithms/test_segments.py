from itertools import pairwise

import torch
from hypothesis import given
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.segments import (
    segment_mean,
    segment_sum,
    trainable_counts,
    trainable_runs,
    trainable_spans,
    zero_outside,
)


@quick
@given(ragged())
def test_sums_means_and_counts_of_each_sequence(batch):
    x = batch.column("x")
    rows = [x[index].double() for _, index in batch.rows()]
    expected_sum = torch.stack([row.sum() for row in rows]) if rows else torch.zeros(0)
    expected_mean = torch.stack([row.mean() if len(row) else row.sum() for row in rows]) if rows else expected_sum
    assert_close(segment_sum(zero_outside(x, batch.mask), batch.cu), expected_sum)
    assert_close(segment_mean(x, batch.mask, batch.cu), expected_mean)
    assert trainable_counts(batch.mask, batch.cu).tolist() == [len(row) for row in rows]


@quick
@given(ragged())
def test_spans_and_runs_name_the_right_tokens(batch):
    spans = trainable_spans(batch.mask, batch.cu)
    expected, previous = [], None
    for i, index in batch.rows():
        if index:
            assert int(spans.last[i]) == index[-1]
            assert [int(spans.end_rank[i] - spans.rank[t]) for t in index] == list(range(len(index)))[::-1]
        for t in index:
            if previous == (i, t - 1):
                expected[-1][1] = t
            else:
                expected.append([t, t, i])
            previous = (i, t)
    runs = trainable_runs(batch.mask, batch.cu)
    assert torch.stack([runs.first, runs.last, runs.sequence], dim=1).tolist() == expected
    assert runs.continues.tolist() == [a[2] == b[2] for a, b in pairwise(expected)]


def test_a_segment_sum_has_a_gradient():
    batch = from_rows([[True, True], [], [True]])
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (segment_sum(x, batch.cu) * torch.tensor([5.0, 6.0, 7.0])).sum().backward()
    assert x.grad.tolist() == [5.0, 5.0, 7.0]
