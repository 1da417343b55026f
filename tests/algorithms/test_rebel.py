"""REBEL's coefficients against autograd through the pairwise objective as the paper writes it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.algorithms.rebel import rebel_coefficients


def objective(s: torch.Tensor, r: torch.Tensor, groups: list[int], eta: float) -> torch.Tensor:
    """Mean over responses of half the mean square over the pairs of its group, times the group's size."""
    total = s.sum() * 0
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        pairs = list(itertools.combinations(members, 2))
        squares = [((s[i] - s[j]) / eta - (r[i] - r[j])) ** 2 for i, j in pairs]
        if squares:
            total = total + len(members) * sum(squares) / len(pairs) / 2
    return total / len(groups)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=12),
    st.sampled_from([0.5, 1.0, 7.0]),
)
def test_value_and_gradient_are_those_of_the_pairwise_objective(rows, eta):
    groups = [group for group, _, _ in rows]
    s = torch.tensor([x for _, x, _ in rows], dtype=torch.float64, requires_grad=True)
    r = torch.tensor([x for _, _, x in rows], dtype=torch.float64)
    want = objective(s, r, groups, eta)
    (gradient,) = torch.autograd.grad(want, s)
    c, value = rebel_coefficients(s.detach(), r, torch.tensor(groups), eta)
    assert torch.allclose(c / len(rows), gradient, atol=1e-12)
    assert float(value.mean()) == pytest.approx(want.item(), abs=1e-12)


def test_two_responses_give_the_published_loss():
    s, r = torch.tensor([0.3, -0.1]), torch.tensor([1.0, 0.0])
    _, value = rebel_coefficients(s, r, torch.tensor([7, 7]), 2.0)
    assert float(value.mean()) == pytest.approx(0.5 * (0.4 / 2 - 1.0) ** 2)


def test_a_response_alone_teaches_nothing():
    c, value = rebel_coefficients(torch.tensor([2.0]), torch.tensor([5.0]), torch.tensor([0]), 1.0)
    assert c.tolist() == [0.0] and value.tolist() == [0.0]


def test_nothing_gives_nothing():
    c, value = rebel_coefficients(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), 1.0)
    assert len(c) == len(value) == 0


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="eta is 0"):
        rebel_coefficients(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64), 0.0)
