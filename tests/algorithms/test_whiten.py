import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.advantages import moments, whiten


@quick
@given(ragged(), st.booleans())
def test_equals_the_definition_inside_the_mask(batch, shift_mean):
    values = batch.column("values", 3.0)
    inside = values[batch.mask].double().tolist()
    expected = torch.zeros(batch.total, dtype=torch.float64)
    if inside:
        mean = statistics.fmean(inside)
        variance = statistics.variance(inside) if len(inside) > 1 else 0.0
        white = (values[batch.mask].double() - mean) / (variance + 1e-8) ** 0.5
        expected[batch.mask] = white if shift_mean else white + mean
    actual = whiten(values, batch.mask, moments(values, batch.mask), shift_mean)
    assert actual.dtype == torch.float32
    assert_close(actual, expected)


@quick
@given(ragged(), st.integers(0, 5))
def test_moments_of_shards_add_up_even_where_a_shard_owns_nothing(batch, cut):
    values, cut = batch.column("values"), min(cut, batch.n)
    head, tail = batch.part(0, cut)[0], batch.part(cut, batch.n)[0]
    summed = moments(values[head], batch.mask[head]) + moments(values[tail], batch.mask[tail])
    whole = moments(values, batch.mask)
    assert summed.dtype == torch.float64
    assert_close(summed, whole, 1e-12)
    pieces = torch.cat([whiten(values[part], batch.mask[part], summed) for part in (head, tail)])
    assert_close(pieces, whiten(values, batch.mask, whole), 1e-6)


def test_one_element_becomes_zero_and_none_gives_zeros():
    one, none = from_rows([[False, True]]), from_rows([[False, False]])
    values = torch.tensor([float("nan"), 3.5])
    assert whiten(values, one.mask, moments(values, one.mask)).tolist() == [0.0, 0.0]
    assert whiten(values, one.mask, moments(values, one.mask), shift_mean=False).tolist() == [0.0, 3.5]
    assert whiten(values, none.mask, moments(values, none.mask)).tolist() == [0.0, 0.0]


def test_a_large_mean_does_not_swamp_a_small_spread():
    mask = torch.ones(2000, dtype=torch.bool)
    values = 1000.0 + 0.01 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
    exact = (values.double() - values.double().mean()) / (values.double().var() + 1e-8).sqrt()
    assert_close(whiten(values, mask, moments(values, mask)), exact, 1e-4)
    constant = torch.full((2000,), 12345.678)
    assert float(whiten(constant, mask, moments(constant, mask)).abs().max()) < 1e-4
