import pytest
import torch
from ragged import assert_close

from megappo.algorithms.scan import BLOCK, discounted_sums


def serial(x, decay):
    result, running = torch.zeros(len(x), dtype=torch.float64), 0.0
    for t in range(len(x) - 1, -1, -1):
        running = float(x[t]) + float(decay[t]) * running
        result[t] = running
    return result


@pytest.mark.parametrize("total", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, BLOCK**2 + BLOCK + 5, 40_000])
def test_equals_the_serial_recurrence_at_every_depth(total):
    generator = torch.Generator().manual_seed(total)
    x = torch.randn(total, generator=generator)
    decay = 0.9 + 0.1 * torch.rand(total, generator=generator)
    decay[torch.rand(total, generator=generator) < 0.01] = 0.0
    assert_close(discounted_sums(x, decay), serial(x, decay), 2e-5)


def test_a_zero_decay_separates_what_lies_on_its_sides():
    x = torch.arange(100.0)
    decay = torch.ones(100)
    decay[49] = 0.0
    left, right = x[:50], x[50:]
    result = discounted_sums(x, decay)
    assert_close(result[:50], left.flip(0).cumsum(0).flip(0))
    assert_close(result[50:], right.flip(0).cumsum(0).flip(0))


def test_inputs_are_left_alone():
    x, decay = torch.ones(100), torch.ones(100)
    discounted_sums(x, decay)
    assert bool((x == 1).all()) and bool((decay == 1).all())
