import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import Ragged, assert_close, from_rows, quick, ragged

from megappo.algorithms.advantages import adaptive_lambda, gae, rewards_to_go
from megappo.algorithms.shaping import token_rewards

nan = float("nan")


def naive_gae(batch: Ragged, rewards, values, gamma, lam, bootstrap=None):
    """The definition, in Python floats; lam may be a list with one λ a sequence."""
    advantages = torch.zeros(batch.total, dtype=torch.float64)
    for i, index in batch.rows():
        following = float(bootstrap[i]) if bootstrap is not None else 0.0
        running = 0.0
        for t in reversed(index):
            delta = float(rewards[t]) + gamma * following - float(values[t])
            running = delta + gamma * (lam[i] if isinstance(lam, list) else lam) * running
            following = float(values[t])
            advantages[t] = running
    return advantages


def naive_returns(batch, advantages, values):
    return torch.where(batch.mask, advantages + values.double(), 0.0)


gammas = st.sampled_from([1.0, 0.99, 0.5, 0.0])


@quick
@given(ragged(), gammas, st.sampled_from([1.0, 0.95, 0.0]), st.booleans())
def test_equals_the_definition_on_trainable_tokens(batch, gamma, lam, truncated):
    rewards, values = batch.column("rewards"), batch.column("values")
    bootstrap = batch.per_sequence("bootstrap") if truncated else None
    advantages, returns = gae(rewards, values, batch.mask, batch.cu, gamma, lam, bootstrap_values=bootstrap)
    expected = naive_gae(batch, rewards, values, gamma, lam, bootstrap)
    assert advantages.dtype == returns.dtype == torch.float32
    assert_close(advantages, expected, 2e-5)
    assert_close(returns, naive_returns(batch, expected, values), 2e-5)
    assert bool((advantages[~batch.mask] == 0).all()) and bool((returns[~batch.mask] == 0).all())


@quick
@given(ragged(), gammas)
def test_decoupled_lambda_separates_advantages_from_returns(batch, gamma):
    rewards, values = batch.column("rewards"), batch.column("values")
    advantages, returns = gae(rewards, values, batch.mask, batch.cu, gamma, 0.9, lam_returns=1.0)
    assert_close(advantages, naive_gae(batch, rewards, values, gamma, 0.9), 2e-5)
    lam_one = naive_gae(batch, rewards, values, gamma, 1.0)
    assert_close(returns, naive_returns(batch, lam_one, values), 2e-5)


@quick
@given(ragged())
def test_length_adaptive_lambda_uses_each_sequences_trainable_length(batch):
    rewards, values = batch.column("rewards"), batch.column("values")
    lams = [max(0.0, 1 - 1 / (0.3 * len(index))) if index else 0.0 for _, index in batch.rows()]
    expected = naive_gae(batch, rewards, values, 0.99, lams)
    advantages, _ = gae(rewards, values, batch.mask, batch.cu, 0.99, 0.5, adaptive_alpha=0.3)
    assert_close(advantages, expected, 2e-5)


def test_adaptive_lambda_matches_the_published_example_and_stays_in_range():
    assert adaptive_lambda(torch.tensor([100, 1, 0, 10**9]), 0.05).tolist() == pytest.approx([0.8, 0, 0, 1])
    with pytest.raises(ValueError, match="adaptive_lam_alpha"):
        adaptive_lambda(torch.tensor([1]), 0.0)


def test_tool_tokens_are_no_time_steps():
    plain = from_rows([[False, True, True, True, True]])
    with_tool = from_rows([[False, True, True, False, False, False, True, True]])
    rewards, values = torch.tensor([nan, 0.1, 0.2, 0.3, 1.0]), torch.tensor([nan, 0.5, -0.5, 0.25, 0.75])
    spread = torch.full((8,), nan)
    spread_rewards, spread_values = spread.clone(), spread.clone()
    spread_rewards[with_tool.mask], spread_values[with_tool.mask] = rewards[1:], values[1:]
    expected = gae(rewards, values, plain.mask, plain.cu, 0.9, 0.8)
    actual = gae(spread_rewards, spread_values, with_tool.mask, with_tool.cu, 0.9, 0.8)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a[with_tool.mask], e[plain.mask], 1e-6)


def test_the_terminal_reward_survives_a_masked_tail():
    batch = from_rows([[False, True, True, False, False]])
    rewards = token_rewards(torch.tensor([1.0]), batch.mask, batch.cu)
    _, returns = gae(rewards, torch.zeros(5), batch.mask, batch.cu, 1.0, 1.0)
    assert returns.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]


def test_a_truncated_sequence_bootstraps_and_a_terminated_one_does_not():
    batch = from_rows([[True, True, False], [True, True]])
    values = torch.zeros(5)
    _, returns = gae(torch.zeros(5), values, batch.mask, batch.cu, 0.5, 1.0, bootstrap_values=torch.tensor([8.0, 0.0]))
    assert returns.tolist() == [2.0, 4.0, 0.0, 0.0, 0.0]


def test_a_long_sequence_among_short_ones():
    rows = [[True], [k % 100 != 7 for k in range(5000)], [False], [], [True, True]]
    batch = from_rows(rows)
    rewards, values = batch.column("rewards", 0.1), batch.column("values", 0.1)
    advantages, _ = gae(rewards, values, batch.mask, batch.cu, 1.0, 0.999)
    assert_close(advantages, naive_gae(batch, rewards, values, 1.0, 0.999), 1e-4)


@quick
@given(ragged())
def test_a_sequence_does_not_depend_on_its_neighbours(batch):
    rewards, values = batch.column("rewards"), batch.column("values")
    together, _ = gae(rewards, values, batch.mask, batch.cu, 0.99, 0.95)
    for i in range(batch.n):
        tokens, cu = batch.part(i, i + 1)
        alone, _ = gae(rewards[tokens], values[tokens], batch.mask[tokens], cu, 0.99, 0.95)
        assert_close(together[tokens], alone, 2e-6)


@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[False, False]], [[], [False], []]])
def test_nothing_to_train_on_gives_zeros(rows):
    batch = from_rows(rows)
    for result in gae(batch.column("r"), batch.column("v"), batch.mask, batch.cu, 1.0, 0.95):
        assert result.tolist() == [0.0] * batch.total
    assert rewards_to_go(batch.column("r"), batch.mask, batch.cu, 1.0).tolist() == [0.0] * batch.total


def test_no_graph_and_no_change_of_the_inputs():
    values = torch.ones(40, requires_grad=True)
    rewards, mask, cu = torch.ones(40), torch.arange(40) % 5 != 2, torch.tensor([0, 17, 40])
    advantages, returns = gae(rewards, values, mask, cu, 1.0, 0.95)
    assert not advantages.requires_grad and not returns.requires_grad
    assert bool((rewards == 1).all()) and bool((values == 1).all()) and int(mask.sum()) == 32


@quick
@given(ragged(), gammas)
def test_rewards_to_go_are_discounted_sums_over_trainable_tokens(batch, gamma):
    rewards = batch.column("rewards")
    expected = naive_gae(batch, rewards, torch.zeros(batch.total), gamma, 1.0)
    assert_close(rewards_to_go(rewards, batch.mask, batch.cu, gamma), expected, 2e-5)
