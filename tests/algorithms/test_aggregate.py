from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.aggregate import (
    AGGREGATION_MODES,
    BatchCounts,
    count,
    token_weights,
    weighted_sum,
)
from megappo.algorithms.policy_loss import POLICY_LOSSES, PolicyLossConfig, policy_loss
from megappo.algorithms.value_loss import value_loss

modes = st.sampled_from(AGGREGATION_MODES)


def naive_loss(batch, losses, mode, norm_length):
    rows = [[float(losses[t]) for t in index] for _, index in batch.rows() if index]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    scale = norm_length if mode == "seq-mean-token-sum-norm" else 1
    return sum(map(sum, rows)) / len(rows) / scale


@quick
@given(ragged(), modes)
def test_equals_the_definition_and_ignores_sequences_without_trainable_tokens(batch, mode):
    losses = batch.column("losses")
    weights = token_weights(batch.mask, batch.cu, mode, count(batch.mask, batch.cu), norm_length=7)
    assert weights.dtype == torch.float32
    assert float(weighted_sum(losses, weights)) == pytest.approx(naive_loss(batch, losses, mode, 7), abs=1e-5)


def split_losses(batch, cuts, loss_of):
    """Loss and gradient summed over the parts between the cuts, each part seen alone."""
    edges = sorted({0, batch.n, *(min(cut, batch.n) for cut in cuts)})
    leaf = batch.column("logprobs", 0.5).requires_grad_()
    parts = [batch.part(a, b) for a, b in pairwise(edges)]
    counts = sum((count(batch.mask[tokens], cu) for tokens, cu in parts), BatchCounts(0, 0))
    total = torch.zeros(())
    for tokens, cu in parts:
        loss = loss_of(leaf, tokens, cu, counts)
        loss.backward()
        total = total + loss.detach()
    return total, torch.zeros(batch.total) if leaf.grad is None else leaf.grad


@quick
@given(ragged(), modes, st.sampled_from(POLICY_LOSSES), st.lists(st.integers(0, 5), max_size=3))
def test_policy_loss_and_gradient_do_not_depend_on_the_micro_batch_split(batch, mode, kind, cuts):
    old, advantages = batch.column("old", 0.5), batch.column("advantages")

    def loss_of(leaf, tokens, cu, counts):
        mask = batch.mask[tokens]
        per_token = policy_loss(
            leaf[tokens],
            old[tokens],
            advantages[tokens],
            PolicyLossConfig(kind),
            loss_mask=mask,
            cu_seqlens=cu,
        )
        return weighted_sum(per_token.loss, token_weights(mask, cu, mode, counts, norm_length=9))

    whole, split = split_losses(batch, [], loss_of), split_losses(batch, cuts, loss_of)
    assert_close(split[0], whole[0])
    assert_close(split[1], whole[1], 1e-6)


@quick
@given(ragged(), modes, st.lists(st.integers(0, 5), max_size=3))
def test_value_loss_and_gradient_do_not_depend_on_the_micro_batch_split(batch, mode, cuts):
    old, returns = batch.column("old"), batch.column("returns")

    def loss_of(leaf, tokens, cu, counts):
        mask = batch.mask[tokens]
        per_token = value_loss(leaf[tokens], old[tokens], returns[tokens], 0.2, loss_mask=mask)
        return weighted_sum(per_token.loss, token_weights(mask, cu, mode, counts, norm_length=9))

    whole, split = split_losses(batch, [], loss_of), split_losses(batch, cuts, loss_of)
    assert_close(split[0], whole[0])
    assert_close(split[1], whole[1], 1e-6)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("rows", [[], [[]], [[False, False], [False]]])
def test_nothing_to_train_on_gives_loss_and_gradient_zero(mode, rows):
    batch = from_rows(rows)
    losses = batch.column("losses").requires_grad_()
    counts = count(batch.mask, batch.cu)
    assert counts == BatchCounts(0, 0)
    loss = weighted_sum(losses, token_weights(batch.mask, batch.cu, mode, counts, norm_length=4))
    loss.backward()
    assert loss.item() == 0 and losses.grad.tolist() == [0.0] * batch.total


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nothing_leaks_from_where_the_weight_is_zero(bad):
    values = torch.tensor([bad, 2.0], requires_grad=True)
    total = weighted_sum(values, torch.tensor([0.0, 0.5]))
    total.backward()
    assert total.item() == 1.0 and values.grad.tolist() == [0.0, 0.5]


def test_half_precision_losses_are_summed_in_fp32():
    values = torch.ones(4096, dtype=torch.bfloat16)
    assert float(weighted_sum(values, torch.full((4096,), 1.0))) == 4096.0


def test_counts_skip_fully_masked_sequences():
    batch = from_rows([[True, False, True], [False], [], [True]])
    assert count(batch.mask, batch.cu) == BatchCounts(tokens=3, sequences=2)


def test_wrong_settings_are_refused():
    batch = from_rows([[True]])
    with pytest.raises(ValueError, match=r"'mean'.*token-mean"):
        token_weights(batch.mask, batch.cu, "mean", BatchCounts(1, 1))
    for norm_length in (None, 0):
        with pytest.raises(ValueError, match="loss_agg_norm_length"):
            token_weights(batch.mask, batch.cu, "seq-mean-token-sum-norm", BatchCounts(1, 1), norm_length)
