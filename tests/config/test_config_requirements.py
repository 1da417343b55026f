"""Settings that the users' documents name, as experiments load them."""

import pytest

from megappo.config.load import load_config


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ([], 0.2, 0.2),
        (["actor.clip_ratio_high=0.28"], 0.2, 0.28),  # DAPO
        (["actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.3"], 0.2, 0.3),
        (["actor.cliprange=0.1", "actor.cliprange_high=0.3"], 0.1, 0.3),
    ],
)
def test_clip_ranges_of_the_documents(exp, changes, low, high):
    actor = load_config(exp.yaml, changes).actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (low, high)
