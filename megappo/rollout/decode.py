"""The decode loop of the embedded engine: one batch of prompts in, samples out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from megappo.rollout.base import GeneratedSample, GenerateRequest, SamplingParams
from megappo.rollout.sampling import row_keys, sample_tokens, seeds_tensor

class _CacheLayer(DynamicLayer):
    """Keys and values of one layer in buffers of full length, allocated once: a step copies one column.

    transformers' dynamic layer copies the whole cache every step, its static one attends over the full length.
    Sliding-window layers use it too: the window is in the mask.
    """

    def __init__(self, rows: int, capacity: int, length: int) -> None:
        super().__init__()
        self.rows, self.capacity, self.length = rows, capacity, length

    def _buffer(self, like: Tensor) -> Tensor:
        _, heads, _, dim = like.shape
        return like.new_empty(self.rows, heads, self.capacity, dim)

    def fill(self, first: int, index: Tensor, source: DynamicLayer) -> None:
        """Write rows `first...` : row `first + j` gets row `index[j]` of a prefilled layer, right-aligned."""
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = (
                self._buffer(source.keys),
                self._buffer(source.values),
                True,
            )
        rows = slice(first, first + len(index))
        start = self.length - source.keys.shape[2]
        for buffer, new in ((self.keys, source.keys), (self.values, source.values)):
            buffer[rows, :, :start] = 0  # masked, but a NaN in uninitialised memory would survive the mask
            buffer[rows, :, start : self.length] = new.index_select(0, index)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def select(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self.rows = len(rows)
        keys, values = self._buffer(self.keys), self._buffer(self.values)
        keys[:, :, : self.length] = self.keys[:, :, : self.length].index_select(0, rows)
        self.keys = keys  # the old buffer goes before the next one is filled
        values[:, :, : self.length] = self.values[:, :, : self.length].index_select(0, rows)
        self.values = values


@dataclass(slots=True)
class _Rows:
    """State of the rows still in the cache, all on the device. `slot` is a row's place in the batch."""

    slot: Tensor  # int64 [rows]
    keys: Tensor  # int64 [rows, max_new_tokens]: random keys
    positions: Tensor  # int64 [rows, 1]: position of the token to be fed next
    alive: Tensor  # bool [rows]
    mask: (
        Tensor | None
    )  # bool [rows, capacity]: True where the cache holds no padding; None if it holds none at all

    def select(self, rows: Tensor) -> _Rows:
        mask = None if self.mask is None else self.mask[rows]
        return _Rows(self.slot[rows], self.keys[rows], self.positions[rows], self.alive[rows], mask)


