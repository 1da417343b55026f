"""Recorded responses for offline PPO: preference pairs, or responses with scores, beside their prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megappo.config.schema.experiment import ExperimentConfig
from megappo.data.conversations import ASSISTANT, Conversations, Reply
from megappo.data.preferences import NoiseReport, PreferenceDataset, noise_report
from megappo.data.prompts import PromptRow, SourceRow, check_messages, read_source_rows, row_facts
from megappo.data.sft_rows import MESSAGES_KEY
from megappo.errors import UserError


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """One response as token ids.

    `mask[t]`: an assistant turn wrote token t, so it is trained on. `logprobs[t]`: what the behaviour policy gave it,
    None if the data does not say. `score`: the data's own. `finished`: ends with the end-of-text token.
    """

    ids: list[int]
    mask: list[bool]
    logprobs: list[float] | None
    score: float | None
    finished: bool


@dataclass(frozen=True, slots=True)
class OfflineRow(PromptRow):
    """A prompt with its responses, as many in every row."""

    responses: tuple[RecordedResponse, ...] = ()


@dataclass(frozen=True)
class OfflineReport:
    """What was read; counts are rows, `longest` and limits in tokens."""

    total: int
    kept: int
    dropped: int
    noise: NoiseReport | None
    conflicting: int = 0
    repeated: int = 0
    notable: bool = field(default=True, init=False)

    @property
    def inconsistent_share(self) -> float:
        """Share of rows that contradict others (or themselves)."""
        if self.noise is not None:
            return self.noise.inconsistent_share
        return self.conflicting / max(1, self.total)

    def __str__(self) -> str:
        text = f"{self.kept} of {self.total} rows kept"
        if self.dropped:
            text += f"; {self.dropped} dropped as longer than data.max_prompt_length or data.max_response_length"
        if self.noise is not None:
            return f"{text}; {self.noise}"
        return f"{text}; {self.conflicting} scored differently elsewhere, {self.repeated} repeated"


class OfflineDataset(Sequence[OfflineRow]):
    """Rows with recorded responses, read by `read_offline`."""

    def __init__(self, rows: list[OfflineRow], report: OfflineReport):
        self._rows, self.report = rows, report
        self.has_logprobs = all(r.logprobs is not None for row in rows for r in row.responses)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def read_offline(config: ExperimentConfig, tokenizer: Any) -> OfflineDataset:
    """The recorded responses that a configuration names.

    Raises:
        UserError: bad files or rows, another number of responses than rollout.n, no score where one is needed, more
            noise than data.max_noise, nothing left after the length limits.
    """
    sources = read_source_rows(config.data.train_files)
    if sources[0].data.get(config.offline.chosen_key) is not None:
        data = _read_pairs(config, tokenizer)
    else:
        data = _read_scored(config, tokenizer, sources)
    _check(config, data)
    return data


def _check(config: ExperimentConfig, data: OfflineDataset) -> None:
    report, limit = data.report, config.data.max_noise
    if report.inconsistent_share > limit:
        raise UserError(
            f"data.train_files: {report}: {report.inconsistent_share:.1%} contradict others, more than "
            f"data.max_noise={limit:g}: clean the data or raise the limit"
        )
    n = config.rollout.n
    scored = any(reward.type == "recorded" for reward in config.rewards)
    for row in data:
        if len(row.responses) != n:
            count = len(row.responses)
            raise UserError(
                f"{row.source}: {count} responses but rollout.n is {n}: every row needs as many; set rollout.n={count}"
            )
        if scored and any(response.score is None for response in row.responses):
            raise UserError(
                f"{row.source}: no '{config.offline.score_key}' for reward type recorded: add it, or use another reward"
            )


# --- preference pairs ------------------------------------------------------------------------------------


def _read_pairs(config: ExperimentConfig, tokenizer: Any) -> OfflineDataset:
    pairs = PreferenceDataset(
        config.data.train_files,
        tokenizer,
        prompt_key=config.data.prompt_key,
        chosen_key=config.offline.chosen_key,
        rejected_key=config.offline.rejected_key,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        chat_template=config.model.chat_template,
    )
    eos = tokenizer.eos_token_id
    rows = []
    for pair in pairs:
        sides = (
            (pair.chosen_ids, pair.chosen_mask, config.offline.pair_scores[0]),
            (pair.rejected_ids, pair.rejected_mask, config.offline.pair_scores[1]),
        )
        responses = tuple(RecordedResponse(ids, mask, None, score, ids[-1:] == [eos]) for ids, mask, score in sides)
        facts = {name: getattr(pair, name) for name in PromptRow.__dataclass_fields__}
        rows.append(OfflineRow(**facts, responses=responses))
    kept, total = len(rows), pairs.report.total
    return OfflineDataset(rows, OfflineReport(total, kept, total - kept, noise_report(pairs)))


# --- scored responses ------------------------------------------------------------------------------------


def _read_scored(config: ExperimentConfig, tokenizer: Any, sources: list[SourceRow]) -> OfflineDataset:
    data = config.data
    talk = Conversations(tokenizer, config.model.chat_template)
    answers = [_answers(config, source) for source in sources]
    exchanges = [
        talk.exchange(prompt, text, source.where)
        for source, (prompt, texts) in zip(sources, answers, strict=True)
        for text in texts
    ]
    replies = iter(talk.encode(exchanges))
    rows: list[OfflineRow] = []
    for source, (_, texts) in zip(sources, answers, strict=True):
        row = _scored_row(config, source, [next(replies) for _ in texts], len(rows), tokenizer.eos_token_id)
        lengths = [len(response.ids) for response in row.responses]
        if len(row.prompt_ids) <= data.max_prompt_length and max(lengths) <= data.max_response_length:
            rows.append(row)
    if not rows:
        raise UserError(
            f"{sources[0].file}: no row is left: all {len(sources)} are longer than data.max_prompt_length="
            f"{data.max_prompt_length} or data.max_response_length={data.max_response_length}: raise them"
        )
    conflicting, repeated = _conflicts(rows)
    report = OfflineReport(len(sources), len(rows), len(sources) - len(rows), None, conflicting, repeated)
    return OfflineDataset(rows, report)


def _answers(config: ExperimentConfig, source: SourceRow) -> tuple[Any, list[Any]]:
    """The prompt of a row and its responses, each text or chat turns."""
    keys, where = config.offline, source.where
    answer, prompt = source.data.get(keys.response_key), source.data.get(config.data.prompt_key)
    if answer is None and source.data.get(MESSAGES_KEY) is not None:
        messages = check_messages(source.data[MESSAGES_KEY], where)
        first = next((i for i, turn in enumerate(messages) if turn["role"] == ASSISTANT), 0)
        if first == 0:
            raise UserError(f"{where}: '{MESSAGES_KEY}' needs a turn of the user and then one of the assistant")
        return messages[:first], [messages[first:]]
    if answer is None or prompt is None:
        missing = keys.response_key if answer is None else config.data.prompt_key
        raise UserError(
            f"{where}: no column '{missing}': offline rows have a prompt with '{keys.response_key}', or with "
            f"'{keys.chosen_key}' and '{keys.rejected_key}' (keys of section offline), or '{MESSAGES_KEY}'"
        )
    several = isinstance(answer, list) and not (answer and isinstance(answer[0], Mapping))
    if several and not answer:
        raise UserError(f"{where}: '{keys.response_key}' is an empty list: remove the row")
    return prompt, answer if several else [answer]


def _scored_row(
    config: ExperimentConfig, source: SourceRow, replies: Sequence[Reply], index: int, eos: int
) -> OfflineRow:
    keys, where, count = config.offline, source.where, len(replies)
    scores = _column(source, keys.score_key, count)
    logprobs = _column(source, keys.logprobs_key, count)
    responses = tuple(
        RecordedResponse(
            reply.ids,
            reply.mask,
            _logprobs(values, len(reply.ids), where, keys.logprobs_key),
            _score(score, where, keys.score_key),
            reply.ids[-1:] == [eos],
        )
        for reply, score, values in zip(replies, scores, logprobs, strict=True)
    )
    return OfflineRow(index, replies[0].prompt_ids, replies[0].prompt_text, **row_facts(source), responses=responses)


def _column(source: SourceRow, name: str, count: int) -> list[Any]:
    """The column's entry for each response: one alone stands as it is or in a list. None where there is none."""
    value = source.data.get(name)
    if value is None:
        return [None] * count
    if count == 1 and not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], list)):
        return [value]
    if not isinstance(value, list) or len(value) != count:
        raise UserError(f"{source.where}: '{name}' must be a list of {count}, one for each response")
    return value


