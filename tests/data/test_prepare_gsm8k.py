"""GSM8K: raw copies in both public shapes, verl's layout, no overlap, whole files or none."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megappo
from megappo.data.prepare import files
from megappo.data.prepare.gsm8k import extract_answer, main, prepare
from megappo.data.prompts import read_rows
from megappo.errors import UserError


def row(question, number="42"):
    return {"question": question, "answer": f"First <<6*7=42>>42.\n#### {number}"}


def raw_jsonl(folder, train, test):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def refused(*args) -> str:
    with pytest.raises(UserError) as caught:
        prepare(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_have_verls_layout_and_the_instruction(tmp_path):
    raw = raw_jsonl(tmp_path / "raw", [row("How many?", "1,042")], [row("And now?")])
    assert prepare([raw], tmp_path / "out") == {"train": 1, "test": 1, "overlap": 0, "repeated": 0}
    (train,) = read_rows(tmp_path / "out" / "train.parquet")
    instruction = "Let's think step by step and output the final answer after ####"
    assert train == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How many? {instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1042"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "question": "How many?",
            "answer": row("", "1,042")["answer"],
        },
    }
    (test,) = read_rows(tmp_path / "out" / "test.parquet")
    assert test["extra_info"]["split"] == "test"


def test_plain_prompts_are_strings(tmp_path):
    prepare([raw_jsonl(tmp_path, [row("a")], [row("b")])], tmp_path / "out", True)
    (train,) = read_rows(tmp_path / "out" / "train.parquet")
    assert train["prompt"].startswith("a Let's think")


def test_parquet_in_subfolders_is_found_and_the_socratic_variant_is_not(tmp_path):
    for variant in ("main", "socratic"):
        (tmp_path / "raw" / variant).mkdir(parents=True)
        for split in ("train", "test"):
            path = tmp_path / "raw" / variant / f"{split}-00000-of-00001.parquet"
            pq.write_table(pa.Table.from_pylist([row(f"{variant} {split}")]), path)
    assert prepare([tmp_path / "raw"], tmp_path / "out")["train"] == 1
    (train,) = read_rows(tmp_path / "out" / "train.parquet")
    assert train["extra_info"]["question"] == "main train"


def test_questions_of_the_test_set_leave_the_training_set(tmp_path):
    train = [row("a b"), row("c"), row("c "), row("d\n e")]
    raw = raw_jsonl(tmp_path, train, [row("a  b"), row("d e"), row("f")])
    counts = prepare([raw / "train.jsonl", raw / "test.jsonl"], tmp_path / "out")
    assert counts == {"train": 1, "test": 3, "overlap": 2, "repeated": 1}
    questions = [r["extra_info"]["question"] for r in read_rows(tmp_path / "out" / "train.parquet")]
    assert questions == ["c"]


def test_a_training_set_that_is_the_test_set_is_refused(tmp_path):
    raw = raw_jsonl(tmp_path, [row("a")], [row("a")])
    assert "also in the test set" in refused([raw], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_inputs_are_named(tmp_path):
    assert "not found" in refused([tmp_path / "no"], tmp_path / "out")
    raw = raw_jsonl(tmp_path / "raw", [row("a")], [row("b")])
    assert "no test file" in refused([raw / "train.jsonl"], tmp_path / "out")
    (tmp_path / "latest.jsonl").write_text("{}")
    assert "no train file" in refused([tmp_path / "latest.jsonl"], tmp_path / "out")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"question": "a"}, "no column 'answer'"),
        ({"question": "", "answer": "#### 1"}, "'question' must be a non-empty string"),
        ({"question": "a", "answer": "forty-two"}, "does not end in '#### number'"),
    ],
)
def test_a_bad_raw_row_is_named(tmp_path, bad, words):
    raw = raw_jsonl(tmp_path, [row("a"), bad], [row("b")])
    message = refused([raw], tmp_path / "out")
    assert "train.jsonl" in message and "2" in message and words in message


@pytest.mark.parametrize(
    ("text", "number"), [("#### 5", "5"), ("x #### $1,234", "1234"), ("#### -3.50", "-3.50"), ("####7.", "7")]
)
def test_the_ground_truth_is_the_bare_number(text, number):
    assert extract_answer(text, "here") == number


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    files.write_parquet([{"a": 1}], path)
    before = path.read_bytes()

    def broken(table, out):
        out.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", broken)
    with pytest.raises(UserError, match="No space left on device"):
        files.write_parquet([{"a": 2}], path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    raw = raw_jsonl(tmp_path / "raw", [row("a"), row("b")], [row("b")])
    main(["--raw", str(raw), "--out", str(tmp_path / "out")])
    assert "train.parquet 1 rows, test.parquet 1 rows" in capsys.readouterr().out


def test_the_command_prints_one_line_for_a_mistake(tmp_path):
    command = [sys.executable, "-m", "megappo.data.prepare.gsm8k", "--raw", "nowhere", "--out", str(tmp_path)]
    root = Path(megappo.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 2
    assert done.stderr.startswith("error: nowhere: not found") and done.stderr.count("\n") == 1