class _Decode:
    """One batch, from prompts to samples."""

    def __init__(
        self, engine: EmbeddedEngine, requests: list[GenerateRequest], sampling: SamplingParams
    ) -> None:
        self.engine, self.requests, self.sampling = engine, requests, sampling
        self.device = engine.device
        self.prompt_width = max(len(r.prompt_ids) for r in requests)
        n, new = len(requests), sampling.max_new_tokens
        self.tokens = torch.zeros(n, new, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(n, new, dtype=torch.float32, device=self.device)
        self.lengths = torch.zeros(n, dtype=torch.int64, device=self.device)
        self.stopped = torch.zeros(n, dtype=torch.bool, device=self.device)
        self.stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self.device)
        self.matcher = (
            _StopStrings(engine.tokenizer, sampling.stop_strings) if sampling.stop_strings else None
        )
        self.cache = Cache(layer_class_to_replicate=DynamicLayer)  # replaced by `_prefill`

    def run(self) -> list[GeneratedSample]:
        logits, rows = self._prefill(), self._rows()
        check_every = 1 if self.device.type == "cpu" else _CUDA_CHECK_EVERY
        for step in range(self.sampling.max_new_tokens):
            chosen = self._choose(step, logits, rows)
            if step + 1 == self.sampling.max_new_tokens:
                break
            if (step + 1) % check_every == 0:
                n_alive = int(rows.alive.sum())
                if n_alive == 0:
                    break
                if n_alive < _COMPACT_BELOW * len(rows.alive):
                    keep = rows.alive.nonzero().squeeze(1)
                    rows, chosen = rows.select(keep), chosen[keep]
                    for layer in self.cache.layers:
                        layer.select(keep)
            width = self.prompt_width + step + 1
            mask = None if rows.mask is None else rows.mask[:, :width]
            logits = self.engine._forward(chosen.unsqueeze(1), mask, rows.positions, self.cache)
            rows.positions += 1
        return self._samples()

    def _rows(self) -> _Rows:
        lengths = torch.tensor([len(r.prompt_ids) for r in self.requests], device=self.device)
        n, new = len(self.requests), self.sampling.max_new_tokens
        steps = torch.arange(new, device=self.device)
        keys = row_keys(seeds_tensor([r.seed for r in self.requests], self.device).unsqueeze(1), steps)
        mask = None
        if len(self.requests[0].prompt_ids) != self.prompt_width:  # requests come sorted by length
            columns = torch.arange(self.prompt_width + new, device=self.device)
            mask = columns >= (self.prompt_width - lengths).unsqueeze(1)
        alive = torch.ones(n, dtype=torch.bool, device=self.device)
        return _Rows(torch.arange(n, device=self.device), keys, lengths.unsqueeze(1), alive, mask)

    def _prefill(self) -> Tensor:
        """Fill the cache with the prompts; logits `[rows, vocab]` after the last prompt token.

        Each distinct prompt is computed once. Chunks of prompts are padded to their own longest.
        """
        chunks: list[list[list[int]]] = [[]]  # distinct prompts
        copies: list[list[int]] = [[]]  # for every row of the chunk, its prompt
        for request in self.requests:
            prompt = request.prompt_ids
            if not (chunks[-1] and chunks[-1][-1] == prompt):
                if chunks[-1] and (len(chunks[-1]) + 1) * len(prompt) > _PREFILL_TOKENS:
                    chunks.append([])
                    copies.append([])
                chunks[-1].append(prompt)
            copies[-1].append(len(chunks[-1]) - 1)
        capacity = self.prompt_width + self.sampling.max_new_tokens - 1  # the last token is never fed
        logits, first, layers = [], 0, []
        for prompts, rows in zip(chunks, copies, strict=True):
            out, prefilled = self._prefill_chunk(prompts)
            index = torch.tensor(rows, device=self.device)
            if not layers:
                layers = [
                    _CacheLayer(len(self.requests), capacity, self.prompt_width) for _ in prefilled.layers
                ]
            for layer, source in zip(layers, prefilled.layers, strict=True):
                layer.fill(first, index, source)
            logits.append(out.index_select(0, index))
            first += len(rows)
        self.cache = Cache(layers=layers)
        return torch.cat(logits)

    def _prefill_chunk(self, prompts: list[list[int]]) -> tuple[Tensor, Cache]:
        width = len(prompts[-1])
        pad = self.engine.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
        padding = torch.tensor([width - len(p) for p in prompts], device=self.device).unsqueeze(1)
        columns = torch.arange(width, device=self.device)
        positions = (columns - padding).clamp_(min=0)
        mask = columns >= padding if len(prompts[0]) != width else None
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        return self.engine._forward(ids, mask, positions, cache), cache

    def _choose(self, step: int, logits: Tensor, rows: _Rows) -> Tensor:
        """Sample a token for every row, record those of unfinished rows, mark the rows that end with it."""
        chosen, logprobs = sample_tokens(logits, rows.keys[:, step], self.sampling)
        self.tokens[rows.slot, step] = chosen
        self.logprobs[rows.slot, step] = logprobs
        self.lengths[rows.slot] += rows.alive  # what finished rows go on to produce lies beyond their length
        ends = torch.zeros_like(rows.alive)
        if len(self.stop_ids):
            ends |= (chosen.unsqueeze(1) == self.stop_ids).any(1)
        if self.matcher is not None:
            first = max(0, step + 1 - self.matcher.window)
            ends |= self.matcher.match(self.tokens[rows.slot, first : step + 1], rows.alive)
        rows.alive &= ~ends
        self.stopped[rows.slot] = ~rows.alive
        return chosen

    def _samples(self) -> list[GeneratedSample]:
        within = torch.arange(self.tokens.shape[1], device=self.device) < self.lengths.unsqueeze(1)
        bad = (within & ~self.logprobs.isfinite()).any(1)
        if bool(bad.any()):
            sample = self.requests[int(bad.nonzero()[0])].sample_id
            raise RuntimeError(
                f"generation: non-finite log-probability in sample {sample} (weight version "
                f"{self.engine.weight_version}); the weights hold NaN or infinite values"
            )
        samples = []
        columns = (self.tokens.tolist(), self.logprobs.tolist(), self.lengths.tolist(), self.stopped.tolist())
        for request, tokens, logprobs, length, stopped in zip(self.requests, *columns, strict=True):
            samples.append(
                GeneratedSample(
                    sample_id=request.sample_id,
                    group_id=request.group_id,
                    prompt_ids=request.prompt_ids,
                    response_ids=tokens[:length],
                    logprobs=logprobs[:length],
                    finish_reason="stop" if stopped else "length",
                    weight_version=self.engine.weight_version,
                )
            )
        return samples


class _StopStrings:
    """Finds stop strings in the decoded text of the last few tokens.

    Earlier windows held no match, so a match in this one is new. Each token adds at least a byte of text, so a
    window of as many tokens as the longest string has bytes holds any match; the extra tokens keep what decoding
    does at the start of a text (a split character, a stripped space) away from it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        self.window = max(len(s.encode()) for s in strings) + 8

    def match(self, tokens: Tensor, alive: Tensor) -> Tensor:
        """bool `[rows]` from the last tokens `[rows, <= window]` of every row; finished rows give False."""
        index = alive.nonzero().squeeze(1)
        texts = self.tokenizer.batch_decode(
            tokens[index].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        found = [any(s in text for s in self.strings) for text in texts]
        result = torch.zeros_like(alive)
        result[index] = torch.tensor(found, dtype=torch.bool, device=alive.device)
        return result
