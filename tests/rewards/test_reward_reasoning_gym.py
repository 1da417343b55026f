"""Rewards of reasoning_gym tasks: extraction, the task's own scorer, malformed answers, bad rows."""

import pytest

from megappo.errors import UserError
from megappo.rewards.base import Outcome, RewardSample
from megappo.rewards.pool import PoolReward
from megappo.rewards.reasoning_gym import ReasoningGymScorer, dump_json, extract_answer

library = pytest.importorskip("reasoning_gym")


def sample(task, response, index=0, **config):
    entry = library.create_dataset(task, seed=1, size=index + 1, **config)[index]
    info = {"task": task, "config": dump_json(config), "entry": dump_json(entry)}
    response = response.replace("{answer}", entry["answer"])
    return RewardSample(5, f"reasoning_gym/{task}", entry["question"], response, entry["answer"], info)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (" 7\n", "7"),
        ("think #### 5 #### 7 ", "7"),
        ("####\n1 2\n3 4\n", "1 2\n3 4"),
        ("a <answer> 7 </answer> b", "7"),
        ("<answer>6</answer> <answer>7\n8</answer> #### 9", "7\n8"),
        ("<answer>7", "<answer>7"),
        ("", ""),
    ],
)
def test_the_answer_is_tagged_or_marked_or_everything(response, answer):
    assert extract_answer(response) == answer


def test_the_tasks_own_scorer_decides():
    score = ReasoningGymScorer()
    right = [sample("basic_arithmetic", "#### {answer}", i, max_terms=3) for i in range(3)]
    assert [score(s)["score"] for s in right] == [1.0] * 3
    assert score(sample("basic_arithmetic", "#### x"))["score"] == 0.0
    # this scorer accepts any factorisation, also one that is not spelled like the stored answer
    factors = sample("prime_factorization", "{answer}")
    reordered = " × ".join(reversed(factors.response_text.split(" × ")))
    assert score(RewardSample(0, "", "", reordered, None, factors.extra_info))["score"] == 1.0


def test_an_answer_that_trips_the_scorer_counts_as_wrong():
    result = ReasoningGymScorer()(sample("prime_factorization", "many"))
    assert result == {"score": 0.0, "unparsable": 1.0}


def test_an_entry_that_trips_the_scorer_is_an_error():
    bad = sample("prime_factorization", "{answer}")
    info = {**bad.extra_info, "entry": '{"question": "q", "answer": "many"}'}
    with pytest.raises(ValueError, match="many"):
        ReasoningGymScorer()(RewardSample(0, "", "", "2 × 2", None, info))


def test_rows_of_other_data_are_refused_with_the_way_to_make_them():
    with pytest.raises(UserError, match=r"has no 'task'.*prepare"):
        ReasoningGymScorer()(RewardSample(0, "gsm8k", "", "x"))


def test_it_runs_in_the_reward_process():
    reward = PoolReward("reasoning_gym", "reasoning_gym", timeout_s=60)
    try:
        samples = [sample("basic_arithmetic", "{answer}"), sample("prime_factorization", "many")]
        assert reward.outcomes(samples) == [Outcome(1.0, {"unparsable": 0.0}), Outcome(0.0, {"unparsable": 1.0})]
        with pytest.raises(UserError, match=r"sample 0 .*extra_info has no 'task'"):
            reward.score([RewardSample(0, "gsm8k", "", "x")])
    finally:
        reward.close()
