"""Building rewards from the configuration: weighted sums, names, metrics, refused settings."""

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from megappo.errors import UserError
from megappo.rewards.base import Reward, RewardSample
from megappo.rewards.combine import CombinedReward, build_reward


@dataclass
class Settings:
    type: str
    path: str | None = None
    weight: float = 1.0
    timeout_s: float = 60.0
    kwargs: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(*, solution_str, per=1, **_):\n"
        "    return {'score': len(solution_str) / per, 'letters': len(solution_str)}\n"
        "def boom(**_):\n    raise ValueError('no')\n"
    )
    return path


def samples(*responses):
    return [RewardSample(i, "gsm8k", "q", response, "42") for i, response in enumerate(responses)]


def test_the_score_is_the_weighted_sum_and_components_stay_available(user_file):
    settings = [
        Settings("gsm8k", weight=2.0),
        Settings("function", f"{user_file}:length", weight=-0.5, kwargs={"per": 10}),
    ]
    with build_reward(settings) as reward:
        assert isinstance(reward, Reward)
        assert reward.score(samples("#### 42", "#### 4")) == pytest.approx([2 - 0.35, -0.3])
        assert reward.components == {"gsm8k": [1.0, 0.0], "length": [0.7, 0.6]}
        assert reward.metrics() == pytest.approx(
            {"reward/gsm8k/mean": 0.5, "reward/length/mean": 0.65, "reward/length/letters/mean": 6.5}
        )
        pid = reward.rewards[1].pid
        reward.score(samples("x"))
        assert reward.rewards[1].pid == pid and reward.components["gsm8k"] == [0.0]
    assert reward.rewards[1].pid is None


def test_no_samples_give_no_scores_and_start_nothing(user_file):
    reward = build_reward([Settings("gsm8k"), Settings("function", f"{user_file}:length")])
    assert reward.score([]) == [] and reward.metrics() == {}
    assert reward.rewards[1].pid is None


def test_components_of_the_same_name_are_numbered(user_file):
    path = f"{user_file}:length"
    reward = build_reward([Settings("function", path), Settings("gsm8k"), Settings("function", path)])
    assert [part.name for part in reward.rewards] == ["length", "gsm8k", "length#2"]


def test_start_loads_user_code(user_file):
    user_file.write_text("def length(:\n")
    with pytest.raises(UserError, match="SyntaxError"):
        build_reward([Settings("function", f"{user_file}:length")]).start()


def test_an_error_names_component_and_sample(user_file):
    reward = build_reward([Settings("gsm8k"), Settings("function", f"{user_file}:boom")])
    with reward, pytest.raises(UserError, match=r"reward 'boom': sample 0 .*ValueError: no"):
        reward.score(samples("x"))


def test_a_sum_that_overflows_is_refused():
    class Huge:
        name = "huge"

        def score(self, samples):
            return [1e308] * len(samples)

    with pytest.raises(UserError, match=r"reward 'combined': sample 0 .*returned inf"):
        CombinedReward([Huge(), Huge()], [1.0, 1.0]).score(samples("x"))


def test_the_gsm8k_method_is_a_keyword():
    reward = build_reward([Settings("gsm8k", kwargs={"method": "flexible"})])
    assert reward.score(samples("it is 42")) == [1.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "rewards: the list is empty"),
        ([Settings("gsm8k"), Settings("bleu")], r"rewards\[1\].type is 'bleu': use one of gsm8k"),
        ([Settings("function")], r"rewards\[0\].path is missing"),
        ([Settings("function", "length")], "is not module:function"),
        ([Settings("function", "no_such.py:fn")], "file not found"),
        ([Settings("function", "a:b", kwargs={"extra_info": 1})], r"kwargs\.extra_info"),
        ([Settings("gsm8k", "a:b")], "path is only for type 'function'"),
        ([Settings("gsm8k", kwargs={"mode": 1})], r"rewards\[0\].kwargs.mode is unknown.*known: method"),
        ([Settings("gsm8k", kwargs={"method": "x"})], "strict, flexible"),
        ([Settings("reasoning_gym", kwargs={"a": 1})], r"kwargs.a is unknown.*known: none"),
        ([Settings("gsm8k", weight=math.nan)], r"rewards\[0\].weight is nan"),
        ([Settings("gsm8k", timeout_s=0.0)], r"rewards\[0\].timeout_s is 0.0"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        build_reward(settings)


def test_a_missing_reasoning_gym_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"rewards\[0\].*megappo\[reasoning\]"):
        build_reward([Settings("reasoning_gym")])
