"""The in-process generation engine: a transformers model with our own batched decode loop.

One engine a process; it serves the requests given to it and knows nothing of other ranks. Nothing is kept between
`generate` calls but the weights: the KV cache lives inside a call, so no stale prefix can survive a weight update.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer
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
from megappo.rollout.sampling import row_keys, sample_tokens, seeds_tensor

_PREFILL_TOKENS = 16384  # prompt tokens a forward: bounds the activations, not the result
_COMPACT_BELOW = 0.75  # share of unfinished rows below which finished ones are dropped from the cache
_CUDA_CHECK_EVERY = 8  # steps between looking for finished rows; each look waits for the device


class EmbeddedEngine:
    """`RolloutEngine` on a transformers causal LM, without a hub access: weights come from `update_weights`.

    `max_batch_tokens` bounds rows x (longest prompt + max_new_tokens) of a batch, i.e. the KV cache in tokens.
    `tokenizer` is needed for stop strings only. Raises UserError for models whose layers are not attention layers.
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
        self.device = torch.device(device)
        self.max_batch_tokens = max_batch_tokens
        self.pad_token_id = pad_token_id
        self.tokenizer = tokenizer
        self.vocab_size: int = text_config.vocab_size
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self.model = _build_model(hf_config, dtype, self.device)
        self.weight_version = NO_WEIGHTS
        self._asleep = False
        self._targets, self._aliases = _weight_targets(self.model)
        accepted = inspect.signature(self.model.forward).parameters
        self._cache_argument = (
            "cache" if "cache" in accepted else "past_key_values"
        )  # renamed in transformers 5

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[GenerateRequest], sampling: SamplingParams
    ) -> list[GeneratedSample]:
        """One sample a request, in order. Any number of requests, none included.

        Raises UserError for a request that cannot be served (empty, out-of-range ids, too long), RuntimeError
        without weights and for non-finite logits.
        """
        if not requests:
            return []
        health = self.health()
        if not health.ok:
            raise RuntimeError(f"embedded rollout engine cannot generate: {health.detail}")
        self._check(requests, sampling)
        # Equal prompts become neighbours, and thereby share a prefill.
        order = sorted(
            range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids)
        )
        samples: list[GeneratedSample | None] = [None] * len(requests)
        for batch in _cut(order, requests, sampling.max_new_tokens, self.max_batch_tokens):
            decode = _Decode(self, [requests[i] for i in batch], sampling)
            for i, sample in zip(batch, decode.run(), strict=True):
                samples[i] = sample
        return samples  # type: ignore[return-value]

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> SyncReport:
        """Copy full tensors into the model, in place, casting to its dtype.

        Strict: every weight exactly once, under its Hugging Face checkpoint name; of tied weights one name is
        enough, and a second must bring the same values. A failed update leaves the engine without weights
        (`generate` refuses), never with a mixture of two versions. Raises RuntimeError naming the weight.
        """
        if self._asleep:
            raise RuntimeError("embedded rollout engine is asleep: call wake() before update_weights()")
        started = time.perf_counter()
        self.weight_version = NO_WEIGHTS
        seen: set[str] = set()
        written: set[str] = set()
        n_bytes = 0
        for name, tensor in named_tensors:
            key = self._aliases.get(name, name)
            target = self._targets.get(key)
            if target is None:
                raise RuntimeError(f"weight update: {name} is not a weight of {type(self.model).__name__}")
            if name in seen:
                raise RuntimeError(f"weight update: {name} was sent twice")
            if tensor.shape != target.shape:
                raise RuntimeError(
                    f"weight update: {name} has shape {tuple(tensor.shape)}, the model expects {tuple(target.shape)}"
                )
            if key in written:
                if not torch.equal(tensor.to(target), target):
                    raise RuntimeError(
                        f"weight update: {name} and {key} are tied but were sent with different values"
                    )
            else:
                target.copy_(tensor)
                n_bytes += target.numel() * target.element_size()
            seen.add(name)
            written.add(key)
        missing = [key for key in self._targets if key not in written]
        if missing:
            raise RuntimeError(f"weight update: {len(missing)} weights were not sent, first {missing[0]}")
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
        for storage in self._storages():
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate the weights' memory again; `update_weights` fills it."""
        if not self._asleep:
            return
        for storage, n_bytes in self._storages().items():
            storage.resize_(n_bytes)
        self._asleep = False

    def health(self) -> EngineHealth:
        """Whether `generate` would work now."""
        if self._asleep:
            return EngineHealth(False, "asleep: call wake() and update_weights()", self.weight_version)
        if self.weight_version == NO_WEIGHTS:
            return EngineHealth(False, "no weights: call update_weights()", self.weight_version)
        return EngineHealth(True, "ready", self.weight_version)

    def _storages(self) -> dict[torch.UntypedStorage, int]:
        """Storage -> size in bytes, for all weights (tied ones once). The views in `_targets` stay valid."""
        sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for tensor in self.model.state_dict().values():
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = (storage, tensor.numel() * tensor.element_size())
        return dict(sizes.values())

    def _check(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError("rollout.stop needs a tokenizer, and this engine was built without one")
        for request in requests:
            where, ids = f"sample {request.sample_id}", request.prompt_ids
            if not ids:
                raise UserError(f"{where}: the prompt is empty; give at least one token")
            if min(ids) < 0 or max(ids) >= self.vocab_size:
                bad = min(ids) if min(ids) < 0 else max(ids)
                raise UserError(
                    f"{where}: prompt token id {bad} is outside the vocabulary of {self.vocab_size}"
                )
            total = len(ids) + sampling.max_new_tokens
            if self.max_positions is not None and total > self.max_positions:
                raise UserError(
                    f"{where}: {len(ids)} prompt tokens + {sampling.max_new_tokens} new ones exceed the model's "
                    f"max_position_embeddings {self.max_positions}; lower data.max_response_length"
                )
            if total > self.max_batch_tokens:
                raise UserError(
                    f"{where}: {len(ids)} prompt tokens + {sampling.max_new_tokens} new ones exceed "
                    f"rollout.max_batch_tokens {self.max_batch_tokens}; raise it"
                )

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
        """Logits `[rows, vocab]` of the last column of `ids` `[rows, new]`; `mask` `[rows, cached + new]`."""
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        return out.logits[:, -1]


def _check_layers(text_config: PreTrainedConfig) -> None:
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"model: the embedded rollout engine cannot run {text_config.model_type} with layers of type "
            f"{', '.join(sorted(unknown))}; only full and sliding-window attention are supported"
        )


