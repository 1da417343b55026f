"""The in-process generation engine: a transformers model with our own batched decode loop.

One engine a process; it serves the requests given to it and knows nothing of other ranks. Nothing is kept
between `generate` calls but the weights: the KV cache lives inside a call, so no stale prefix can survive a
weight update.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from megappo.errors import UserError
from megappo.rollout.base import (
    NO_WEIGHTS,
    EngineHealth,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
    SyncReport,
)
from megappo.rollout.decode import Decode, DecoderModel


class EmbeddedEngine:
    """`RolloutEngine` on a transformers causal LM; never contacts a hub, weights come by `update_weights`.

    `max_batch_tokens` bounds rows x (longest prompt + max_new_tokens) of a batch: the KV cache, in tokens.
    `tokenizer` serves stop strings only. Raises UserError for models with layers other than attention.
    """

    def __init__(
        self,
        hf_config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_batch_tokens: int,
        pad_token_id: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        text_config = hf_config.get_text_config()
        _check_layers(text_config)
        self.vocab_size: int = text_config.vocab_size
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        if not 0 <= pad_token_id < self.vocab_size:
            raise UserError(f"pad_token_id is {pad_token_id}: give an id of the vocabulary of {self.vocab_size}")
        self.device = torch.device(device)
        self.max_batch_tokens = max_batch_tokens
        self.tokenizer = tokenizer
        self.model = _build_model(hf_config, dtype, self.device)
        self.weight_version = NO_WEIGHTS
        self._decoder = DecoderModel(self.model, self.device, pad_token_id)
        self._targets, self._aliases = _weight_targets(self.model)
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in self.model.state_dict().values())}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._asleep = False

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[GeneratedSample]:
        """One sample a request, in order. Any number of requests, none included.

        Raises UserError for a request that cannot be served (empty, ids outside the vocabulary, too long),
        RuntimeError without weights and for non-finite logits.
        """
        if not requests:
            return []
        health = self.health()
        if not health.ok:
            raise RuntimeError(f"embedded rollout engine cannot generate: {health.detail}")
        self._check(requests, sampling)

        # Equal prompts become neighbours and thereby share a prefill.
        def length_then_prompt(i: int) -> tuple[int, list[int]]:
            return len(requests[i].prompt_ids), requests[i].prompt_ids

        order = sorted(range(len(requests)), key=length_then_prompt)
        lengths = [len(requests[i].prompt_ids) + sampling.max_new_tokens for i in order]
        samples: dict[int, GeneratedSample] = {}
        for begin, end in _cut(lengths, self.max_batch_tokens):
            batch = order[begin:end]
            decode = Decode(self._decoder, [requests[i] for i in batch], sampling, self.tokenizer)
            samples.update(zip(batch, decode.run(self.weight_version), strict=True))
        return [samples[i] for i in range(len(requests))]

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Copy full tensors into the model, in place, casting to its dtype.

        Strict: every weight exactly once, under its Hugging Face checkpoint name. Of tied weights one name is
        enough; a second must bring the same values. A failed update leaves the engine without weights
        (`generate` refuses), never with a mixture of versions. Raises RuntimeError naming the weight.
        """
        if self._asleep:
            raise RuntimeError("embedded rollout engine is asleep: call wake() before update_weights()")
        started = time.perf_counter()
        self.weight_version = NO_WEIGHTS
        seen: set[str] = set()
        written: set[str] = set()
        n_bytes = 0
        for name, tensor in named_tensors:
            if name in seen:
                raise RuntimeError(f"weight update: {name} was sent twice")
            seen.add(name)
            key = self._aliases.get(name, name)
            target = self._target(name, key, tensor)
            if key not in written:
                target.copy_(tensor)
                n_bytes += target.numel() * target.element_size()
                written.add(key)
            elif not torch.equal(tensor.to(target), target):
                raise RuntimeError(f"weight update: {name} is tied to {key} but was sent with other values")
        if missing := [key for key in self._targets if key not in written]:
            raise RuntimeError(f"weight update: {len(missing)} weights were not sent, the first is {missing[0]}")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.weight_version = version
        return SyncReport(time.perf_counter() - started, n_bytes, len(seen), version)

    def sleep(self) -> None:
        """Free the weights' memory. Their values are lost: after `wake` they must be sent again."""
        if self._asleep:
            return
        self._asleep = True
        self.weight_version = NO_WEIGHTS
        for storage, _ in self._storages:  # tensors and views stay, without memory behind them
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate the weights' memory again; `update_weights` fills it."""
        if not self._asleep:
            return
        for storage, n_bytes in self._storages:
            storage.resize_(n_bytes)
        self._asleep = False

    def health(self) -> EngineHealth:
        """Whether `generate` would work now."""
        if self._asleep:
            return EngineHealth(False, "asleep: call wake() and update_weights()", self.weight_version)
        if self.weight_version == NO_WEIGHTS:
            return EngineHealth(False, "no weights: call update_weights()", self.weight_version)
        return EngineHealth(True, "ready", self.weight_version)

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing was started."""

    def _target(self, name: str, key: str, tensor: Tensor) -> Tensor:
        target = self._targets.get(key)
        if target is None:
            raise RuntimeError(f"weight update: {name} is not a weight of {type(self.model).__name__}")
        if tensor.shape != target.shape:
            got, want = tuple(tensor.shape), tuple(target.shape)
            raise RuntimeError(f"weight update: {name} has shape {got}, the model expects {want}")
        return target

    def _check(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError("rollout.stop needs a tokenizer, and this engine was built without one")
        for request in requests:
            where, ids = f"sample {request.sample_id}", request.prompt_ids
            if not ids:
                raise UserError(f"{where}: the prompt is empty; give at least one token")
            if min(ids) < 0 or max(ids) >= self.vocab_size:
                bad = min(ids) if min(ids) < 0 else max(ids)
                raise UserError(f"{where}: prompt token {bad} is outside the model's vocabulary of {self.vocab_size}")
            length = f"{len(ids)} prompt tokens + {sampling.max_new_tokens} new ones"
            total = len(ids) + sampling.max_new_tokens
            if self.max_positions is not None and total > self.max_positions:
                raise UserError(
                    f"{where}: {length} exceed the model's max_position_embeddings {self.max_positions}; "
                    "lower data.max_prompt_length or data.max_response_length"
                )
            if total > self.max_batch_tokens:
                raise UserError(f"{where}: {length} exceed rollout.max_batch_tokens {self.max_batch_tokens}; raise it")


def _check_layers(text_config: PreTrainedConfig) -> None:
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"model: the embedded rollout engine cannot run {text_config.model_type} with layers of type "
            f"{', '.join(sorted(unknown))}; it knows full and sliding-window attention"
        )


def _build_model(hf_config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with uninitialised weights.

    Built on the device with weight initialisation switched off rather than on the meta device: buffers that
    no checkpoint holds (rotary frequencies) then get their values from the modules' own constructors.
    """
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config), dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    model.tie_weights()  # part of the initialisation that was switched off
    return model.eval().requires_grad_(False)


