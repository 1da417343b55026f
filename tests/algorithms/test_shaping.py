import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.shaping import (
    CREDITS,
    apply_kl_penalty,
    clip_scores,
    overlong_penalty,
    token_rewards,
)


@quick
@given(ragged(), st.sampled_from(CREDITS), st.sampled_from([0.5, 0.95, 0.999999, 1.0]))
def test_rewards_follow_the_credit_and_sum_to_the_score(batch, credit, decay):
    scores = batch.per_sequence("scores")
    expected = torch.zeros(batch.total, dtype=torch.float64)
    for i, index in batch.rows():
        following = range(len(index) - 1, -1, -1)
        shares = {
            "last": [float(k == 0) for k in following],
            "uniform": [1.0 for _ in following],
            "exponential": [decay**k for k in following],
        }[credit]
        for t, share in zip(index, shares, strict=True):
            expected[t] = float(scores[i]) * share / sum(shares)
    rewards = token_rewards(scores, batch.mask, batch.cu, credit, decay)
    assert rewards.dtype == torch.float32
    assert_close(rewards, expected, 1e-6)
    for i, index in batch.rows():
        assert float(rewards[index].double().sum()) == pytest.approx(float(scores[i]) if index else 0, abs=1e-5)


@pytest.mark.parametrize("credit", CREDITS)
def test_a_sequence_without_trainable_tokens_gets_nothing_whatever_its_score(credit):
    batch = from_rows([[False, False], [], [True], [False]])
    scores = torch.tensor([float("nan"), 2.0, 3.0, float("inf")])
    assert token_rewards(scores, batch.mask, batch.cu, credit).tolist() == [0.0, 0.0, 3.0, 0.0]


def test_the_score_lands_on_the_last_trainable_token_not_the_last_token():
    batch = from_rows([[False, True, True, False, True, False, False]])
    assert token_rewards(torch.tensor([2.0]), batch.mask, batch.cu).tolist() == [0, 0, 0, 0, 2, 0, 0]


def test_a_very_long_sequence_keeps_its_sum():
    mask, cu = torch.ones(50_000, dtype=torch.bool), torch.tensor([0, 50_000])
    for credit in CREDITS:
        rewards = token_rewards(torch.tensor([0.7]), mask, cu, credit, 0.9)
        assert float(rewards.double().sum()) == pytest.approx(0.7, rel=1e-6)


def test_overlong_penalty_matches_the_published_example():
    assert overlong_penalty(torch.tensor([0, 15, 17, 20]), 20, 5).tolist() == pytest.approx([0, 0, -0.4, -1])
    assert overlong_penalty(torch.tensor([17]), 20, 5, factor=0.5).tolist() == pytest.approx([-0.2])
    for buffer_length in (0, 21):
        with pytest.raises(ValueError, match="buffer_len"):
            overlong_penalty(torch.tensor([1]), 20, buffer_length)


def test_scores_are_clipped():
    assert clip_scores(torch.tensor([-9.0, 0.5, 9.0]), -1.0, 2.0).tolist() == [-1.0, 0.5, 2.0]
    with pytest.raises(ValueError, match="clip"):
        clip_scores(torch.zeros(1), 1.0, -1.0)


@quick
@given(ragged())
def test_the_kl_penalty_is_subtracted_on_trainable_tokens_only(batch):
    rewards, kl = batch.column("rewards"), batch.column("kl")
    expected = torch.where(batch.mask, rewards.double() - 0.3 * kl.double(), 0.0)
    assert_close(apply_kl_penalty(rewards, kl, 0.3, batch.mask), expected)


def test_wrong_settings_are_refused():
    batch = from_rows([[True]])
    with pytest.raises(ValueError, match=r"'first'.*last, uniform"):
        token_rewards(torch.zeros(1), batch.mask, batch.cu, "first")
    for decay in (0.0, 1.5):
        with pytest.raises(ValueError, match="decay"):
            token_rewards(torch.zeros(1), batch.mask, batch.cu, "exponential", decay)