def _build_model(hf_config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with uninitialised weights.

    Built on the device with weight initialisation switched off rather than on the meta device: buffers that no
    checkpoint holds (rotary frequencies) then get their values from the modules' own constructors.
    """
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf_config), dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    model.tie_weights()  # part of the initialisation that was switched off
    return model.eval().requires_grad_(False)


def _weight_targets(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(checkpoint name -> tensor to copy into, name of a tied weight -> name of the tensor it shares).

    transformers keeps a layer's experts in two fused tensors; checkpoints hold them one by one (`experts.3.up_proj`),
    so each expert is offered as a view.
    """
    targets: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    owner: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        first = owner.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if first != name:
            aliases[name] = first
        elif name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            for e, expert in enumerate(tensor):
                gate, up = expert.chunk(2, dim=0)
                targets[f"{prefix}.{e}.gate_proj.weight"] = gate
                targets[f"{prefix}.{e}.up_proj.weight"] = up
        elif name.endswith(".experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            targets |= {f"{prefix}.{e}.down_proj.weight": expert for e, expert in enumerate(tensor)}
        else:
            targets[name] = tensor
    return targets, aliases


def _cut(
    order: list[int], requests: Sequence[GenerateRequest], max_new_tokens: int, max_batch_tokens: int
) -> list[list[int]]:
    """Cut `order` (by rising prompt length) into batches of at most `max_batch_tokens` tokens, padding included."""
    batches: list[list[int]] = [[]]
    for i in order:
        width = len(requests[i].prompt_ids) + max_new_tokens
        if batches[-1] and (len(batches[-1]) + 1) * width > max_batch_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches
