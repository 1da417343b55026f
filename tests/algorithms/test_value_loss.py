import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.value_loss import (
    explained_variance_from,
    explained_variance_moments,
    value_loss,
)


def naive_value_losses(batch, values, old, returns, epsilon):
    leaf = values.double().detach().requires_grad_()
    losses = [torch.zeros((), dtype=torch.float64)] * batch.total
    for _, index in batch.rows():
        for t in index:
            free = (leaf[t] - float(returns[t])) ** 2
            if epsilon is not None:
                bounded = torch.clamp(leaf[t], float(old[t]) - epsilon, float(old[t]) + epsilon)
                bounded = (bounded - float(returns[t])) ** 2
                free = bounded if bounded.item() > free.item() else free
            losses[t] = 0.5 * free
    losses = torch.stack(losses) if losses else torch.zeros(0, dtype=torch.float64)
    if losses.requires_grad:
        losses.sum().backward()
    return losses.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@quick
@given(ragged(), st.sampled_from([None, 0.0, 0.2, 0.5]))
def test_value_and_gradient_equal_the_definition(batch, epsilon):
    values, old, returns = batch.column("v"), batch.column("o"), batch.column("r")
    leaf = values.clone().requires_grad_()
    result = value_loss(leaf, old, returns, epsilon, loss_mask=batch.mask)
    result.loss.sum().backward()
    expected, gradient = naive_value_losses(batch, values, old, returns, epsilon)
    assert_close(result.loss.detach(), expected)
    assert_close(leaf.grad, gradient)
    assert not result.clipped.requires_grad and result.clipped.dtype == torch.bool


def test_published_examples():
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    result = value_loss(values, torch.tensor([0.5, 0.5]), torch.zeros(2), 0.2)
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx([0.5, 0.045])
    assert values.grad.tolist() == [1.0, 0.0]
    assert result.clipped.tolist() == [False, True]


def test_inside_the_range_the_full_gradient_flows():
    values = torch.tensor([0.6], requires_grad=True)
    value_loss(values, torch.tensor([0.5]), torch.zeros(1), 0.2).loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.6])


@pytest.mark.parametrize("epsilon", [None, 0.2])
def test_nan_outside_the_mask_reaches_no_value_and_no_gradient(epsilon):
    batch = from_rows([[False, True], [False]])
    values = batch.column("v").requires_grad_()
    result = value_loss(values, batch.column("o"), batch.column("r"), epsilon, loss_mask=batch.mask)
    result.loss.sum().backward()
    assert bool(result.loss.isfinite().all()) and bool(values.grad.isfinite().all())
    assert values.grad[~batch.mask].tolist() == [0.0, 0.0]


def test_a_negative_range_is_refused():
    with pytest.raises(ValueError, match="cliprange_value"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), -0.1)


@quick
@given(ragged(), st.integers(0, 5))
def test_explained_variance_from_shards_equals_the_definition(batch, cut):
    values, returns, cut = batch.column("v"), batch.column("r"), min(cut, batch.n)
    parts = [batch.part(0, cut)[0], batch.part(cut, batch.n)[0]]
    summed = sum(explained_variance_moments(values[p], returns[p], batch.mask[p]) for p in parts)
    v, r = values[batch.mask].double(), returns[batch.mask].double()
    expected = 1 - float((r - v).var()) / float(r.var()) if len(r) > 1 else 0.0
    assert explained_variance_from(summed) == pytest.approx(expected, rel=1e-9)


def test_explained_variance_of_returns_that_do_not_vary_is_zero():
    mask = torch.ones(50, dtype=torch.bool)
    returns = torch.full((50,), 0.7)
    moments = explained_variance_moments(torch.randn(50), returns, mask)
    assert explained_variance_from(moments) == 0.0


def test_a_perfect_critic_explains_everything_and_a_constant_one_nothing():
    returns, mask = torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.ones(50).bool()
    assert explained_variance_from(explained_variance_moments(returns, returns, mask)) == pytest.approx(1)
    constant = explained_variance_moments(torch.full((50,), 3.0), returns, mask)
    assert explained_variance_from(constant) == pytest.approx(0, abs=1e-9)