def _weight_targets(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(checkpoint name -> tensor to copy into, name of a tied weight -> name of the weight it shares).

    transformers keeps the experts of a layer in two fused tensors; checkpoints hold them one by one
    (`experts.3.up_proj.weight`), so each expert is offered as a view.
    """
    targets: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    owner: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        first = owner.setdefault(tensor.data_ptr(), name)
        prefix, _, leaf = name.rpartition(".")
        if first != name:
            aliases[name] = first
        elif prefix.endswith(".experts") and leaf == "gate_up_proj":
            for e, expert in enumerate(tensor):
                gate, up = expert.chunk(2, dim=0)
                targets[f"{prefix}.{e}.gate_proj.weight"] = gate
                targets[f"{prefix}.{e}.up_proj.weight"] = up
        elif prefix.endswith(".experts") and leaf == "down_proj":
            targets |= {f"{prefix}.{e}.down_proj.weight": expert for e, expert in enumerate(tensor)}
        else:
            targets[name] = tensor
    if model.config.model_type == "mixtral":
        targets = {_mixtral_name(name): tensor for name, tensor in targets.items()}
    return targets, aliases


def _mixtral_name(name: str) -> str:
    """Mixtral's checkpoints name the expert block and its matrices in their own way."""
    block, found, rest = name.partition(".mlp.")
    if not found:
        return name
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        rest = rest.replace(ours, theirs)
    return f"{block}.block_sparse_moe.{rest}"


def _cut(lengths: list[int], budget: int) -> list[tuple[int, int]]:
    """Ranges of rising `lengths` such that rows x longest stays within `budget` (each length does)."""
    cuts: list[tuple[int, int]] = []
    begin = 0
    for i, length in enumerate(lengths):
        if (i - begin + 1) * length > budget:
            cuts.append((begin, i))
            begin = i
    return [*cuts, (begin, len(lengths))]
