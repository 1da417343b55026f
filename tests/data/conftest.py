"""A character-level tokenizer that needs no files."""

from __future__ import annotations

import string

import pytest

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, bos: bool = False, trailing_eos: bool = False, chat_template: str | None = None):
    """One token a character. `bos`, `trailing_eos`: what the tokenizer adds around a text by itself."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*specials, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos or trailing_eos:
        single = ("<s> " if bos else "") + "$A" + (" </s>" if trailing_eos else "")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>" if chat_template else "</s>",
        additional_special_tokens=specials[3:],
    )
    fast.chat_template = chat_template
    return fast


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer():
    return make_tokenizer(chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def tokenizer_factory():
    return make_tokenizer
