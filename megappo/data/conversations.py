"""Prompts with their responses as token ids, and which of the tokens the assistant wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.data.prompts import PromptEncoder, check_messages
from megappo.errors import UserError

ASSISTANT = "assistant"
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its response as text. `parts`: (text, written by the assistant?) of the response, in order."""

    prompt: str
    is_chat: bool
    parts: tuple[tuple[str, bool], ...]
    where: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt and its response as token ids.

    Attributes:
        prompt_ids: exactly those that `PromptDataset` gives for the same prompt.
        ids: the response, ending in EOS.
        mask: one flag a response token: True where the assistant wrote it (with its end of turn), False on the
            user's and tools' turns within the response and on what the chat template writes around them.
        text: `ids` as a rollout's text: decoded, without special tokens.
    """

    prompt_ids: list[int]
    prompt_text: str
    ids: list[int]
    mask: list[bool]
    text: str

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)


class Conversations:
    """Turns prompts (a string or chat messages) with responses (a string or the turns of a chat) into `Reply`.

    The response begins where the chat template lets the assistant speak after the prompt, and every later assistant
    turn likewise: the chat is rendered up to each of its turns, and what one more turn adds is that turn's text.

    Raises UserError for a tokenizer without EOS, which could never end a response.
    """

    def __init__(self, tokenizer: Any, chat_template: str | Path | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("model.tokenizer_path: the tokenizer has no EOS token: responses could never end")
        self._eos = int(tokenizer.eos_token_id)
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, None if chat_template is None else str(chat_template))

    def split(self, prompt: str | Messages, response: str | Messages, where: str) -> Reply:
        """One response; `where` names it in errors. See `exchange`."""
        return self.encode([self.exchange(prompt, response, where)])[0]

    def exchange(self, prompt: Any, response: Any, where: str) -> Exchange:
        """A prompt and its response as text.

        A response in turns begins and ends with an assistant turn. To a plain prompt it has one turn, whose content
        is then the response: more of them need a chat template, and so a chat as prompt.

        Raises UserError, which begins with `where`, for anything else.
        """
        turns = response if isinstance(response, str) else check_messages(response, where)
        if isinstance(prompt, str):
            text = self._encoder.render(prompt, where)
            return Exchange(text, False, ((self._encoder.render(_only_turn(turns, where), where), True),), where)
        history = check_messages(prompt, where)
        if isinstance(turns, str):
            turns = [{"role": ASSISTANT, "content": turns}]
        if turns[0]["role"] != ASSISTANT or turns[-1]["role"] != ASSISTANT:
            raise UserError(
                f"{where}: a response must begin and end with an assistant turn, this one has "
                f"{turns[0]['role']} … {turns[-1]['role']}: put earlier turns into the prompt, drop later ones"
            )
        prompt_text = self._encoder.render_chat(history, where, generation_prompt=True)
        return Exchange(prompt_text, True, tuple(self._parts(history, turns, prompt_text, where)), where)

    def _parts(self, history: Messages, turns: Messages, prompt: str, where: str) -> list[tuple[str, bool]]:
        """Text of each assistant turn and, between two of them, of everything else."""
        parts: list[tuple[str, bool]] = []
        before = prompt
        for i, turn in enumerate(turns):
            if turn["role"] != ASSISTANT:
                continue
            if i:
                start = self._encoder.render_chat([*history, *turns[:i]], where, generation_prompt=True)
                parts.append((_added(before, start, where), False))
                before = start
            after = self._encoder.render_chat([*history, *turns[: i + 1]], where, generation_prompt=False)
            if len(turns) == 1 and not after.startswith(before):
                # A template that rewrites earlier turns once an answer exists has no common prefix: bare text then.
                return [(turn["content"], True)]
            text = _added(before, after, where).rstrip()  # white space after the end of the turn is the template's
            parts.append((text, True))
            before += text
        return parts

    def encode(self, exchanges: Sequence[Exchange]) -> list[Reply]:
        """Token ids of many exchanges. Raises UserError for an empty prompt."""
        prompts = self._encoder.encode_prompts([e.prompt for e in exchanges], [e.is_chat for e in exchanges])
        pieces = iter(self._encoder.encode([text for e in exchanges for text, _ in e.parts]))
        found = []
        for exchange, prompt in zip(exchanges, prompts, strict=True):
            if not prompt:
                raise UserError(f"{exchange.where}: the prompt is empty: remove the row or fill it")
            found.append((exchange.prompt, prompt, *self._join(exchange, [next(pieces) for _ in exchange.parts])))
        texts = self._tokenizer.batch_decode([ids for _, _, ids, _ in found], skip_special_tokens=True)
        return [
            Reply(prompt, prompt_text, ids, mask, text)
            for (prompt_text, prompt, ids, mask), text in zip(found, texts, strict=True)
        ]

    def _join(self, exchange: Exchange, pieces: list[list[int]]) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        mask: list[bool] = []
        for number, ((_, written), piece) in enumerate(zip(exchange.parts, pieces, strict=True), 1):
            own = self._until_eos(piece, exchange.is_chat) if written else 0
            if number == len(pieces):
                # What a template writes after the last EOS is never generated: cut. No EOS there: one is added.
                piece = piece[:own] if piece[own - 1 : own] == [self._eos] else [*piece, self._eos]
                own = len(piece)
            ids += piece
            mask += [True] * own + [False] * (len(piece) - own)
        return ids, mask

    def _until_eos(self, ids: list[int], is_chat: bool) -> int:
        """How many of a turn's ids the assistant wrote: up to its last EOS where the template writes one."""
        return len(ids) - ids[::-1].index(self._eos) if is_chat and self._eos in ids else len(ids)


def _only_turn(turns: str | Messages, where: str) -> str:
    if isinstance(turns, str):
        return turns
    if len(turns) != 1 or turns[0]["role"] != ASSISTANT:
        raise UserError(
            f"{where}: the prompt is plain text but the response is a chat of {len(turns)} turns: "
            "write the prompt as chat messages too"
        )
    return turns[0]["content"]


def _added(before: str, after: str, where: str) -> str:
    if not after.startswith(before):
        raise UserError(
            f"{where}: the chat template rewrites earlier turns, so the turns of a longer response cannot be told "
            "apart: use a template that only appends (model.chat_template), or responses of one turn"
        )
    return after[len(before) :]
