"""Reading data files: what is accepted, and one clear line for each thing that is not."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megappo.data.prompts import read_rows, read_source_rows
from megappo.errors import UserError


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(*args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        read_rows(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_parquet_and_jsonl_rows_come_in_the_order_of_the_files(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "x.parquet")
    lines = write_lines(tmp_path / "y.jsonl", {"prompt": "c"})
    assert read_rows([lines, str(tmp_path / "x.parquet")]) == [{"prompt": p} for p in "cab"]


def test_one_file_may_be_given_without_a_list(tmp_path):
    assert read_rows(write_lines(tmp_path / "y.jsonl", {"prompt": "c"})) == [{"prompt": "c"}]


def test_a_row_knows_its_line_even_after_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"prompt": "a"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert [row.number for row in read_source_rows(path)] == [1, 3]


def test_nested_parquet_columns_become_python_values(tmp_path):
    row = {"prompt": [{"role": "user", "content": "hi"}], "extra_info": {"index": 3, "tags": ["x"]}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    assert read_rows(tmp_path / "x.parquet") == [row]


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path):
    (tmp_path / "split=train").mkdir()
    path = tmp_path / "split=train" / "x.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), path)
    assert read_rows(path) == [{"prompt": "a"}]


def test_bad_paths_are_named(tmp_path):
    assert str(tmp_path / "no.jsonl") in refused(tmp_path / "no.jsonl")
    assert "not a file" in refused(tmp_path)
    (tmp_path / "x.csv").write_text("a,b\n")
    assert "'.csv'" in refused(tmp_path / "x.csv")
    assert "no data file" in refused([])


def test_empty_files_are_refused(tmp_path):
    (tmp_path / "e.jsonl").write_text("\n \n")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "e.parquet")
    for name in ("e.jsonl", "e.parquet"):
        message = refused(tmp_path / name)
        assert name in message and "no rows" in message


def test_a_broken_json_line_is_named_by_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    assert "a.jsonl, line 2: broken JSON" in refused(path)
    path.write_text('{"prompt": "a"}\n[1]\n')
    assert "line 2: expected a JSON object, got list" in refused(path)
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "line 2: not UTF-8" in refused(path)


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nonsense")
    assert "not a readable parquet file" in refused(tmp_path / "x.parquet")


def test_a_missing_column_is_named_with_those_that_exist(tmp_path):
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "x.parquet")
    message = refused(tmp_path / "x.parquet", required=("prompt",))
    assert "no column 'prompt'" in message and "question" in message
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"}, {"question": "b"})
    assert "line 2: no column 'prompt'" in refused(path, required=("prompt",))
