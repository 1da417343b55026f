"""The Bradley-Terry loss and its calibration, against their formulas."""

import math

import pytest
import torch

from megappo.algorithms.preference import bradley_terry, calibration_error, preferred

CHOSEN = torch.tensor([2.0, -1.0, 0.5, 0.0])
REJECTED = torch.tensor([1.0, 1.5, 0.5, -3.0])


@pytest.mark.parametrize(("margin", "center"), [(0.0, 0.0), (0.7, 0.0), (0.0, 0.01), (-0.2, 0.5)])
def test_the_loss_is_its_formula(margin, center):
    got = bradley_terry(CHOSEN, REJECTED, margin, center).tolist()
    for value, c, r in zip(got, CHOSEN.tolist(), REJECTED.tolist(), strict=True):
        assert value == pytest.approx(math.log1p(math.exp(-(c - r - margin))) + center * (c + r) ** 2, rel=1e-6)


def test_each_pair_may_have_its_own_margin():
    margins = torch.tensor([0.0, 1.0, 2.0, 3.0])
    got = bradley_terry(CHOSEN, REJECTED, margins)
    assert torch.equal(
        got, torch.stack([bradley_terry(c, r, m) for c, r, m in zip(CHOSEN, REJECTED, margins, strict=True)])
    )


def test_huge_gaps_stay_finite():
    far = torch.tensor([1e4, -1e4])
    loss = bradley_terry(far, -far)
    assert loss.tolist() == [0.0, 2e4]


def test_equal_scores_are_half_right():
    assert preferred(CHOSEN, REJECTED).tolist() == [1.0, 0.0, 0.5, 1.0]


def test_scores_that_mean_what_they_say_are_calibrated():
    g = torch.Generator().manual_seed(0)
    gap = torch.randn(200_000, generator=g, dtype=torch.float64) * 2
    wins = torch.rand(len(gap), generator=g, dtype=torch.float64) < gap.sigmoid()
    chosen = torch.where(wins, gap, -gap)  # the side that won is the chosen one
    assert calibration_error(chosen, torch.zeros_like(chosen)) < 0.01
    assert calibration_error(5 * chosen, torch.zeros_like(chosen)) > 0.1  # too sure


def test_calibration_is_the_weighted_gap_of_the_bins():
    chosen = torch.tensor([1.0, 1.0, -1.0])  # all in one bin: confidence 0.731, right two times of three
    expected = abs(2 / 3 - 1 / (1 + math.exp(-1)))
    assert calibration_error(chosen, torch.zeros(3)) == pytest.approx(expected)
    assert calibration_error(torch.zeros(4), torch.zeros(4)) == 0.0
    assert calibration_error(torch.zeros(0), torch.zeros(0)) == 0.0
