"""reasoning_gym: generated rows that can be scored, disjoint splits, supervised pairs, refused options."""

import json
import sys

import pytest

from megappo.data.prepare import reasoning_gym as prepare
from megappo.data.prompts import read_rows
from megappo.errors import UserError
from megappo.rewards.base import RewardSample
from megappo.rewards.reasoning_gym import ReasoningGymScorer, dump_json, load_json

pytest.importorskip("reasoning_gym")

SUMS = ["--config", "max_terms=2", "--config", "max_digits=1", "--config", 'operators=["+"]']
SUMS += ["--config", "allow_parentheses=false", "--config", "allow_negation=false"]


def run(out, *options):
    prepare.main(["--task", "basic_arithmetic", "--out", str(out), "--train-size", "20", "--test-size", "5", *options])
    return read_rows(out / "train.parquet"), read_rows(out / "test.parquet")


def refused(out, *options) -> str:
    with pytest.raises(UserError) as caught:
        run(out, *options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def question(row):
    return json.loads(row["extra_info"]["entry"])["question"]


def test_correct_answers_of_written_rows_score_one(tmp_path):
    train, test = run(tmp_path)
    score = ReasoningGymScorer()
    assert (len(train), len(test)) == (20, 5)
    for row in train + test:
        truth = row["reward_model"]["ground_truth"]
        for response, expected in ((f"so\n#### {truth}", 1.0), ("#### none", 0.0)):
            sample = RewardSample(0, row["data_source"], "", response, truth, row["extra_info"])
            assert score(sample)["score"] == expected
    assert train[0]["data_source"] == "reasoning_gym/basic_arithmetic"
    (message,) = train[0]["prompt"]
    assert message["content"].startswith(question(train[0])) and "after ####" in message["content"]


def test_no_question_is_in_both_splits_or_twice(tmp_path, capsys):
    # there are at most 100 sums of two digits: repetitions are certain
    train, test = run(tmp_path, *SUMS, "--train-size", "60")
    questions = [question(row) for row in train + test]
    assert len(set(questions)) == len(questions) == 65
    assert "(0 repeated" not in capsys.readouterr().out


def test_the_test_set_does_not_depend_on_the_size_of_the_training_set(tmp_path):
    _, small = run(tmp_path / "a")
    _, large = run(tmp_path / "b", "--train-size", "40")
    assert [question(row) for row in small] == [question(row) for row in large]


def test_the_seed_decides_the_rows(tmp_path):
    first, again, other = (run(tmp_path / str(i), "--seed", s) for i, s in enumerate("334"))
    assert first == again != other


def test_more_questions_than_the_task_has_are_refused(tmp_path):
    message = refused(tmp_path, *SUMS, "--train-size", "300")
    assert "different questions" in message and "305 are needed" in message
    assert not list(tmp_path.iterdir())


def test_supervised_pairs_are_the_training_questions_with_their_answers(tmp_path):
    train, _ = run(tmp_path, "--sft-out", str(tmp_path / "sft.parquet"))
    pairs = read_rows(tmp_path / "sft.parquet")
    assert [pair["prompt"] for pair in pairs] == [row["prompt"] for row in train]
    assert [pair["response"] for pair in pairs] == [f"#### {r['reward_model']['ground_truth']}" for r in train]


def test_plain_prompts_and_templates(tmp_path):
    options = ["--plain", "--template", "{question}=", "--sft-template", " {answer}"]
    train, _ = run(tmp_path, *options, "--sft-out", str(tmp_path / "sft.parquet"))
    assert train[0]["prompt"] == question(train[0]) + "="
    assert read_rows(tmp_path / "sft.parquet")[0]["response"] == " " + train[0]["reward_model"]["ground_truth"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "no_such_task"], "unknown to reasoning_gym; it has:"),
        (["--config", "max_terms"], "write key=value"),
        (["--config", "maxterms=3"], "no such key (known:"),
        (["--config", "seed=3"], "no such key"),
        (["--config", "min_terms=9"], "refused by the task: max_terms"),
        (["--config", "min_terms=two"], "refused by the task"),
        (["--train-size", "0"], "at least 1"),
        (["--template", "Q"], "has no {question}"),
        (["--sft-template", "A"], "has no {answer}"),
        (["--sft-out", "x.jsonl"], "name a .parquet file"),
        (["--task", "graph_color", "--sft-out", "x.parquet"], "leave --sft-out away"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, words):
    assert words in refused(tmp_path, *options)
    assert not list(tmp_path.iterdir())


def test_supervised_pairs_do_not_overwrite_the_training_rows(tmp_path):
    assert "also written by --out" in refused(tmp_path, "--sft-out", str(tmp_path / "train.parquet"))


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "megappo[reasoning]" in refused(tmp_path)


def test_json_keeps_tuples_sets_and_keys_that_are_not_strings():
    value = {"a": [(1, 2), {"b": (3,)}], "s": {(1, 2), (0, 5)}, "k": {1: "x", (2, 3): None}, "p": {"q": 1.5}}
    text = dump_json(value)
    assert load_json(text) == value
    assert isinstance(json.loads(text), dict)


def test_tasks_whose_scorer_needs_tuples_survive_storing():
    pytest.importorskip("numpy")
    entries, _ = prepare.distinct_entries("rearc", {}, seed=1, count=1)
    row = prepare.make_row("rearc", {}, entries[0], "train", 0, "{question}", True)
    sample = RewardSample(0, "rearc", "", entries[0]["answer"], None, row["extra_info"])
    assert ReasoningGymScorer()(sample)["score"] == 1.0
