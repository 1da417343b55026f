"""Preference pairs: the accepted shapes of rows, the length filter, and the measure of noise."""

import json

import pytest

from megappo.data.preferences import PreferenceDataset, noise_report
from megappo.data.prompts import PromptDataset
from megappo.errors import UserError

USER = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "be brief"}


def say(text):
    return {"role": "assistant", "content": text}


def write(tmp_path, *rows):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(tmp_path, tokenizer, *rows, **options):
    return PreferenceDataset(write(tmp_path, *rows), tokenizer, **{"max_length": 200, **options})


def refused(*args, **options) -> str:
    with pytest.raises(UserError) as caught:
        pairs(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_text_becomes_three_sequences(tmp_path, tokenizer):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "33", "data_source": "sums", "ground_truth": "2"}
    (pair,) = pairs(tmp_path, tokenizer, row)
    texts = [tokenizer.decode(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)]
    assert texts == ["1+1=", "2</s>", "33</s>"]
    assert (pair.chosen_mask, pair.rejected_mask) == ([True] * 2, [True] * 3)
    assert (pair.chosen_text, pair.rejected_text, pair.lengths) == ("2", "33", (6, 7))
    assert (pair.data_source, pair.ground_truth, pair.margin) == ("sums", "2", None)
    assert pair.source.endswith("pairs.jsonl, row 1")


def test_every_shape_of_the_same_chat_gives_the_same_pair(tmp_path, chat_tokenizer):
    whole = {"chosen": [USER, say("two")], "rejected": [USER, say("three")]}
    rows = [
        {"prompt": [USER], "chosen": "two", "rejected": "three"},
        {"prompt": [USER], "chosen": [say("two")], "rejected": [say("three")]},
        whole,
        {"prompt": None, **whole},
        {"prompt": [USER], **whole},
        {"prompt": "1+1?", **whole},
    ]
    found = pairs(tmp_path, chat_tokenizer, *rows)
    assert len({(str(p.prompt_ids), str(p.chosen_ids), str(p.rejected_ids)) for p in found}) == 1
    assert chat_tokenizer.decode(found[0].chosen_ids) == "two<|im_end|>"


def test_a_plain_prompt_with_one_reply_turn_stays_plain(tmp_path, chat_tokenizer):
    row = {"prompt": "1+1=", "chosen": [say("2")], "rejected": [say("3")]}
    (pair,) = pairs(tmp_path, chat_tokenizer, row)
    assert chat_tokenizer.decode(pair.prompt_ids) == "1+1="


def test_a_system_turn_before_a_repeated_prompt_belongs_to_the_prompt(tmp_path, chat_tokenizer):
    row = {"prompt": "1+1?", "chosen": [SYSTEM, USER, say("2")], "rejected": [SYSTEM, USER, say("3")]}
    (pair,) = pairs(tmp_path, chat_tokenizer, row)
    assert pair.prompt_text.startswith("<|im_start|>system\nbe brief")


def test_the_prompt_ends_before_the_first_assistant_turn_that_differs(tmp_path, chat_tokenizer):
    history = [USER, say("what?"), USER]
    later = [{"role": "user", "content": "go on"}, say("end")]
    (pair,) = pairs(
        tmp_path, chat_tokenizer, {"chosen": [*history, say("a"), *later], "rejected": [*history, say("b")]}
    )
    expected = chat_tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
    assert pair.prompt_text == expected
    assert not all(pair.chosen_mask) and all(pair.rejected_mask)


def test_equal_chats_and_a_chat_that_goes_on_keep_their_last_common_answer_as_the_reply(tmp_path, chat_tokenizer):
    short = [USER, say("2")]
    rows = [{"chosen": short, "rejected": short}, {"chosen": [*short, USER, say("3")], "rejected": short}]
    equal, longer = pairs(tmp_path, chat_tokenizer, *rows)
    assert equal.chosen_ids == equal.rejected_ids == longer.rejected_ids
    assert longer.chosen_ids[: len(longer.rejected_ids)] == longer.rejected_ids


def test_prompt_ids_are_those_of_the_prompt_data_set(tmp_path, tokenizer_factory):
    tokenizer = tokenizer_factory(bos=True)
    path = write(tmp_path, {"prompt": "plain", "chosen": "x", "rejected": "y"})
    (pair,), (prompt,) = PreferenceDataset(path, tokenizer), PromptDataset(path, tokenizer, max_prompt_length=99)
    assert pair.prompt_ids == prompt.prompt_ids


