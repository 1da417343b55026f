"""Prompts: reading rows, turning them into token ids, and the order in which training consumes them.

A row has verl's layout: ``{prompt: chat messages or str, data_source, reward_model: {style, ground_truth},
extra_info: {...}}``. No torch here; the tokenizer is any transformers tokenizer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megappo.data.ramp import batch_start
from megappo.errors import UserError

PARQUET, JSON_LINES = (".parquet",), (".jsonl", ".ndjson", ".json")
TOKENIZE_CHUNK = 1024  # texts a tokenizer call; bounds the memory of a large data set


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row as it stands in its file. `number` is its line (JSONL) or row (parquet), from 1."""

    file: str
    number: int
    data: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}, row {self.number}"


# --- files ------------------------------------------------------------------------------------------------


def read_rows(files: Sequence[str | Path] | str | Path, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All rows of parquet and JSONL files, in order.

    Raises UserError for a missing, unreadable or empty file, a broken JSON line, or a `required` column
    that is absent.
    """
    return [row.data for row in read_source_rows(files, required)]


def read_source_rows(files: Sequence[str | Path] | str | Path, required: Sequence[str] = ()) -> list[SourceRow]:
    """Like `read_rows`, but every row knows its file and its number there."""
    names = [files] if isinstance(files, str | Path) else list(files)
    if not names:
        raise UserError("no data file given: name at least one .parquet or .jsonl file")
    rows: list[SourceRow] = []
    for name in names:
        rows.extend(_read_file(Path(name).expanduser(), required))
    return rows


def _read_file(path: Path, required: Sequence[str]) -> list[SourceRow]:
    if not path.exists():
        raise UserError(f"{path}: file not found: check the path of the data file")
    if not path.is_file():
        raise UserError(f"{path}: not a file: name the .parquet or .jsonl files themselves")
    if path.suffix in PARQUET:
        rows = _read_parquet(path, required)
    elif path.suffix in JSON_LINES:
        rows = list(_read_json_lines(path, required))
    else:
        raise UserError(f"{path}: unknown file type '{path.suffix}': use .parquet or .jsonl")
    if not rows:
        raise UserError(f"{path}: the file has no rows: remove it from the list or write it again")
    return rows


def _missing_column(where: object, column: str, present: Sequence[str]) -> UserError:
    return UserError(f"{where}: no column '{column}' (there are: {', '.join(present) or 'none'})")


def _read_parquet(path: Path, required: Sequence[str]) -> list[SourceRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a readable parquet file ({reason}): write it again") from None
    for column in required:
        if column not in table.column_names:
            raise _missing_column(path, column, table.column_names)
    return [SourceRow(str(path), i, row) for i, row in enumerate(table.to_pylist(), 1)]


def _read_json_lines(path: Path, required: Sequence[str]) -> Iterator[SourceRow]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not line:
                    continue
                row = json.loads(line)
            except UnicodeDecodeError:
                raise UserError(f"{path}, line {number}: not UTF-8 text: save the file as UTF-8") from None
            except (json.JSONDecodeError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: broken JSON ({error}): every line is one object") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
            for column in required:
                if column not in row:
                    raise _missing_column(f"{path}, line {number}", column, list(row))
            yield SourceRow(str(path), number, row)


# --- text to token ids ------------------------------------------------------------------------------------


def resolve_chat_template(template: str | None) -> str | None:
    """The Jinja text of `model.chat_template`, which is inline or the path of a file. None stays None."""
    if template is None or "{" in template or "\n" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise UserError(f"model.chat_template: file not found: {path} (inline templates contain '{{')")
    return path.read_text(encoding="utf-8")


def check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    """Chat messages as plain role/content dicts. Keys that are null (parquet fills structs) are dropped."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: chat messages must be a non-empty list of {{role, content}}")
    cleaned = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise UserError(f"{where}: a chat message must be {{role, content}}, got {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UserError(f"{where}: a chat message has no text under '{key}'")
        cleaned.append({key: value for key, value in message.items() if value is not None})
    return cleaned


class PromptEncoder:
    """Texts and chats to token ids, with exactly one BOS where the tokenizer wants one.

    Chats go through the chat template, which writes its own special tokens; nothing is added to its output.
    Plain strings get the tokenizer's BOS unless they already begin with it, and never an EOS.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = resolve_chat_template(chat_template)
        # An empty text shows what the tokenizer adds; flags like add_bos_token exist in some classes only.
        added = list(tokenizer("", add_special_tokens=True)["input_ids"])
        bos = tokenizer.bos_token_id
        self._bos = bos if bos is not None and added[:1] == [bos] else None

    def render(self, prompt: Any, where: str) -> str:
        """Prompt as text. A chat is rendered up to where the assistant begins to speak."""
        if isinstance(prompt, str):
            return _check_text(prompt, where)
        return self.render_chat(check_messages(prompt, where), where, generation_prompt=True)

    def render_chat(self, messages: list[dict[str, str]], where: str, *, generation_prompt: bool) -> str:
        """Chat messages as text. Raises UserError without a template, or when the template refuses them."""
        if self.chat_template is None and not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                f"{where}: the prompt is a chat but the tokenizer has no chat template: "
                "set model.chat_template or use plain strings as prompts"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except Exception as error:  # jinja errors, or raise_exception() inside the template
            reason = " ".join(str(error).split())
            raise UserError(f"{where}: the chat template failed ({type(error).__name__}: {reason})") from None
        return _check_text(text, where)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, nothing added."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), TOKENIZE_CHUNK):
            chunk = list(texts[start : start + TOKENIZE_CHUNK])
            encoded = self.tokenizer(chunk, add_special_tokens=False, padding=False, truncation=False, verbose=False)
            ids.extend([int(token) for token in sample] for sample in encoded["input_ids"])
        return ids

    def encode_prompts(self, texts: Sequence[str], are_chats: Sequence[bool]) -> list[list[int]]:
        """Token ids of rendered prompts; plain ones get their BOS."""
        ids = self.encode(texts)
        for sample, is_chat in zip(ids, are_chats, strict=True):
            if not is_chat and self._bos is not None and sample[:1] != [self._bos]:
                sample.insert(0, self._bos)
        return ids


def _check_text(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: the text has a lone surrogate, which no tokenizer can read") from None
    return text


# --- data set ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt. `index` is its place: `dataset[row.index] is row`; `source` is file and row."""

    index: int
    prompt_ids: list[int]
    prompt_text: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class LengthReport:
    """What the length filter did, in prompts; `longest` (of all that were read) and `limit` in tokens."""

    total: int
    kept: int
    dropped: int
    longest: int
    limit: int

    @property
    def notable(self) -> bool:
        """Is there something that the user should know?"""
        return self.dropped > 0

    def __str__(self) -> str:
        kept = f"{self.kept} of {self.total} prompts kept, longest {self.longest} tokens"
        return f"{kept}; {self.dropped} dropped as longer than {self.limit} tokens" if self.dropped else kept


class PromptDataset(Sequence[PromptRow]):
    """Prompts of some files, tokenised, at most `max_prompt_length` tokens each.

    Args:
        files: parquet or JSONL files.
        prompt_key: column with chat messages or a string.
        filter_overlong: True drops longer prompts (see `report`); False makes the first one an error.
        chat_template: Jinja text or its file; None: the tokenizer's own.
        max_samples: read only the first so many rows (before the length filter); None: all.

    Raises UserError for whatever is wrong with files or rows, and when no prompt is left.
    """

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int,
        filter_overlong: bool = True,
        chat_template: str | None = None,
        max_samples: int | None = None,
    ) -> None:
        if max_samples is not None and max_samples < 1:
            raise UserError(f"data.val_max_samples is {max_samples}: use at least 1, or null for all")
        sources = read_source_rows(files, required=(prompt_key,))[:max_samples]
        encoder = PromptEncoder(tokenizer, chat_template)
        texts = [encoder.render(row.data[prompt_key], row.where) for row in sources]
        are_chats = [not isinstance(row.data[prompt_key], str) for row in sources]
        all_ids = encoder.encode_prompts(texts, are_chats)

        self._rows: list[PromptRow] = []
        for source, text, ids in zip(sources, texts, all_ids, strict=True):
            if not ids:
                raise UserError(f"{source.where}: the prompt is empty: remove the row or fill '{prompt_key}'")
            if len(ids) <= max_prompt_length:
                self._rows.append(_prompt_row(len(self._rows), source, text, ids))
            elif not filter_overlong:
                raise UserError(
                    f"{source.where}: the prompt has {len(ids)} tokens but data.max_prompt_length is "
                    f"{max_prompt_length}: raise it or set data.filter_overlong_prompts=true"
                )
        longest = max(map(len, all_ids))
        kept = len(self._rows)
        self.report = LengthReport(len(sources), kept, len(sources) - kept, longest, max_prompt_length)
        if not self._rows:
            raise UserError(
                f"{sources[0].file}: no prompt is left: all {len(sources)} are longer than "
                f"data.max_prompt_length={max_prompt_length} (shortest: {min(map(len, all_ids))}): raise it"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def _prompt_row(index: int, source: SourceRow, text: str, ids: list[int]) -> PromptRow:
    return PromptRow(index=index, prompt_ids=ids, prompt_text=text, **row_facts(source))


def row_facts(source: SourceRow) -> dict[str, Any]:
    """`data_source`, `ground_truth`, `extra_info` and `source` of a row, whatever else it holds."""
    reward_model = _mapping(source, "reward_model")
    data_source = source.data.get("data_source")
    return {
        "data_source": "unknown" if data_source is None else str(data_source),
        "ground_truth": reward_model.get("ground_truth", source.data.get("ground_truth")),
        "extra_info": dict(_mapping(source, "extra_info")),
        "source": source.where,
    }


def _mapping(source: SourceRow, column: str) -> Mapping[str, Any]:
    value = source.data.get(column)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{source.where}: '{column}' must be a mapping, got {type(value).__name__}")
    return value


# --- order ------------------------------------------------------------------------------------------------


class PromptSampler:
    """Endless batches of indices into a data set of `n` rows.

    The order of an epoch is a pure function of (seed, epoch), and the batch of a step a pure function of
    the step, so the only state to save is the number of consumed steps. The last `n % batch_size` rows of
    an epoch's order are left out of that epoch (with `shuffle`, others in each epoch).

    Raises UserError when `n < batch_size`: no batch could ever be filled.
    """

    def __init__(self, n: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if n < batch_size:
            raise UserError(
                f"{n} prompts cannot fill one batch of {batch_size}: "
                "lower data.train_batch_size or give more prompts in data.train_files"
            )
        self.n, self.batch_size, self.seed, self.shuffle = n, batch_size, seed, shuffle
        self.steps_per_epoch = n // batch_size
        self._cached: tuple[int, list[int]] = (-1, [])

    def order(self, epoch: int) -> list[int]:
        """The permutation of range(n) for an epoch (0-based)."""
        if self._cached[0] != epoch:
            order = list(range(self.n))
            if self.shuffle:
                # Sorting by random() rather than shuffle(): only random() is promised to stay the same across
                # Python versions, and a resumed run must continue with the same order.
                rng = random.Random(f"{self.seed}:{epoch}")
                keys = [rng.random() for _ in order]
                order.sort(key=keys.__getitem__)
            self._cached = (epoch, order)
        return self._cached[1]

    def batch(self, step: int) -> tuple[int, list[int]]:
        """(epoch, `batch_size` indices) of a step; steps and epochs count from 0."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch_size
        return epoch, self.order(epoch)[start : start + self.batch_size]

    def take(self, position: int, size: int) -> tuple[list[int], int]:
        """Indices of a batch of `size` prompts at or after `position` (prompts since the start), and the next position.

        A batch never crosses the end of an epoch; with one size it is the batch of `batch`.
        """
        start = batch_start(position, size, self.n)
        offset = start % self.n
        return self.order(start // self.n)[offset : offset + size], start + size
