"""Conversations as token ids: where the response begins, and which of its tokens the assistant wrote."""

import pytest

from megappo.data.conversations import Conversations
from megappo.errors import UserError

USER = {"role": "user", "content": "1+1?"}
MORE = {"role": "user", "content": "sure?"}


def say(text):
    return {"role": "assistant", "content": text}


def spans(tokenizer, reply):
    """(written by the assistant?, text) of each run of equal mask."""
    out = []
    for token, on in zip(reply.ids, reply.mask, strict=True):
        if not out or out[-1][0] != on:
            out.append((on, ""))
        out[-1] = (on, out[-1][1] + tokenizer.convert_ids_to_tokens(token))
    return out


def test_a_text_response_is_written_by_the_assistant_throughout(tokenizer):
    reply = Conversations(tokenizer).split("1+1=", "2", "row 1")
    assert spans(tokenizer, reply) == [(True, "2</s>")]
    assert (reply.prompt_text, reply.text) == ("1+1=", "2")
    assert len(reply) == 6


def test_one_turn_and_its_text_are_the_same_response(chat_tokenizer):
    conversations = Conversations(chat_tokenizer)
    assert conversations.split([USER], "two", "x") == conversations.split([USER], [say("two")], "x")
    assert conversations.split("1+1?", "two", "x") == conversations.split("1+1?", [say("two")], "x")


def test_later_user_and_tool_turns_are_not_the_assistants(chat_tokenizer):
    tool = {"role": "tool", "content": "4"}
    reply = Conversations(chat_tokenizer).split([USER], [say("two"), MORE, tool, say("yes")], "x")
    other = "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert spans(chat_tokenizer, reply) == [(True, "two<|im_end|>"), (False, other), (True, "yes<|im_end|>")]


def test_all_ids_together_are_the_rendered_chat(chat_tokenizer):
    turns = [say("two"), MORE, say("yes")]
    reply = Conversations(chat_tokenizer).split([USER], turns, "x")
    whole = chat_tokenizer.apply_chat_template([USER, *turns], tokenize=False).rstrip()
    assert chat_tokenizer.decode(reply.prompt_ids + reply.ids) == whole


def test_the_last_turn_ends_in_eos_where_the_template_has_another_end_marker(tokenizer):
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    reply = Conversations(tokenizer, template).split([USER], [say("a"), MORE, say("b")], "x")
    assert spans(tokenizer, reply) == [(True, "a;"), (False, "\n[user]sure?;\n[assistant]"), (True, "b;</s>")]


@pytest.mark.parametrize(
    ("prompt", "response", "words"),
    [
        ([USER], [MORE, say("a")], "must begin and end with an assistant turn"),
        ([USER], [say("a"), MORE], "must begin and end with an assistant turn"),
        ("plain", [say("a"), MORE, say("b")], "write the prompt as chat messages too"),
        ("", "a", "the prompt is empty"),
        ([USER], 3, "non-empty list"),
    ],
)
def test_what_is_no_response_is_refused_with_its_place(chat_tokenizer, prompt, response, words):
    with pytest.raises(UserError) as caught:
        Conversations(chat_tokenizer).split(prompt, response, "pairs.jsonl, row 7")
    assert str(caught.value).startswith("pairs.jsonl, row 7: ") and words in str(caught.value)


def test_a_template_that_rewrites_history_cannot_split_several_turns(tokenizer):
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match="rewrites earlier turns"):
        Conversations(tokenizer, template).split([USER], [say("a"), MORE, say("b")], "row 1")
