"""Preference pairs: a prompt with a chosen and a rejected response, and how noisy a set of them is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megappo.data.conversations import ASSISTANT, Conversations, Exchange, Messages, Reply
from megappo.data.prompts import SourceRow, check_messages, read_source_rows, row_facts
from megappo.errors import UserError

MARGIN_KEY = "margin"
SCORE_KEYS = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One pair. `index` is its place in the data set; `source` is file and row.

    `*_ids` are responses that end in EOS; `*_mask` is True on the tokens that the assistant wrote (see
    `conversations.Reply`); `*_text` is what a reward function would see of a rollout with the same tokens.
    `margin`: by how much the chosen one is better, as the data say (column `margin`, or the difference of
    `score_chosen` and `score_rejected`); None where they say nothing.
    """

    index: int
    prompt_ids: list[int]
    prompt_text: str
    chosen_ids: list[int]
    rejected_ids: list[int]
    chosen_mask: list[bool]
    rejected_mask: list[bool]
    chosen_text: str
    rejected_text: str
    margin: float | None = None
    data_source: str = "unknown"
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of prompt + chosen and of prompt + rejected."""
        return len(self.prompt_ids) + len(self.chosen_ids), len(self.prompt_ids) + len(self.rejected_ids)


@dataclass(frozen=True, slots=True)
class PreferenceReport:
    """What the length filter did, in pairs; `longest` is the longest sequence (prompt + response) in tokens."""

    total: int
    kept: int
    dropped: int
    longest: int
    limit: str

    def __str__(self) -> str:
        kept = f"{self.kept} of {self.total} pairs kept, longest sequence {self.longest} tokens"
        return f"{kept}; {self.dropped} dropped as longer than {self.limit}" if self.dropped else kept


class PreferenceDataset(Sequence[PreferencePair]):
    """Pairs of some parquet or JSONL files.

    A row is one of

    * `prompt_key` (a string or chat messages) with two strings;
    * `prompt_key` with two chats, which hold the reply turns alone, or the prompt's turns before them;
    * no prompt column: two whole chats with a common beginning. The prompt ends before the first assistant turn
      in which they differ.

    Args:
        max_length: tokens of prompt and response together; None: no limit.
        max_prompt_length, max_response_length: limits of each; None: no limit. A pair with either side over a
            limit is dropped (see `report`), never cut: a cut would change which of the two is better.

    Raises UserError, naming file and row, for anything else, and when no pair is left.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        max_length: int | None = None,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        conversations = Conversations(tokenizer, chat_template)
        sources = read_source_rows(files, required=(chosen_key, rejected_key))
        exchanges: list[Exchange] = []
        for source in sources:
            prompt, *responses = _shape(source, prompt_key, chosen_key, rejected_key)
            exchanges += [conversations.exchange(prompt, response, source.where) for response in responses]
        replies = conversations.encode(exchanges)

        limits = {"max_length": max_length, "max_prompt_length": max_prompt_length}
        limits |= {"max_response_length": max_response_length}
        self._rows: list[PreferencePair] = []
        longest = 0
        for source, chosen, rejected in zip(sources, replies[::2], replies[1::2], strict=True):
            sizes = {"max_length": max(len(chosen), len(rejected)), "max_prompt_length": len(chosen.prompt_ids)}
            sizes |= {"max_response_length": max(len(chosen.ids), len(rejected.ids))}
            longest = max(longest, sizes["max_length"])
            if any(limit is not None and sizes[name] > limit for name, limit in limits.items()):
                continue
            self._rows.append(_pair(len(self._rows), source, chosen, rejected))
        limit = " or ".join(f"{name}={value}" for name, value in limits.items() if value is not None)
        kept = len(self._rows)
        self.report = PreferenceReport(len(sources), kept, len(sources) - kept, longest, limit)
        if not self._rows:
            raise UserError(
                f"{sources[0].file}: no pair is left: all {len(sources)} are longer than {limit} (longest sequence: "
                f"{longest} tokens): raise it"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def _pair(index: int, source: SourceRow, chosen: Reply, rejected: Reply) -> PreferencePair:
    return PreferencePair(
        index=index,
        prompt_ids=chosen.prompt_ids,
        prompt_text=chosen.prompt_text,
        chosen_ids=chosen.ids,
        rejected_ids=rejected.ids,
        chosen_mask=chosen.mask,
        rejected_mask=rejected.mask,
        chosen_text=chosen.text,
        rejected_text=rejected.text,
        margin=_margin(source),
        **row_facts(source),
    )


# --- shapes of rows ---------------------------------------------------------------------------------------


def _shape(source: SourceRow, prompt_key: str, chosen_key: str, rejected_key: str) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a row, each a string or messages."""
    row, where = source.data, source.where
    chosen, rejected = row[chosen_key], row[rejected_key]
    for key, value in ((chosen_key, chosen), (rejected_key, rejected)):
        if not isinstance(value, str | list):
            raise UserError(f"{where}: '{key}' must be a string or chat messages, got {_kind(value)}")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(
            f"{where}: '{chosen_key}' is {_kind(chosen)} but '{rejected_key}' is {_kind(rejected)}: write both alike"
        )
    prompt = row.get(prompt_key)
    if isinstance(chosen, str):
        if prompt is None:
            raise UserError(
                f"{where}: no column '{prompt_key}': text in '{chosen_key}' and '{rejected_key}' needs the prompt "
                "that it answers (whole chats need none)"
            )
        return prompt, chosen, rejected
    chats = check_messages(chosen, where), check_messages(rejected, where)
    if prompt is None:
        return _common_prompt(*chats, f"{where}: '{chosen_key}' and '{rejected_key}'")
    return _without_prompt(prompt, *chats, where)


def _without_prompt(prompt: Any, chosen: Messages, rejected: Messages, where: str) -> tuple[Any, Messages, Messages]:
    """Chats that repeat the prompt's turns lose them; a plain prompt repeated as a user turn becomes that turn."""
    history = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt, where)
    n = len(history)
    # A system turn before the repeated user turn is part of the prompt.
    if isinstance(prompt, str) and chosen[0]["role"] == rejected[0]["role"] == "system" and chosen[0] == rejected[0]:
        history, n = [chosen[0], *history], n + 1
    if chosen[:n] == history and rejected[:n] == history and min(len(chosen), len(rejected)) > n:
        return history, chosen[n:], rejected[n:]
    return prompt, chosen, rejected


