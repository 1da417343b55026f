import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import assert_close, from_rows, quick, ragged

from megappo.algorithms.advantages import broadcast_to_tokens, group_advantages

groups = st.lists(st.tuples(st.integers(-2, 3), st.floats(-5, 5, width=32)), max_size=12)


def naive(pairs, kind, norm_by_std=True):
    result = []
    for i, (group, score) in enumerate(pairs):
        members = [s for g, s in pairs if g == group]
        others = [s for j, (g, s) in enumerate(pairs) if g == group and j != i]
        if not others:
            result.append(0.0)
        elif kind == "rloo":
            result.append(score - statistics.fmean(others))
        else:
            centred = score - statistics.fmean(members)
            scaled = kind == "grpo" and norm_by_std
            result.append(centred / (statistics.stdev(members) + 1e-6) if scaled else centred)
    return torch.tensor(result, dtype=torch.float64)


@quick
@given(
    groups,
    st.sampled_from([("grpo", True), ("grpo", False), ("rloo", True), ("reinforce_plus_plus_baseline", True)]),
)
def test_equals_the_definition_for_interleaved_groups(pairs, kind_and_norm):
    kind, norm = kind_and_norm
    scores = torch.tensor([s for _, s in pairs])
    ids = torch.tensor([g for g, _ in pairs], dtype=torch.int64)
    actual = group_advantages(scores, ids, kind, norm_by_std=norm)
    assert actual.dtype == torch.float32
    assert_close(actual, naive(pairs, kind, norm), 1e-4)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_has_no_advantage(kind):
    assert group_advantages(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([7, 9, 9]), kind)[0] == 0


def test_equal_scores_have_no_advantage_however_rounding_falls():
    advantages = group_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64), "grpo")
    assert float(advantages.abs().max()) < 1e-6


def test_remax_subtracts_the_greedy_score():
    scores, ids = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1])
    advantages = group_advantages(scores, ids, "remax", baseline_scores=torch.tensor([1.0, 1.0, 0.0]))
    assert advantages.tolist() == [0.0, -1.0, 1.0]
    with pytest.raises(ValueError, match="baseline_scores"):
        group_advantages(scores, ids, "remax")


def test_an_unknown_kind_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpro'.*grpo, rloo"):
        group_advantages(torch.zeros(1), torch.zeros(1, dtype=torch.int64), "gpro")


@quick
@given(ragged())
def test_broadcast_reaches_trainable_tokens_only(batch):
    per_sequence = batch.per_sequence("a")
    expected = torch.zeros(batch.total)
    for i, index in batch.rows():
        expected[index] = per_sequence[i]
    assert torch.equal(broadcast_to_tokens(per_sequence, batch.mask, batch.cu), expected)


def test_broadcast_keeps_a_masked_out_sequences_nan_out():
    batch = from_rows([[False, False], [True]])
    spread = broadcast_to_tokens(torch.tensor([float("nan"), 2.0]), batch.mask, batch.cu)
    assert spread.tolist() == [0.0, 0.0, 2.0]
