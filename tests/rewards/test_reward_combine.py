"""The weighted sum: routing, clipping, standardising, policies, statistics of all ranks, state."""

import json
import math
import sys

import numpy as np
import pytest

from megappo.config.schema import RewardConfig
from megappo.errors import UserError
from megappo.rewards.base import Outcome, Reward, RewardSample, failed
from megappo.rewards.combine import CombinedReward, build_reward
from megappo.rewards.component import Component


class Fake:
    """Scores are the responses as numbers; "?" cannot be scored."""

    def __init__(self, name="fake", extras=None):
        self.name, self.extras, self.asked = name, extras or {}, []

    def score(self, samples):
        return [outcome.score for outcome in self.outcomes(samples, True)]

    def outcomes(self, samples, fail_fast=False):
        self.asked.append([sample.sample_id for sample in samples])
        found = [
            failed(self.name, s, "no", timed_out=s.response_text == "late")
            if s.response_text in ("?", "late")
            else Outcome(float(s.response_text), dict(self.extras))
            for s in samples
        ]
        for outcome in found:
            if fail_fast and outcome.error:
                raise UserError(outcome.error)
        return found


def samples(*responses, source="sums"):
    return [RewardSample(i, source, "q", str(response), "42") for i, response in enumerate(responses)]


def component(reward=None, name=None, **settings):
    reward = reward or Fake()
    return Component(name or reward.name, reward, **settings)


def absorb(reward, *batches, counted=None):
    return reward.absorb([reward.tally(reward.measure(batch), counted) for batch in batches])


# --- the sum


def test_the_score_is_the_weighted_sum():
    reward = CombinedReward([component(Fake("a"), weight=2.0), component(Fake("b"), weight=-0.5)])
    assert isinstance(reward, Reward)
    assert reward.score(samples(1, 0.5)) == [1.5, 0.75]
    assert reward.score([]) == []


def test_a_component_scores_only_the_sources_that_it_names():
    math_only, rest = Fake("math"), Fake("rest")
    reward = CombinedReward([component(math_only, sources=["math/*", "gsm8?"]), component(rest, weight=10.0)])
    batch = [
        RewardSample(0, "math/algebra", "", "1"),
        RewardSample(1, "chat", "", "2"),
        RewardSample(2, "gsm8k", "", "3"),
        RewardSample(3, "Math/algebra", "", "4"),
    ]
    assert reward.score(batch) == [11.0, 20.0, 33.0, 40.0]
    assert math_only.asked == [[0, 2]] and rest.asked == [[0, 1, 2, 3]]
    metrics = absorb(reward, batch)
    assert metrics["reward/math/mean"] == 2.0 and metrics["reward/rest/mean"] == 2.5


def test_a_source_without_a_reward_is_named():
    reward = CombinedReward([component(sources=["math/*"])])
    with pytest.raises(UserError, match=r"sample 0 .*no reward covers data_source 'chat'"):
        reward.measure(samples(1, source="chat"))
    reward.check_sources(["math/a", "math/b"])
    with pytest.raises(UserError, match="no reward covers data_source 'chat'"):
        reward.check_sources(["math/a", "chat"])


def test_scores_are_clipped_before_they_are_weighted():
    reward = CombinedReward([component(clip=(-2.0, 2.0), weight=3.0)])
    assert reward.score(samples(-5, 1, 9)) == [-6.0, 3.0, 6.0]
    metrics = absorb(reward, samples(-5, 1, 9))
    assert metrics["reward/fake/clip_share"] == pytest.approx(2 / 3)
    assert metrics["reward/fake/mean"] == pytest.approx(1 / 3)


def test_a_sum_that_overflows_is_refused():
    reward = CombinedReward([component(Fake("a")), component(Fake("b"))])
    with pytest.raises(UserError, match=r"reward 'combined': sample 0 .*returned inf"):
        reward.score(samples(1e308))


def test_scores_may_come_from_the_caller():
    reward = CombinedReward([component(weight=1.0), Component("model", None, weight=0.5, sources=["chat"])])
    batch = [RewardSample(0, "chat", "", "1"), RewardSample(1, "math", "", "1")]
    assert reward.measure(batch, given={"model": [4.0, math.nan]}).scores.tolist() == [3.0, 1.0]
    with pytest.raises(UserError, match=r"reward 'model': sample 0 .*returned nan"):
        reward.measure(batch, given={"model": [math.nan, 0.0]})
    with pytest.raises(ValueError, match="needs a given score for each of 2 samples"):
        reward.measure(batch)


# --- samples that cannot be scored


def test_by_default_a_sample_that_cannot_be_scored_ends_the_run():
    with pytest.raises(UserError, match=r"reward 'fake': sample 1 .*no"):
        CombinedReward([component()]).measure(samples(1, "?"))


