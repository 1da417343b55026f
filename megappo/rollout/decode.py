"""The decode loop of the embedded engine: one batch of prompts in, samples out.

Prompts are padded on the left, so that all rows append to the same column of the KV cache. The loop runs
without per-row Python: a step is one forward, one draw for all rows and a few small tensor operations.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from megappo.errors import UserError
from megappo.rollout.base import GeneratedSample, GenerateRequest, SamplingParams
from megappo.rollout.sampling import row_keys, sample_tokens, seeds_tensor

_PREFILL_TOKENS = 16384  # prompt tokens a forward: bounds the activations, not the result
_COMPACT_BELOW = 0.75  # share of unfinished rows below which finished ones are dropped from the cache
_LOOK_EVERY = {"cuda": 8}  # steps between looks for finished rows (else 1): a look waits for the device


class DecoderModel:
    """A transformers causal LM as the loop sees it."""

    def __init__(self, model: nn.Module, device: torch.device, pad_token_id: int) -> None:
        self.model, self.device, self.pad_token_id = model, device, pad_token_id
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # older transformers

    def last_logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
        """Logits `[rows, vocab]` after the last column of `ids` `[rows, new]`; appends to `cache`.

        `mask`: bool `[rows, cached + new]`, False on padding; None: no padding. `positions` as `ids`.
        """
        cache_argument = {self._cache_argument: cache}
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_argument,
        )
        return out.logits[:, -1]


class CacheLayer(DynamicLayer):
    """Keys and values of one layer in buffers of full length, allocated once: a step copies one column.

    transformers' dynamic layer copies the whole cache every step, its static one attends over the full
    length. Sliding-window layers use this one too: the window is in the mask.
    """

    def __init__(self, rows: int, capacity: int, length: int) -> None:
        super().__init__()
        self.rows, self.capacity, self.length = rows, capacity, length

    def _buffer(self, like: Tensor) -> Tensor:
        _, heads, _, dim = like.shape
        return like.new_empty(self.rows, heads, self.capacity, dim)

    def fill(self, first: int, index: Tensor, source: DynamicLayer) -> None:
        """Row `first + j` becomes row `index[j]` of the prefilled layer, right-aligned at `length`."""
        if not self.is_initialized:
            self.keys, self.values = self._buffer(source.keys), self._buffer(source.values)
            self.is_initialized = True
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
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._buffer(old)
            new[:, :, : self.length] = old[:, :, : self.length].index_select(0, rows)
            setattr(self, name, new)


@dataclass(slots=True)
class _Rows:
    """State of the rows still in the cache, on the device. `slot` is a row's place in the batch."""

    slot: Tensor  # int64 [rows]
    keys: Tensor  # int64 [rows, max_new_tokens]: random keys
    positions: Tensor  # int64 [rows, 1]: position of the token to be fed next
    alive: Tensor  # bool [rows]
    mask: Tensor | None  # bool [rows, longest prompt + max_new_tokens]: False on padding; None: no padding

    def select(self, rows: Tensor) -> _Rows:
        mask = None if self.mask is None else self.mask[rows]
        return _Rows(self.slot[rows], self.keys[rows], self.positions[rows], self.alive[rows], mask)