def _common_prompt(chosen: Messages, rejected: Messages, what: str) -> tuple[Messages, Messages, Messages]:
    shorter = min(chosen, rejected, key=len)
    same = 0
    while same < len(shorter) and chosen[same] == rejected[same]:
        same += 1
    if same == len(shorter):  # equal, or one goes on where the other ends: the last answer that both have is the reply
        same = max((i for i, turn in enumerate(shorter) if turn["role"] == ASSISTANT), default=0)
    if not same:
        raise UserError(f"{what} do not begin with the same turns: give the prompt in a column, or as their beginning")
    for chat in (chosen, rejected):
        if chat[same]["role"] != ASSISTANT:
            raise UserError(
                f"{what} differ first in turn {same + 1}, which is a {chat[same]['role']} turn: "
                "they must answer the same prompt"
            )
    return chosen[:same], chosen[same:], rejected[same:]


def _kind(value: Any) -> str:
    kinds = {str: "a string", list: "a list", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def _margin(source: SourceRow) -> float | None:
    margin = source.data.get(MARGIN_KEY)
    if margin is not None:
        return _number(margin, MARGIN_KEY, source)
    for keys in SCORE_KEYS:
        if all(source.data.get(key) is not None for key in keys):
            better, worse = (_number(source.data[key], key, source) for key in keys)
            return better - worse
    return None


def _number(value: Any, key: str, source: SourceRow) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{source.where}: '{key}' must be a finite number or null, got {value!r}")
    return float(value)


# --- noise ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoiseReport:
    """Numbers of pairs; see `noise_report`."""

    pairs: int
    identical: int
    contradicted: int
    duplicates: int
    inconsistent: int

    def _share(self, number: int) -> float:
        return number / self.pairs if self.pairs else 0.0

    @property
    def identical_share(self) -> float:
        return self._share(self.identical)

    @property
    def contradicted_share(self) -> float:
        return self._share(self.contradicted)

    @property
    def duplicate_share(self) -> float:
        return self._share(self.duplicates)

    @property
    def inconsistent_share(self) -> float:
        """Share of pairs that say nothing (identical) or that the data contradict."""
        return self._share(self.inconsistent)

    def __str__(self) -> str:
        return (
            f"{self.pairs} pairs: {self.inconsistent_share:.1%} inconsistent ({self.identical} with identical "
            f"responses, {self.contradicted} contradicted), {self.duplicate_share:.1%} duplicates"
        )


def noise_report(pairs: Iterable[PreferencePair]) -> NoiseReport:
    """How many pairs are identical, contradicted or duplicates.

    Texts are compared exactly after runs of white space became one space. A pair is

    * *identical* if chosen and rejected are the same text;
    * *contradicted* if another pair prefers the same two responses to the same prompt the other way, or if its own
      margin (or scores) is negative: both sides of a contradiction count;
    * a *duplicate* if an earlier pair has the same prompt, chosen and rejected response.

    Memory: 48 bytes of digests a pair.
    """
    keys, margins = [], []
    for pair in pairs:
        keys.append((_digest(pair.prompt_text), _digest(pair.chosen_text), _digest(pair.rejected_text)))
        margins.append(pair.margin)
    seen = Counter(keys)
    identical = [chosen == rejected for _, chosen, rejected in keys]
    contradicted = [
        not same and ((prompt, rejected, chosen) in seen or (margin is not None and margin < 0))
        for (prompt, chosen, rejected), margin, same in zip(keys, margins, identical, strict=True)
    ]
    return NoiseReport(
        pairs=len(keys),
        identical=sum(identical),
        contradicted=sum(contradicted),
        duplicates=len(keys) - len(seen),
        inconsistent=sum(identical) + sum(contradicted),
    )


def _digest(text: str) -> bytes:
    return blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