def test_drop_marks_the_sample_and_leaves_its_score_at_zero():
    reward = CombinedReward([component(Fake("a"), on_error="drop", clip=(0.5, 2.0)), component(Constant(7.0))])
    scored = reward.measure(samples(1, "?", "late"))
    assert scored.dropped.tolist() == [False, True, True]
    assert scored.scores.tolist() == [8.0, 0.0, 0.0] and reward.rewards(scored).tolist() == [8.0, 0.0, 0.0]
    metrics = reward.absorb([reward.tally(scored)])
    assert metrics["reward/a/mean"] == 1.0 and metrics["reward/dropped"] == 2.0
    counts = [metrics[f"reward/a/{name}"] for name in ("timeouts", "errors", "dropped", "failed_share")]
    assert counts == [1.0, 1.0, 2.0, pytest.approx(2 / 3)]
    assert metrics["reward/constant/dropped"] == metrics["reward/constant/errors"] == 0.0


def test_neutral_gives_a_score_that_does_not_enter_the_statistics():
    reward = CombinedReward([component(on_error="neutral", neutral_score=0.25, standardize=True, weight=2.0)])
    scored = reward.measure(samples(1, "?", 3))
    assert scored.scores.tolist() == [2.0, 0.5, 6.0] and not scored.dropped.any()
    metrics = reward.absorb([reward.tally(scored)])
    assert reward.running["fake"].mean == 2.0 and reward.running["fake"].count == 2
    assert metrics["reward/fake/mean"] == 2.0 and metrics["reward/fake/errors"] == 1.0
    assert metrics["reward/fake/dropped"] == 0.0


class Constant:
    name = "constant"

    def __init__(self, value):
        self.value = value

    def score(self, samples):
        if any(s.response_text == "!" for s in samples):
            raise UserError(f"reward 'constant': {next(s for s in samples if s.response_text == '!')}: no")
        return [self.value] * len(samples)


def test_a_reward_that_scores_all_or_nothing_loses_only_the_bad_sample():
    reward = CombinedReward([component(Constant(1.0), on_error="drop")])
    assert reward.measure(samples(1, "!", 2)).dropped.tolist() == [False, True, False]
    wrong = CombinedReward([component(Constant(math.nan), on_error="neutral", neutral_score=5.0)])
    assert wrong.score(samples(1, 2)) == [5.0, 5.0]


def test_samples_that_do_not_count_are_in_no_statistic():
    reward = CombinedReward([component(Fake(extras={"len": 4.0}), standardize=True, on_error="drop")])
    metrics = absorb(reward, samples(1, 100, "?"), counted=[True, False, False])
    assert metrics["reward/fake/mean"] == 1.0 and metrics["reward/fake/len/mean"] == 4.0
    assert metrics["reward/fake/errors"] == metrics["reward/dropped"] == 0.0
    assert reward.running["fake"].count == 1


# --- statistics of all ranks


def test_standardised_rewards_use_the_scores_of_all_ranks_and_all_iterations():
    rng = np.random.default_rng(0)
    reward = CombinedReward([component(standardize=True, weight=2.0)])
    seen = []
    for _ in range(3):
        scores = rng.normal(3.0, 2.0, 10)
        seen += scores.tolist()
        parts = [samples(*scores[:3]), samples(), samples(*scores[3:])]
        metrics = absorb(reward, *parts)
        expected = 2.0 * (scores[:3] - np.mean(seen)) / np.std(seen, ddof=1)
        scored = reward.measure(parts[0])
        assert reward.rewards(scored) == pytest.approx(expected)
        assert scored.scores == pytest.approx(2.0 * scores[:3])  # raw: validation and logs
        assert metrics["reward/fake/running_mean"] == pytest.approx(np.mean(seen))
        assert metrics["reward/fake/running_std"] == pytest.approx(np.std(seen, ddof=1))


@pytest.mark.parametrize("scores", [[], [3.0], [3.0, 3.0, 3.0]])
def test_scores_without_spread_standardise_to_zero(scores):
    reward = CombinedReward([component(standardize=True)])
    absorb(reward, samples(*scores))
    assert reward.rewards(reward.measure(samples(*scores))).tolist() == [0.0] * len(scores)


def test_metrics_do_not_depend_on_how_samples_are_spread_and_need_no_common_extras():
    class Odd(Fake):
        def outcomes(self, samples, fail_fast=False):
            return [Outcome(float(s.response_text), {"odd": 1.0} if int(s.response_text) % 2 else {}) for s in samples]

    def run(*parts):
        return absorb(CombinedReward([component(Odd(), standardize=True)]), *(samples(*part) for part in parts))

    whole = run([1, 2, 3, 4, 5])
    assert whole["reward/fake/odd/mean"] == 1.0 and whole["reward/fake/mean"] == 3.0
    assert run([2, 4], [], [1, 3, 5]) == pytest.approx(whole)


def test_validation_changes_no_statistics():
    reward = CombinedReward([component(standardize=True)])
    reward.score(samples(1, 2))
    assert reward.running["fake"].count == 0


def test_the_state_is_json_and_continues_exactly():
    def make():
        return CombinedReward([component(Fake("a"), standardize=True), component(Fake("b"))])

    first, second = make(), make()
    absorb(first, samples(0.1, 0.7, 0.3))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for reward in (first, second):
        absorb(reward, samples(1 / 3, 2.0))
    assert first.state_dict() == second.state_dict()
    make().load_state_dict({"running": {"gone": {"count": 1.0, "mean": 0.0, "squares": 0.0}}})