def test_parquet_chats_and_json_chats_are_the_same(tmp_path, chat_tokenizer):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"chosen": [USER, say("2")], "rejected": [USER, say("3")], "margin": 1.5}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    (a,) = PreferenceDataset(tmp_path / "pairs.parquet", chat_tokenizer)
    (b,) = pairs(tmp_path, chat_tokenizer, *rows)
    assert (a.prompt_ids, a.chosen_ids, a.margin) == (b.prompt_ids, b.chosen_ids, 1.5)


def test_margin_comes_from_its_column_or_from_the_scores(tmp_path, tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    more = [{"margin": 2, "score_chosen": 9.0, "score_rejected": 1.0}, {"score_chosen": 3.0, "score_rejected": 3.5}, {}]
    assert [p.margin for p in pairs(tmp_path, tokenizer, *({**row, **m} for m in more))] == [2.0, -0.5, None]


def test_a_pair_with_one_side_too_long_is_dropped_whole_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "defgh"}, {"prompt": "ab", "chosen": "c", "rejected": "d"}]
    data = pairs(tmp_path, tokenizer, *rows, max_length=5)
    assert [p.source.split()[-1] for p in data] == ["2"] and data[0].index == 0
    report = data.report
    assert (report.total, report.kept, report.dropped, report.longest) == (2, 1, 1, 8)
    assert "1 dropped as longer than max_length=5" in str(report)
    assert len(pairs(tmp_path, tokenizer, *rows, max_prompt_length=2, max_response_length=2)) == 1
    assert len(pairs(tmp_path, tokenizer, *rows, max_prompt_length=2, max_response_length=6)) == 2


def test_no_pair_left_is_an_error(tmp_path, tokenizer):
    message = refused(tmp_path, tokenizer, {"prompt": "abcdef", "chosen": "x", "rejected": "y"}, max_length=5)
    assert "no pair is left" in message and "max_length=5" in message


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "x"}, "no column 'rejected'"),
        ({"chosen": "x", "rejected": "y"}, "no column 'prompt'"),
        ({"prompt": "a", "chosen": "x", "rejected": 3}, "'rejected' must be a string or chat messages"),
        ({"prompt": "a", "chosen": None, "rejected": "y"}, "'chosen' must be a string or chat messages, got null"),
        ({"prompt": "a", "chosen": "x", "rejected": [say("y")]}, "write both alike"),
        ({"chosen": [say("x")], "rejected": [say("y")]}, "do not begin with the same turns"),
        ({"chosen": [USER, say("x")], "rejected": [SYSTEM, say("x")]}, "do not begin with the same turns"),
        ({"chosen": [SYSTEM, USER, say("x")], "rejected": [SYSTEM, say("x")]}, "a user turn"),
        ({"chosen": [], "rejected": []}, "non-empty list"),
        ({"prompt": 4, "chosen": "x", "rejected": "y"}, "non-empty list"),
        ({"prompt": "a", "chosen": "x", "rejected": "y", "margin": "big"}, "'margin' must be a finite number"),
        ({"prompt": "a", "chosen": "x", "rejected": "y", "margin": float("nan")}, "'margin' must be a finite number"),
    ],
)
def test_a_bad_row_is_named(tmp_path, chat_tokenizer, row, words):
    message = refused(tmp_path, chat_tokenizer, {"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    assert "pairs.jsonl, row 2" in message or "pairs.jsonl, line 2" in message
    assert words in message


def test_noise_counts_identical_contradicted_and_duplicate_pairs(tmp_path, tokenizer):
    rows = [
        ("p", "good", "bad"),
        ("p", "bad", " good"),  # contradicts the first; white space does not tell them apart
        ("p", "same", "same "),
        ("q", "good", "bad"),
        ("q", "good", "bad\n"),  # a duplicate
        ("r", "a", "b"),
        ("s", "a", "b", -1.0),  # its own margin says the opposite
        ("t", "a", "b"),
        ("u", "a", "b"),
        ("v", "a", "b"),
    ]
    keys = ("prompt", "chosen", "rejected", "margin")
    data = pairs(tmp_path, tokenizer, *(dict(zip(keys, row, strict=False)) for row in rows))
    report = noise_report(data)
    assert (report.pairs, report.identical, report.contradicted, report.duplicates) == (10, 1, 3, 1)
    assert report.inconsistent_share == pytest.approx(0.4)
    assert report.duplicate_share == pytest.approx(0.1)
    assert "40.0% inconsistent" in str(report) and "\n" not in str(report)


def test_clean_and_empty_sets_have_no_noise(tmp_path, tokenizer):
    clean = noise_report(pairs(tmp_path, tokenizer, {"prompt": "a", "chosen": "b", "rejected": "c"}))
    assert (clean.inconsistent_share, clean.duplicate_share) == (0.0, 0.0)
    assert noise_report([]).inconsistent_share == 0.0
