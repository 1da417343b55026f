"""Supervised examples: where the response begins, how it ends, and what happens at the length limit."""

import json

import pytest

from megappo.data.prompts import PromptDataset
from megappo.data.sft_rows import SftDataset
from megappo.errors import UserError

USER = {"role": "user", "content": "1+1?"}


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def examples(tmp_path, tokenizer, *rows, **options):
    return SftDataset(write(tmp_path, *rows), tokenizer, **{"max_length": 200, **options})


def refused(*args, **options) -> str:
    with pytest.raises(UserError) as caught:
        examples(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_columns_become_prompt_and_response_with_eos(tmp_path, tokenizer):
    (row,) = examples(tmp_path, tokenizer, {"prompt": "1+1=", "response": "2"})
    assert tokenizer.decode(row.prompt_ids) == "1+1="
    assert row.response_ids == [tokenizer.convert_tokens_to_ids("2"), tokenizer.eos_token_id]
    assert len(row) == 6


def test_an_eos_that_is_already_there_is_not_doubled(tmp_path, tokenizer):
    (row,) = examples(tmp_path, tokenizer, {"prompt": "a", "response": "2</s>"})
    assert row.response_ids.count(tokenizer.eos_token_id) == 1


def test_the_response_gets_no_bos(tmp_path, tokenizer_factory):
    tokenizer = tokenizer_factory(bos=True)
    (row,) = examples(tmp_path, tokenizer, {"prompt": "a", "response": "b"})
    assert row.prompt_ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in row.response_ids


def test_a_chat_prompt_ends_where_the_template_lets_the_assistant_speak(tmp_path, chat_tokenizer):
    (row,) = examples(tmp_path, chat_tokenizer, {"prompt": [USER], "response": "two"})
    assert chat_tokenizer.decode(row.prompt_ids).endswith("<|im_start|>assistant\n")
    assert chat_tokenizer.decode(row.response_ids) == "two<|im_end|>"  # not the newline that follows it


def test_messages_and_columns_give_the_same_ids(tmp_path, chat_tokenizer):
    answer = {"role": "assistant", "content": "two"}
    history = [USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "no"}]
    rows = [{"messages": [*history, answer]}, {"prompt": history, "response": "two"}]
    first, second = examples(tmp_path, chat_tokenizer, *rows)
    assert (first.prompt_ids, first.response_ids) == (second.prompt_ids, second.response_ids)


def test_prompt_ids_are_those_of_the_prompt_data_set(tmp_path, chat_tokenizer):
    path = write(tmp_path, {"prompt": [USER], "response": "two"}, {"prompt": "plain", "response": "x"})
    supervised = SftDataset(path, chat_tokenizer, max_length=200)
    prompts = PromptDataset(path, chat_tokenizer, max_prompt_length=200)
    assert [row.prompt_ids for row in supervised] == [row.prompt_ids for row in prompts]


def test_a_template_whose_end_marker_is_not_eos_still_ends_in_eos(tmp_path, tokenizer):
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (row,) = examples(tmp_path, tokenizer, {"prompt": [USER], "response": "two"}, chat_template=template)
    assert tokenizer.decode(row.response_ids) == "two;</s>"


def test_a_template_that_rewrites_history_falls_back_to_the_bare_response(tmp_path, tokenizer):
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (row,) = examples(tmp_path, tokenizer, {"prompt": [USER], "response": "two"}, chat_template=template)
    assert tokenizer.decode(row.response_ids) == "two</s>"


def test_a_long_response_is_cut_without_eos_and_a_long_prompt_is_dropped(tmp_path, tokenizer):
    rows = [
        {"prompt": "ab", "response": "cdefgh"},
        {"prompt": "abcde", "response": "x"},
        {"prompt": "ab", "response": "cd"},
    ]
    data = examples(tmp_path, tokenizer, *rows, max_length=5)
    assert [tokenizer.decode(row.response_ids) for row in data] == ["cde", "cd</s>"]
    assert [row.source.split()[-1] for row in data] == ["1", "3"]
    report = data.report
    assert (report.total, report.kept, report.truncated, report.dropped, report.longest) == (3, 2, 1, 1, 9)
    assert "1 responses cut at 5 tokens" in str(report)


def test_no_example_left_is_an_error(tmp_path, tokenizer):
    message = refused(tmp_path, tokenizer, {"prompt": "abcdef", "response": "x"}, max_length=5)
    assert "no example is left" in message and "max_length=5" in message


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "x"}, "no column 'response'"),
        ({"response": "x"}, "no column 'prompt'"),
        ({"prompt": "x", "response": 4}, "'response' must be a string"),
        ({"prompt": "", "response": "x"}, "the prompt is empty"),
        ({"messages": [USER]}, "must end with an assistant turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must end with an assistant turn"),
        ({"messages": "hi"}, "non-empty list"),
    ],
)
def test_a_bad_row_is_named(tmp_path, chat_tokenizer, row, words):
    message = refused(tmp_path, chat_tokenizer, {"prompt": "a", "response": "b"}, row)
    assert "rows.jsonl, row 2" in message and words in message


def test_a_tokenizer_without_eos_is_refused(tmp_path, tokenizer_factory):
    tokenizer = tokenizer_factory()
    tokenizer.eos_token = None
    assert "no EOS token" in refused(tmp_path, tokenizer, {"prompt": "a", "response": "b"})
