"""Rows with recorded responses: kinds, masks, scores, log-probs, noise, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from megappo.config.schema import OfflineConfig
from megappo.data.offline import read_offline
from megappo.errors import UserError

USER = {"role": "user", "content": "2+2"}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.fixture
def read(tmp_path, chat_tokenizer):
    tokenizer = chat_tokenizer

    def read(rows, *, n=1, rewards=(), max_noise=0.12, max_prompt=200, max_response=200, **keys):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = SimpleNamespace(
            data=SimpleNamespace(
                train_files=[str(file)],
                prompt_key="prompt",
                max_prompt_length=max_prompt,
                max_response_length=max_response,
                max_noise=max_noise,
            ),
            model=SimpleNamespace(chat_template=None),
            rollout=SimpleNamespace(n=n),
            rewards=[SimpleNamespace(type=kind) for kind in rewards],
            offline=OfflineConfig(**keys),
        )
        return read_offline(config, tokenizer)

    read.tokenizer = tokenizer
    return read


def text(read, ids) -> str:
    return read.tokenizer.decode(ids)


def test_a_scored_response_is_text_that_ends(read):
    (row,) = read([{"prompt": "2+2=", "response": "4", "score": 0.5, "data_source": "sums", "ground_truth": "4"}])
    (response,) = row.responses
    assert text(read, row.prompt_ids) == "2+2=" and text(read, response.ids) == "4<|im_end|>"
    assert response.mask == [True, True] and response.finished
    assert (response.score, response.logprobs, row.data_source, row.ground_truth) == (0.5, None, "sums", "4")


def test_a_row_may_hold_several_responses(read):
    data = read([{"prompt": "a", "response": ["b", "cd"], "score": [1, -1], "logprobs": [[-1, -2], [-3, -4, -5]]}], n=2)
    first, second = data[0].responses
    assert (first.score, second.score) == (1.0, -1.0) and second.logprobs == [-3.0, -4.0, -5.0]
    assert data.has_logprobs


def test_only_what_the_assistant_wrote_is_trained_on(read):
    turns = [USER, said("4"), {"role": "tool", "content": "ok?"}, said("yes")]
    for row in ({"messages": turns, "score": 1.0}, {"prompt": [USER], "response": turns[1:], "score": 1.0}):
        (found,) = read([row])
        (response,) = found.responses
        trained = [token for token, on in zip(response.ids, response.mask, strict=True) if on]
        assert text(read, trained) == "4<|im_end|>yes<|im_end|>"
        assert "ok?" in text(read, response.ids)
        assert text(read, found.prompt_ids).endswith("<|im_start|>assistant\n")


def test_a_preference_pair_has_two_responses(read):
    data = read([{"prompt": "a", "chosen": "b", "rejected": "c"}], n=2, rewards=["recorded"], pair_scores=(2.0, 0.0))
    assert [response.score for response in data[0].responses] == [2.0, 0.0]
    assert [text(read, response.ids) for response in data[0].responses] == ["b<|im_end|>", "c<|im_end|>"]
    assert not data.has_logprobs and "1 pairs: 0.0% inconsistent" in str(data.report)


def test_columns_may_have_other_names(read):
    data = read([{"prompt": "a", "answer": "b", "grade": 3}], response_key="answer", score_key="grade")
    assert data[0].responses[0].score == 3.0


def test_long_rows_are_dropped_and_counted(read):
    rows = [{"prompt": "a", "response": "b" * k, "score": 1.0} for k in (1, 3, 4, 9)]
    data = read(rows, max_response=4)  # the end is a token, too
    assert [len(row.responses[0].ids) for row in data] == [2, 4] and [row.index for row in data] == [0, 1]
    assert data.report.dropped == 2 and "2 dropped" in str(data.report)
    with pytest.raises(UserError, match="no row is left: all 4"):
        read(rows, max_response=1)


def test_a_response_scored_two_ways_is_noise(read):
    rows = [{"prompt": "a", "response": "b", "score": s} for s in (1.0, 1.0, 0.0)]
    rows += [{"prompt": "a", "response": c, "score": 1.0} for c in "cdefghijkl"]
    with pytest.raises(UserError, match=r"23\.1% contradict others, more than data\.max_noise=0\.12"):
        read(rows)
    report = read(rows, max_noise=0.3).report
    assert (report.conflicting, report.repeated) == (3, 2)


@pytest.mark.parametrize(
    ("row", "options", "wrong"),
    [
        ({"prompt": "a"}, {}, "row 1: no column 'response'"),
        ({"response": "a"}, {}, "row 1: no column 'prompt'"),
        ({"prompt": "a", "response": []}, {}, "row 1: 'response' is an empty list"),
        ({"prompt": "a", "response": "b", "score": "x"}, {}, "row 1: 'score' is 'x', not a finite number"),
        ({"prompt": "a", "response": "b", "score": True}, {}, "row 1: 'score' is True"),
        ({"prompt": "a", "response": "b"}, {"rewards": ["recorded"]}, "row 1: no 'score' for reward type recorded"),
        ({"prompt": "a", "response": ["b", "c"]}, {}, "row 1: 2 responses but rollout.n is 1"),
        ({"prompt": "a", "response": ["b", "c"], "score": [1.0]}, {"n": 2}, "row 1: 'score' must be a list of 2"),
        ({"prompt": "a", "response": "b", "logprobs": [-1.0]}, {}, "row 1: 'logprobs' has 1 entries, the response 2"),
        ({"prompt": "a", "response": "b", "logprobs": [-1.0, 0.5]}, {}, "row 1: 'logprobs' must hold finite numbers"),
        ({"messages": [said("b")]}, {}, "row 1: 'messages' needs a turn of the user"),
        ({"prompt": "a", "chosen": "b"}, {}, "no column 'rejected'"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_row(read, row, options, wrong):
    with pytest.raises(UserError) as caught:
        read([row], **options)
    assert wrong in str(caught.value) and "rows.jsonl" in str(caught.value) and "\n" not in str(caught.value)
