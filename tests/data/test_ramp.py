"""Batches of changing size: positions and the number of iterations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.prompts import PromptSampler
from megappo.data.ramp import batch_start, epoch_of_last, iterations_for_epochs


@pytest.mark.parametrize(("n", "size"), [(10, 3), (12, 4), (7, 7), (9, 5)])
def test_batches_of_one_size_lie_where_the_sampler_has_them(n, size):
    sampler, position = PromptSampler(n, size, seed=3), 0
    for step in range(4 * sampler.steps_per_epoch):
        start = batch_start(position, size, n)
        epoch, indices = sampler.batch(step)
        assert sampler.order(epoch)[start % n : start % n + size] == indices and start // n == epoch
        position = start + size


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(5, 60), st.integers(1, 5), st.integers(1, 4))
def test_a_constant_size_gives_whole_epochs(n, size, epochs):
    assert iterations_for_epochs(lambda total: [size] * total, n, epochs) == epochs * (n // size)


def test_a_growing_size_fills_the_epochs_and_no_more():
    def sizes(total):
        return [4 if i < total / 2 else 8 for i in range(total)]

    total = iterations_for_epochs(sizes, 40, 3)
    assert epoch_of_last(sizes(total), 40) == 2
    assert epoch_of_last(sizes(total + 1), 40) == 3
    assert 40 * 3 // 8 < total < 40 * 3 // 4
