"""The order in which prompts are consumed: a pure function of (seed, step)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.prompts import PromptSampler
from megappo.errors import UserError


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 60), batch_size=st.integers(1, 60), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_visits_every_row_at_most_once_and_drops_only_the_tail(n, batch_size, seed, epoch):
    if n < batch_size:
        return
    sampler = PromptSampler(n, batch_size, seed)
    first = epoch * sampler.steps_per_epoch
    batches = [sampler.batch(step) for step in range(first, first + sampler.steps_per_epoch)]
    indices = [index for _, batch in batches for index in batch]
    assert {e for e, _ in batches} == {epoch}
    assert all(len(batch) == batch_size for _, batch in batches)
    assert len(set(indices)) == len(indices) == n - n % batch_size
    assert set(indices) <= set(range(n))


def test_a_step_gives_the_same_batch_whatever_was_asked_before():
    walked = PromptSampler(10, 3, seed=4)
    sequence = [walked.batch(step) for step in range(12)]
    resumed = PromptSampler(10, 3, seed=4)
    assert [resumed.batch(step) for step in reversed(range(12))] == sequence[::-1]


def test_epochs_and_seeds_have_different_orders():
    one, other = PromptSampler(50, 50, seed=1), PromptSampler(50, 50, seed=2)
    orders = [one.batch(0)[1], one.batch(1)[1], other.batch(0)[1]]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_the_order_is_pinned_so_that_old_checkpoints_resume_alike():
    assert PromptSampler(8, 8, seed=1).batch(0) == (0, [5, 7, 2, 1, 6, 3, 0, 4])


def test_without_shuffle_rows_come_in_file_order():
    sampler = PromptSampler(7, 3, seed=1, shuffle=False)
    assert sampler.steps_per_epoch == 2
    assert [sampler.batch(step) for step in range(3)] == [
        (0, [0, 1, 2]),
        (0, [3, 4, 5]),
        (1, [0, 1, 2]),
    ]


def test_too_few_prompts_for_one_batch_are_refused_at_once():
    with pytest.raises(UserError, match=r"3 prompts cannot fill one batch of 4.*data\.train_batch_size"):
        PromptSampler(3, 4, seed=1)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="negative"):
        PromptSampler(3, 1, seed=1).batch(-1)
