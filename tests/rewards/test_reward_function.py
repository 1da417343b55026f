"""User functions: how they are found, how they are called, and what they may return."""

import math
import sys

import pytest

from megappo.errors import UserError
from megappo.rewards.base import RewardSample, check_scores, to_score
from megappo.rewards.function import FunctionScorer, check_kwargs, load_function, split_path

SAMPLE = RewardSample(3, "sums", "1+1=", "2", "2", {"index": 7})


@pytest.fixture(autouse=True)
def own_sys_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(tmp_path, text, name="my_reward.py"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_it_is_called_like_verls_compute_score(tmp_path):
    path = write(tmp_path, "def fn(**arguments):\n    return arguments\n")
    assert FunctionScorer(f"{path}:fn", {"bonus": 2})(SAMPLE) == {
        "data_source": "sums",
        "solution_str": "2",
        "ground_truth": "2",
        "extra_info": {"index": 7},
        "bonus": 2,
    }


def test_a_module_is_found_by_import_path_also_in_the_working_directory(tmp_path, monkeypatch):
    write(tmp_path, "def fn(): return 1\n", "reward_module_for_test.py")
    monkeypatch.chdir(tmp_path)
    assert load_function("reward_module_for_test:fn")() == 1


def test_a_file_may_import_its_neighbours_and_define_dataclasses(tmp_path):
    write(tmp_path, "VALUE = 5\n", "neighbour_for_test.py")
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport neighbour_for_test\n"
        "@dataclass\nclass A:\n    x: int\ndef fn(): return A(neighbour_for_test.VALUE).x\n"
    )
    assert load_function(f"{write(tmp_path, text)}:fn")() == 5


@pytest.mark.parametrize("path", ["fn", ":fn", "mod:", "mod:a-b", "a.py:", "mod.fn"])
def test_a_path_that_is_not_module_and_function_is_refused(path):
    with pytest.raises(UserError, match=r"is not module:function.*file\.py:fn"):
        split_path(path)


def test_a_missing_file_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match=r"file not found: /.*no\.py"):
        split_path(f"{tmp_path}/no.py:fn")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other(): pass\n", "has no function 'fn'"),
        ("fn = 3\n", "has no function 'fn'"),
        ("def fn(:\n", "SyntaxError"),
        ("import no_such_module_xyz\n", "No module named 'no_such_module_xyz'"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("async def fn(**k): return 1\n", "async function"),
    ],
)
def test_a_file_that_cannot_give_the_function_is_refused(tmp_path, text, words):
    with pytest.raises(UserError) as caught:
        load_function(f"{write(tmp_path, text)}:fn")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_arguments_that_every_call_passes_cannot_be_configured():
    with pytest.raises(UserError, match=r"kwargs\.ground_truth"):
        check_kwargs("a:b", {"ground_truth": 1})


class Float32:
    def __float__(self):
        return 0.25


@pytest.mark.parametrize(("value", "score"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (Float32(), 0.25)])
def test_numbers_are_scores(value, score):
    assert to_score(value) == (score, {})


def test_a_mapping_gives_the_score_and_its_other_finite_numbers():
    value = {"score": 1, "acc": True, "length": 5, "pred": "42", "nan": math.nan, "none": None}
    assert to_score(value) == (1.0, {"acc": 1.0, "length": 5.0})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "returned None, not a number"),
        ("1.0", "returned str, not a number"),
        ([1.0], "returned list, not a number"),
        (1j, "returned complex, not a number"),
        (math.nan, "returned nan, not a finite number"),
        (-math.inf, "returned -inf, not a finite number"),
        ({"acc": 1}, r"without 'score' \(keys: acc\)"),
        ({"score": None}, "returned None"),
        ({"score": math.inf}, "returned inf"),
    ],
)
def test_anything_else_is_refused_in_words(value, words):
    with pytest.raises(ValueError, match=words):
        to_score(value)


def test_scores_of_any_reward_are_checked_for_number_and_value():
    with pytest.raises(UserError, match="2 scores for 1 samples"):
        check_scores("r", [SAMPLE], [1.0, 2.0])
    with pytest.raises(UserError, match=r"reward 'r': sample 3 .*returned nan"):
        check_scores("r", [SAMPLE], [math.nan])


def test_a_sample_in_an_error_message_is_short_and_on_one_line():
    text = str(RewardSample("a", "d", "", "x\n" + "y" * 1000))
    assert text.startswith("sample a (data_source 'd', response 'x\\nyyy") and len(text) < 120
    assert "\n" not in text