def _score(value: Any, where: str, name: str) -> float | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    if isinstance(value, bool | str) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: '{name}' is {value!r}, not a finite number")
    return float(value)


def _logprobs(values: Any, tokens: int, where: str, name: str) -> list[float] | None:
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != tokens:
        found = len(values) if isinstance(values, list) else "no list"
        raise UserError(
            f"{where}: '{name}' has {found} entries, the response {tokens} tokens (its end included): another "
            "tokenizer wrote them; set offline.behaviour=policy"
        )
    if not all(isinstance(x, int | float) and math.isfinite(x) and x <= 0 for x in values):
        raise UserError(f"{where}: '{name}' must hold finite numbers, none above 0")
    return [float(x) for x in values]


def _conflicts(rows: Sequence[OfflineRow]) -> tuple[int, int]:
    """Rows whose prompt and response occur elsewhere with another score, and rows that repeat an earlier one."""
    scores: dict[tuple, set[float | None]] = {}
    seen: set[tuple] = set()
    repeated = 0
    for row in rows:
        whole = (tuple(row.prompt_ids), *(tuple(response.ids) for response in row.responses))
        repeated += whole in seen
        seen.add(whole)
        for response in row.responses:
            scores.setdefault((whole[0], tuple(response.ids)), set()).add(response.score)
    clash = {key for key, found in scores.items() if len(found) > 1}
    conflicting = sum(any((tuple(row.prompt_ids), tuple(r.ids)) in clash for r in row.responses) for row in rows)
    return conflicting, repeated
