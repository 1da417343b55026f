"""Supervised examples: (prompt ids, response ids ending in EOS) from prompt/response columns or chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megappo.data.batch import Placement, RolloutBatch, SampleInfo
from megappo.data.conversations import Conversations, Exchange
from megappo.data.prompts import SourceRow, check_messages, read_source_rows
from megappo.errors import UserError

MESSAGES_KEY = "messages"


@dataclass(frozen=True, slots=True)
class SftRow:
    """One example. The loss is on `response_ids`, which end in EOS unless cut at the length limit."""

    index: int
    prompt_ids: list[int]
    response_ids: list[int]
    source: str = ""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class SftReport:
    """Numbers of examples; `longest` (before cutting) and `limit` in tokens."""

    total: int
    kept: int
    truncated: int
    dropped: int
    longest: int
    limit: int

    def __str__(self) -> str:
        text = f"{self.kept} of {self.total} examples kept, longest {self.longest} tokens"
        if self.truncated:
            text += f"; {self.truncated} responses cut at {self.limit} tokens"
        if self.dropped:
            text += f"; {self.dropped} dropped (the prompt alone fills {self.limit} tokens)"
        return text


class SftDataset(Sequence[SftRow]):
    """Examples of some files, at most `max_length` tokens each (prompt and response together).

    A row has either `prompt_key` (chat messages or a string) and `response_key` (a string), or `messages`,
    a chat whose last turn is the assistant's and is the response. Prompt ids are exactly those that
    `PromptDataset` gives for the same prompt. A longer response is cut (and then has no EOS); a row whose
    prompt leaves no room is dropped: `report`.

    Raises UserError for bad files and rows, a tokenizer without EOS, and when no example is left.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        response_key: str = "response",
        max_length: int,
        chat_template: str | None = None,
    ) -> None:
        conversations = Conversations(tokenizer, chat_template)
        sources = read_source_rows(files)
        replies = conversations.encode([_exchange(conversations, s, prompt_key, response_key) for s in sources])

        self._rows: list[SftRow] = []
        truncated = dropped = longest = 0
        for source, reply in zip(sources, replies, strict=True):
            longest = max(longest, len(reply))
            room = max_length - len(reply.prompt_ids)
            if room <= 0:
                dropped += 1
                continue
            truncated += len(reply.ids) > room
            self._rows.append(SftRow(len(self._rows), reply.prompt_ids, reply.ids[:room], source.where))
        self.report = SftReport(len(sources), len(self._rows), truncated, dropped, longest, max_length)
        if not self._rows:
            raise UserError(
                f"{sources[0].file}: no example is left: every prompt fills max_length={max_length} tokens: raise it"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def _exchange(conversations: Conversations, source: SourceRow, prompt_key: str, response_key: str) -> Exchange:
    row, where = source.data, source.where
    if row.get(response_key) is None and row.get(MESSAGES_KEY) is not None:
        messages = check_messages(row[MESSAGES_KEY], where)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise UserError(f"{where}: '{MESSAGES_KEY}' must end with an assistant turn after a user turn")
        return conversations.exchange(messages[:-1], messages[-1:], where)
    for column in (prompt_key, response_key):
        if row.get(column) is None:
            raise UserError(
                f"{where}: no column '{column}': rows need '{prompt_key}' and '{response_key}', or '{MESSAGES_KEY}'"
            )
    prompt, response = row[prompt_key], row[response_key]
    if not isinstance(response, str):
        raise UserError(f"{where}: '{response_key}' must be a string, got {type(response).__name__}")
    return conversations.exchange(prompt, response, where)


def row_batch(rows: Sequence[SftRow], placement: Placement, rank: int) -> RolloutBatch:
    """A batch of prompt/response rows, cut to what `rank` holds; only the response is trained on."""
    n = len(rows)
    prompt = np.array([len(r.prompt_ids) for r in rows])
    response = np.array([len(r.response_ids) for r in rows])
    zeros = np.zeros(n, dtype=np.int64)
    info = SampleInfo(
        sample_id=np.arange(n),
        group_id=np.arange(n),
        prompt_len=prompt,
        length=prompt + response,
        trainable=response,
        score=zeros.astype(np.float64),
        finish_reason=zeros,
        weight_version=zeros,
        source=["sft"] * n,
    )
    mine = placement.samples_of(rank)
    tokens = [t for i in mine for t in (*rows[i].prompt_ids, *rows[i].response_ids)]
    mask = [on for i in mine for on in ([False] * prompt[i] + [True] * response[i])]
    columns = {
        "tokens": torch.tensor(tokens, dtype=torch.int64),
        "loss_mask": torch.tensor(mask, dtype=torch.bool),
    }
    return RolloutBatch(info, placement, mine, columns)
