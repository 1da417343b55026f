"""The stable-reward signal."""

import numpy as np
import pytest

from megappo.rewards.signals import stable_signal


@pytest.mark.parametrize(
    ("scores", "stable"),
    [
        ([0.9, 0.8, 1.0, 0.7], 1.0),
        ([1.0], 1.0),
        ([0.5, 0.5], 0.0),  # the mean has to be above
        ([1.0, 1.0, 1.0, 0.0], 0.0),  # spread
        ([0.1, 0.1, 0.1, 0.5], 0.0),
        ([-5.0, 9.0], 0.0),
    ],
)
def test_stable_means_high_narrow_and_not_from_a_few(scores, stable):
    assert stable_signal(np.array(scores)) == {"reward/stable": stable}


def test_no_scores_no_signal():
    assert stable_signal(np.array([])) == {}
