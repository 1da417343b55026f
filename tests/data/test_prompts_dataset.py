"""Prompts as token ids: chat template, special tokens, the length filter, and refused rows."""

import json

import pytest

from megappo.data.prompts import PromptDataset
from megappo.errors import UserError


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(tmp_path, tokenizer, *rows, **options):
    options = {"max_prompt_length": 200, **options}
    return PromptDataset(write(tmp_path, *rows), tokenizer, **options)


def refused(*args, **options) -> str:
    with pytest.raises(UserError) as caught:
        prompts(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


CHAT = [{"role": "user", "content": "1+1?"}]


def test_a_row_carries_the_columns_of_verls_layout(tmp_path, tokenizer):
    row = {
        "prompt": "1+1=",
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    data = prompts(tmp_path, tokenizer, row, {"prompt": "x"})
    assert len(data) == 2
    first, second = data
    assert (first.prompt_text, first.data_source, first.ground_truth, first.extra_info) == (
        "1+1=",
        "sums",
        "2",
        {"index": 7},
    )
    assert tokenizer.decode(first.prompt_ids) == "1+1="
    assert (second.data_source, second.ground_truth, second.extra_info) == ("unknown", None, {})
    assert data[second.index] is second and second.source.endswith("row 2")


def test_ids_are_plain_lists_of_ints(tmp_path, chat_tokenizer):
    for prompt in ("abc", CHAT):
        (row,) = prompts(tmp_path, chat_tokenizer, {"prompt": prompt})
        assert type(row.prompt_ids) is list and all(type(token) is int for token in row.prompt_ids)


def test_a_chat_goes_through_the_template_up_to_the_assistants_turn(tmp_path, chat_tokenizer):
    (row,) = prompts(tmp_path, chat_tokenizer, {"prompt": CHAT})
    assert row.prompt_text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    expected = chat_tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert row.prompt_ids == expected
    assert row.prompt_ids.count(chat_tokenizer.eos_token_id) == 1  # the marker is one token, not characters


def test_chat_keys_that_parquet_filled_with_null_do_not_reach_the_template(tmp_path, tokenizer):
    template = "{% for m in messages %}{% for k in m %}{{ k }} {% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "a", "name": None}]
    (row,) = prompts(tmp_path, tokenizer, {"prompt": messages}, chat_template=template)
    assert row.prompt_text == "role content "


def test_a_template_that_writes_bos_yields_one_bos(tmp_path, tokenizer_factory):
    tokenizer = tokenizer_factory(bos=True, chat_template="{{ bos_token }}{{ messages[0]['content'] }}")
    (row,) = prompts(tmp_path, tokenizer, {"prompt": CHAT})
    assert row.prompt_ids[0] == tokenizer.bos_token_id
    assert row.prompt_ids.count(tokenizer.bos_token_id) == 1


def test_a_plain_string_gets_bos_once_and_no_eos(tmp_path, tokenizer_factory):
    tokenizer = tokenizer_factory(bos=True, trailing_eos=True)
    data = prompts(tmp_path, tokenizer, {"prompt": "ab"}, {"prompt": "<s>ab"})
    assert data[0].prompt_ids == data[1].prompt_ids
    assert data[0].prompt_ids == [tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(["a", "b"])]


def test_a_tokenizer_without_bos_adds_none(tmp_path, tokenizer):
    (row,) = prompts(tmp_path, tokenizer, {"prompt": "ab"})
    assert row.prompt_ids == tokenizer.convert_tokens_to_ids(["a", "b"])


def test_the_chat_template_may_be_a_file(tmp_path, tokenizer):
    (tmp_path / "t.jinja").write_text("Q: {{ messages[0]['content'] }}")
    (row,) = prompts(tmp_path, tokenizer, {"prompt": CHAT}, chat_template=str(tmp_path / "t.jinja"))
    assert row.prompt_text == "Q: 1+1?"
    missing = str(tmp_path / "no.jinja")
    assert missing in refused(tmp_path, tokenizer, {"prompt": CHAT}, chat_template=missing)


def test_longer_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "x" * n} for n in (3, 9, 5, 7)]
    data = prompts(tmp_path, tokenizer, *rows, max_prompt_length=5)
    assert [len(row.prompt_ids) for row in data] == [3, 5]
    assert [row.index for row in data] == [0, 1]
    report = data.report
    assert (report.total, report.kept, report.dropped, report.longest, report.limit) == (4, 2, 2, 9, 5)
    assert str(report) == "2 of 4 prompts kept, longest 9 tokens; 2 dropped as longer than 5 tokens"


def test_without_the_filter_a_long_prompt_is_an_error_with_file_row_and_lengths(tmp_path, tokenizer):
    rows = [{"prompt": "abc"}, {"prompt": "abcdefghi"}]
    message = refused(tmp_path, tokenizer, *rows, max_prompt_length=5, filter_overlong=False)
    assert "rows.jsonl, row 2" in message and "has 9 tokens" in message and "is 5" in message


def test_nothing_left_is_an_error(tmp_path, tokenizer):
    message = refused(tmp_path, tokenizer, {"prompt": "abcdef"}, {"prompt": "abcdefg"}, max_prompt_length=5)
    assert "no prompt is left" in message and "shortest: 6" in message


def test_max_samples_takes_the_first_rows(tmp_path, tokenizer):
    data = prompts(tmp_path, tokenizer, *({"prompt": p} for p in "abc"), max_samples=2)
    assert [row.prompt_text for row in data] == ["a", "b"]
    assert "val_max_samples" in refused(tmp_path, tokenizer, {"prompt": "a"}, max_samples=0)


def test_another_prompt_column_can_be_named(tmp_path, tokenizer):
    (row,) = prompts(tmp_path, tokenizer, {"question": "a"}, prompt_key="question")
    assert row.prompt_text == "a"
    assert "no column 'prompt'" in refused(tmp_path, tokenizer, {"question": "a"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": None}, "non-empty list"),
        ({"prompt": []}, "non-empty list"),
        ({"prompt": 5}, "non-empty list"),
        ({"prompt": ["hi"]}, "must be {role, content}, got str"),
        ({"prompt": [{"role": "user"}]}, "no text under 'content'"),
        ({"prompt": [{"content": "x"}]}, "no text under 'role'"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"prompt": "x", "reward_model": "rule"}, "'reward_model' must be a mapping"),
        ({"prompt": "x", "extra_info": [1]}, "'extra_info' must be a mapping"),
    ],
)
def test_a_bad_row_is_named(tmp_path, chat_tokenizer, row, words):
    message = refused(tmp_path, chat_tokenizer, {"prompt": "fine"}, row)
    assert "rows.jsonl, row 2" in message and words in message


def test_a_chat_without_any_template_is_an_error_that_names_the_key(tmp_path, tokenizer):
    assert "model.chat_template" in refused(tmp_path, tokenizer, {"prompt": CHAT})


def test_a_template_that_refuses_the_messages_is_an_error_with_the_row(tmp_path, tokenizer):
    template = "{{ raise_exception('only\nsystem turns') }}"
    message = refused(tmp_path, tokenizer, {"prompt": CHAT}, chat_template=template)
    assert "row 1" in message and "only system turns" in message
