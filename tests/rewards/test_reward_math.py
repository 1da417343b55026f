"""Mathematical answers, compared by math-verify."""

import pytest

from megappo.config.schema import RewardConfig
from megappo.errors import UserError
from megappo.rewards.base import RewardSample
from megappo.rewards.combine import build_reward

pytest.importorskip("math_verify", reason="the extra `math` is not installed")

from megappo.rewards.math import MathScorer


def sample(truth, response):
    return RewardSample(0, "math", "", response, truth)


@pytest.mark.parametrize(
    ("truth", "response", "score"),
    [
        ("1/2", "the answer is \\boxed{0.5}", 1.0),
        ("\\frac{1}{2}", "so it is $\\frac12$", 1.0),
        ("42", "#### 42", 1.0),
        (42, "it is 42.", 1.0),
        ("$\\sqrt{2}$", "\\boxed{\\sqrt 2}", 1.0),
        ("x+1", "\\boxed{1+x}", 1.0),
        ("1,234", "\\boxed{1234}", 1.0),
        ("42", "43", 0.0),
    ],
)
def test_answers_are_compared_by_meaning(truth, response, score):
    assert MathScorer()(sample(truth, response)) == {"score": score, "unparsable": 0.0}


@pytest.mark.parametrize("response", ["", "I do not know", "\\boxed{"])
def test_a_response_without_an_answer_scores_zero_and_is_counted(response):
    assert MathScorer()(sample("3", response)) == {"score": 0.0, "unparsable": 1.0}


@pytest.mark.parametrize("truth", ["", " ", None])
def test_a_ground_truth_that_is_missing_is_the_datas_fault(truth):
    with pytest.raises(UserError, match="holds no answer: fix reward_model"):
        MathScorer()(sample(truth, "\\boxed{1}"))


def test_it_runs_in_reward_processes():
    with build_reward([RewardConfig(type="math", kwargs={"strict": True})]) as reward:
        assert reward.score([sample("0.5", "\\boxed{1/2}"), sample("1", "2")]) == [1.0, 0.0]