class Decode:
    """Generates one batch. `requests` must come sorted by prompt length; equal neighbours share a prefill."""

    def __init__(
        self,
        model: DecoderModel,
        requests: list[GenerateRequest],
        sampling: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.model, self.requests, self.sampling = model, requests, sampling
        self.device = model.device
        self.prompt_width = len(requests[-1].prompt_ids)
        n, new = len(requests), sampling.max_new_tokens
        self.tokens = torch.zeros(n, new, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(n, new, dtype=torch.float32, device=self.device)
        self.lengths = torch.zeros(n, dtype=torch.int64, device=self.device)
        self.stopped = torch.zeros(n, dtype=torch.bool, device=self.device)
        self.stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self.device)
        self.matcher = StopStrings(tokenizer, sampling.stop_strings) if sampling.stop_strings else None

    def run(self, weight_version: int) -> list[GeneratedSample]:
        """One sample a request, in order. Raises RuntimeError for non-finite logits."""
        logits, layers = self._prefill()
        cache, rows = Cache(layers=layers), self._rows()
        look_every = _LOOK_EVERY.get(self.device.type, 1)
        last = self.sampling.max_new_tokens - 1
        for step in range(last + 1):
            chosen = self._choose(step, logits, rows)
            if step == last:
                break
            if (step + 1) % look_every == 0:
                n_alive = int(rows.alive.sum())
                if n_alive == 0:
                    break
                if n_alive < _COMPACT_BELOW * len(rows.alive):
                    keep = rows.alive.nonzero().squeeze(1)
                    rows, chosen = rows.select(keep), chosen[keep]
                    for layer in layers:
                        layer.select(keep)
            mask = None if rows.mask is None else rows.mask[:, : self.prompt_width + step + 1]
            logits = self.model.last_logits(chosen.unsqueeze(1), mask, rows.positions, cache)
            rows.positions += 1
        return self._samples(weight_version)

    def _rows(self) -> _Rows:
        lengths = torch.tensor([len(r.prompt_ids) for r in self.requests], device=self.device)
        n, new = len(self.requests), self.sampling.max_new_tokens
        seeds = seeds_tensor([r.seed for r in self.requests], self.device)
        keys = row_keys(seeds.unsqueeze(1), torch.arange(new, device=self.device))
        mask = None
        if len(self.requests[0].prompt_ids) != self.prompt_width:
            columns = torch.arange(self.prompt_width + new, device=self.device)
            mask = columns >= (self.prompt_width - lengths).unsqueeze(1)
        alive = torch.ones(n, dtype=torch.bool, device=self.device)
        return _Rows(torch.arange(n, device=self.device), keys, lengths.unsqueeze(1), alive, mask)

    def _prefill(self) -> tuple[Tensor, list[CacheLayer]]:
        """Logits `[rows, vocab]` after the prompts, and the cache that holds them."""
        capacity = self.prompt_width + self.sampling.max_new_tokens - 1  # the last token is never fed
        logits, layers, first = [], [], 0
        for prompts, copies in self._prefill_chunks():
            out, prefilled = self._prefill_chunk(prompts)
            index = torch.tensor(copies, device=self.device)
            if not layers:
                layers = [CacheLayer(len(self.requests), capacity, self.prompt_width) for _ in prefilled.layers]
            for layer, source in zip(layers, prefilled.layers, strict=True):
                layer.fill(first, index, source)
            logits.append(out.index_select(0, index))
            first += len(copies)
        return torch.cat(logits), layers

    def _prefill_chunks(self) -> list[tuple[list[list[int]], list[int]]]:
        """Chunks of (distinct prompts, for each row its prompt), in the order of the requests."""
        chunks: list[tuple[list[list[int]], list[int]]] = [([], [])]
        for request in self.requests:
            prompts, copies = chunks[-1]
            prompt = request.prompt_ids
            if not prompts or prompts[-1] != prompt:
                if prompts and (len(prompts) + 1) * len(prompt) > _PREFILL_TOKENS:
                    prompts, copies = [], []
                    chunks.append((prompts, copies))
                prompts.append(prompt)
            copies.append(len(prompts) - 1)
        return chunks

    def _prefill_chunk(self, prompts: list[list[int]]) -> tuple[Tensor, Cache]:
        """One forward over prompts `[n]`, padded to their own longest (the last)."""
        width, pad = len(prompts[-1]), self.model.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
        padding = torch.tensor([width - len(p) for p in prompts], device=self.device).unsqueeze(1)
        columns = torch.arange(width, device=self.device)
        positions = (columns - padding).clamp_(min=0)
        mask = columns >= padding if len(prompts[0]) != width else None
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        return self.model.last_logits(ids, mask, positions, cache), cache

    def _choose(self, step: int, logits: Tensor, rows: _Rows) -> Tensor:
        """Draw a token for every row, record it, and mark the rows that end with it."""
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

    def _samples(self, weight_version: int) -> list[GeneratedSample]:
        within = torch.arange(self.tokens.shape[1], device=self.device) < self.lengths.unsqueeze(1)
        bad = (within & ~self.logprobs.isfinite()).any(1)
        if bool(bad.any()):
            sample = self.requests[int(bad.nonzero()[0])].sample_id
            raise UserError(
                f"generation: non-finite log-probability in sample {sample}: the policy's weights (version "
                f"{weight_version}) hold NaN or infinite values, or overflow: check the tensors in model.path, "
                "or continue from an earlier checkpoint"
            )
        columns = (self.tokens.tolist(), self.logprobs.tolist(), self.lengths.tolist(), self.stopped.tolist())
        return [
            GeneratedSample(
                sample_id=request.sample_id,
                group_id=request.group_id,
                prompt_ids=request.prompt_ids,
                response_ids=tokens[:length],
                logprobs=logprobs[:length],
                finish_reason="stop" if stopped else "length",
                weight_version=weight_version,
            )
            for request, tokens, logprobs, length, stopped in zip(self.requests, *columns, strict=True)
        ]


class StopStrings:
    """Finds stop strings in the decoded text of the last few tokens.

    Earlier windows held no match, so a match in this one is new. Each token adds at least a byte of text, so
    a window of as many tokens as the longest string has bytes holds any match; the extra tokens keep what
    decoding does at the start of a text (a split character, a stripped space) away from it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        self.window = max(len(s.encode()) for s in strings) + 8

    def match(self, tokens: Tensor, alive: Tensor) -> Tensor:
        """bool `[rows]` from every row's last tokens `[rows, <= window]`; finished rows give False."""
        index = alive.nonzero().squeeze(1)
        texts = self.tokenizer.batch_decode(
            tokens[index].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        found = [any(s in text for s in self.strings) for text in texts]
        result = torch.zeros_like(alive)
        result[index] = torch.tensor(found, dtype=torch.bool, device=alive.device)
        return result
