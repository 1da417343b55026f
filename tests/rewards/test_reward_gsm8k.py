"""The GSM8K rule: which number counts, and when it equals the ground truth."""

import pytest

from megappo.errors import UserError
from megappo.rewards.base import RewardSample
from megappo.rewards.gsm8k import Gsm8kReward


def score(response, truth="42", method="strict"):
    return Gsm8kReward(method).score([RewardSample(0, "openai/gsm8k", "", response, truth)])[0]


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("6*7=42\n#### 42", "42"),
        ("####42", "42"),
        ("#### 41 no, #### 42", "42"),
        ("#### The answer is 42.", "42"),
        ("#### 6 * 7 = 42", "42"),
        ("#### $42.00", "42"),
        ("#### 1,234,567", "1234567"),
        ("#### 1234", "1,234"),
        ("#### -42", "-42"),
        ("#### \N{MINUS SIGN}42", "-42"),
        ("#### -$42", "-42"),
        ("#### $-42", "-42"),
        ("#### .5", "0.5"),
        ("#### 52-10-42", "42"),  # a dash between numbers is no sign
        ("#### **42**", "42"),
        ("#### \\boxed{42}", "42"),
        ("#### 42%", "42"),
        ("#### 42", "#### 42"),
        ("#### 42", 42),
        ("#### 42.0", 42.0),
        ("#### 1,2,42", "42"),
        ("#### 12345678901234567891", "12345678901234567891"),  # exact, not as floats
    ],
)
def test_right_answers_score_one(response, truth):
    assert score(response, truth) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "42",
        "The answer is 42.",
        "####",
        "#### forty-two",
        "#### 43",
        "#### 42 #### 43",
        "#### 42 or 43",
        "#### 42 ####",
        "#### 4 2",
        "#### -42",
        "### 42",
        "#### 42.5",
    ],
)
def test_wrong_or_unmarked_answers_score_zero(response):
    assert score(response) == 0.0


def test_large_numbers_that_agree_as_floats_only_score_zero():
    assert score("#### 12345678901234567890", "12345678901234567891") == 0.0


def test_flexible_takes_the_last_number_where_the_mark_gives_none():
    assert score("so it is 42.", method="flexible") == 1.0
    assert score("it is 42. ####", method="flexible") == 1.0
    assert score("42 then #### 43", method="flexible") == 0.0
    assert score("none", method="flexible") == 0.0


def test_scores_come_in_the_order_of_the_samples():
    samples = [RewardSample(i, "g", "", f"#### {i}", "1") for i in range(3)]
    assert Gsm8kReward().score(samples) == [0.0, 1.0, 0.0]
    assert Gsm8kReward().score([]) == []


@pytest.mark.parametrize("truth", [None, "", "n/a"])
def test_a_ground_truth_without_a_number_is_an_error_that_names_the_sample(truth):
    with pytest.raises(UserError, match=r"sample 0 \(data_source 'openai/gsm8k'.*ground truth"):
        score("#### 42", truth)


def test_an_unknown_method_is_refused():
    with pytest.raises(UserError, match="strict, flexible"):
        Gsm8kReward("loose")


def test_a_long_response_takes_linear_work():
    assert score("1,2,3-" * 200_000 + "#### " + "42 " * 100_000) == 1.0
