"""The keys of a `rewards` entry."""

import pytest
from pydantic import ValidationError

from megappo.config.schema import RewardConfig


def test_an_entry_needs_no_more_than_its_type():
    entry = RewardConfig(type="gsm8k")
    assert (entry.weight, entry.sources, entry.clip, entry.standardize, entry.on_error) == (
        1.0,
        None,
        None,
        False,
        "fail",
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"clip": (2.0, -2.0)}, "low must be below high"),
        ({"clip": (1.0,)}, "clip"),
        ({"sources": []}, "an empty list applies to nothing"),
        ({"name": "a/b"}, "a word without /"),
        ({"name": ""}, "a word without /"),
        ({"workers": 0}, "greater than or equal to 1"),
        ({"on_error": "ignore"}, "'fail', 'drop' or 'neutral'"),
        ({"neutral_score": float("nan")}, "finite"),
        ({"timeout_s": 0.0}, "greater than 0"),
        ({"batch_size": 0}, "greater than or equal to 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(values, words):
    with pytest.raises(ValidationError, match=words):
        RewardConfig(type="gsm8k", **values)


def test_a_yaml_list_of_two_numbers_is_a_clip_range():
    assert RewardConfig.model_validate({"type": "gsm8k", "clip": [-2, 2]}).clip == (-2.0, 2.0)