@pytest.mark.parametrize("damage", [{}, {"mean": math.nan}, {"count": -1.0}, {"squares": None}])
def test_a_damaged_state_is_refused(damage):
    reward = CombinedReward([component(standardize=True)])
    state = {"count": 2.0, "mean": 0.0, "squares": 1.0} | damage if damage else {}
    with pytest.raises(UserError, match="statistics of reward 'fake' are damaged"):
        reward.load_state_dict({"running": {"fake": state}})


# --- from the configuration


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def length(*, solution_str, per=1, **_):\n"
        "    return {'score': len(solution_str) / per, 'letters': len(solution_str)}\n"
        "def boom(**_):\n    raise ValueError('no')\n"
    )
    return path


def test_configured_rewards_score_and_report(user_file):
    settings = [
        RewardConfig(type="gsm8k", weight=2.0),
        RewardConfig(type="function", path=f"{user_file}:length", weight=-0.5, kwargs={"per": 10}, workers=2),
    ]
    with build_reward(settings) as reward:
        batch = samples("#### 42", "#### 4")
        metrics = absorb(reward, batch)
        assert reward.score(batch) == pytest.approx([2 - 0.35, -0.3])
        assert metrics["reward/gsm8k/mean"] == 0.5 and metrics["reward/length/mean"] == pytest.approx(0.65)
        assert metrics["reward/length/letters/mean"] == 6.5
        pool = reward.components["length"].reward
        assert len(pool.pids) == 2
    assert pool.pids == []


def test_an_error_names_component_and_sample(user_file):
    settings = [RewardConfig(type="gsm8k"), RewardConfig(type="function", path=f"{user_file}:boom", name="mine")]
    with build_reward(settings) as reward, pytest.raises(UserError, match=r"reward 'mine': sample 0 .*ValueError: no"):
        reward.score(samples("x"))


def test_components_of_the_same_name_are_numbered(user_file):
    entry = RewardConfig(type="function", path=f"{user_file}:length")
    reward = build_reward([entry, RewardConfig(type="gsm8k"), entry, RewardConfig(type="gsm8k", name="rule")])
    assert list(reward.components) == ["length", "gsm8k", "length#2", "rule"]
    assert [part.reward.name for part in reward.components.values()] == list(reward.components)


def test_start_loads_user_code(user_file):
    user_file.write_text("def length(:\n")
    with pytest.raises(UserError, match="SyntaxError"):
        build_reward([RewardConfig(type="function", path=f"{user_file}:length")]).start()


def test_the_gsm8k_method_is_a_keyword():
    reward = build_reward([RewardConfig(type="gsm8k", kwargs={"method": "flexible"})])
    assert reward.score(samples("it is 42")) == [1.0]


def entry(type_, **values):
    """Settings that the schema would refuse, too."""
    return RewardConfig.model_construct(type=type_, **values)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "rewards: the list is empty"),
        ([entry("gsm8k"), entry("bleu")], r"rewards\[1\].type is 'bleu': use one of gsm8k"),
        ([entry("function")], r"rewards\[0\].path is missing"),
        ([entry("function", path="length")], "is not module:function"),
        ([entry("function", path="no_such.py:fn")], "file not found"),
        ([entry("function", path="a:b", kwargs={"extra_info": 1})], r"kwargs\.extra_info"),
        ([entry("gsm8k", path="a:b")], "path is only for types 'function' and 'model'"),
        ([entry("gsm8k", url="http://a")], "url is only for type 'remote'"),
        ([entry("gsm8k", kwargs={"mode": 1})], r"rewards\[0\].kwargs.mode is unknown.*known: method"),
        ([entry("gsm8k", kwargs={"method": "x"})], "strict, flexible"),
        ([entry("reasoning_gym", kwargs={"a": 1})], r"kwargs.a is unknown.*known: none"),
        ([entry("math", kwargs={"a": 1})], r"kwargs.a is unknown.*known: strict, float_rounding"),
        ([entry("gsm8k", weight=math.nan)], r"rewards\[0\].weight is nan"),
        ([entry("gsm8k", timeout_s=0.0)], r"rewards\[0\].timeout_s is 0.0"),
        ([entry("remote")], r"rewards\[0\].url is missing"),
        ([entry("remote", url="localhost:80")], "is not http://host:port/path"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        build_reward(settings)


@pytest.mark.parametrize(
    ("kind", "module", "extra"), [("reasoning_gym", "reasoning_gym", "reasoning"), ("math", "math_verify", "math")]
)
def test_a_missing_package_names_the_extra(monkeypatch, kind, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"rewards\[0\].*megappo\[{extra}\]"):
        build_reward([RewardConfig(type=kind)])


def test_a_missing_http_client_names_the_extra(monkeypatch):
    for module in ("httpx", "httpx2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"megappo\[remote\]"):
        build_reward([RewardConfig(type="remote", url="http://127.0.0.1:1/")])
