"""ModelEngine: one role (actor, critic, reference, reward) in one parallel layout, behind three verbs:
`forward`, `train_step`, `stream_weights`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.algorithms.aggregate import BatchCounts, token_weights
from megappo.bridge.megatron import MegatronWeights, load_weights, stream_full_tensors
from megappo.checkpoint.hf import HFReader
from megappo.config.schema.optim import OptimConfig
from megappo.data.batch import Placement, RolloutBatch
from megappo.engine.losses import Loss, LossOutput
from megappo.engine.micro import MicroBatch, RowFormat, prepare
from megappo.engine.offload import Offloadable
from megappo.engine.optimizer import RoleOptimizer
from megappo.models.build import build_model
from megappo.models.spec import ModelSpec
from megappo.parallel import backend, vocab
from megappo.parallel.groups import parallel_context
from megappo.parallel.layout import ParallelLayout
from megappo.parallel.reduce import sum_of_parts

Want = Literal["logprobs", "values"]
_VALUE_HEAD = frozenset({"score.weight", "score.bias"})


@dataclass(frozen=True)
class EngineOptions:
    """How a role computes. `temperature` (> 0, at the start) divides policy logits; a critic ignores it.

    `offload`: what moves to the host while the role is idle: nothing, optimizer state and gradients, or parameters too.
    """

    critic: bool = False
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    recompute: Literal["selective", "full"] | None = None
    distributed_optimizer: bool = True
    router_aux_loss_coef: float = 0.0
    offload: Literal["none", "optimizer", "all"] = "none"


@dataclass
class StepStats:
    """One optimizer step: metric sums and maxima of this rank (reduce over ranks!), the same step result on all.

    `suspects`: after a step that was not applied, the samples (indices into the batch's `info`) of this rank's
    micro-batches whose loss is not finite.
    """

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    lr: float
    applied: bool
    suspects: tuple[int, ...] = ()


class ModelEngine:
    """One role in its layout. Construction and every method are collective over all ranks of the run.

    A rank outside the layout holds nothing of the role: its `member` is False, its calls return empty results.
    A trained role passes `optim` and `total_steps` (optimizer steps of the whole run, for the learning rate).
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: ParallelLayout,
        options: EngineOptions,
        *,
        optim: OptimConfig | None = None,
        total_steps: int = 1,
    ):
        self.spec, self.layout, self.options = spec, layout, options
        self.temperature = options.temperature  # may change between calls
        self.device = backend.device()
        self.context = parallel_context(layout)
        self.thd = backend.use_fused_layers(options.dtype)
        self.weights = MegatronWeights(spec, layout, critic=options.critic, fused=self.thd)
        self.member = self.context.member
        self.trained = optim is not None
        self.optimizer: RoleOptimizer | None = None
        self.chunks: list = []
        self.models: list = []
        if self.member:
            with self.context:
                self._build(optim, total_steps)
        self._weights_memory = Offloadable(self._weight_tensors())
        self._training_memory: list[Offloadable] = []

    # -------------------------------------------------------------- construction
    def _build(self, optim: OptimConfig | None, total_steps: int) -> None:
        self.chunks = build_model(
            self.spec,
            self.context,
            self.options.dtype,
            critic=self.options.critic,
            recompute=self.options.recompute,
            aux_loss_coeff=self.options.router_aux_loss_coef if optim is not None else 0.0,
        )
        self.config = self.chunks[0].config
        self.models = self._freeze() if optim is None else self._wrap(optim, total_steps)

    def _freeze(self) -> list:
        for chunk in self.chunks:
            chunk.requires_grad_(False).eval()
        return self.chunks

    def _wrap(self, optim: OptimConfig, total_steps: int) -> list:
        from megatron.core import optimizer as optimizer_module
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=self.options.distributed_optimizer,
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=False,
        )
        models = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.chunks)
        ]

        def finalize(model, num_tokens=None, **kwargs):
            # Our losses carry their global denominator already: megatron must not divide once more.
            finalize_model_grads(model, None, **kwargs)

        self.config.finalize_model_grads_func = finalize
        with self.context.as_world(optimizer_module):
            self.optimizer = RoleOptimizer(
                optim,
                models,
                dtype=self.options.dtype,
                distributed=self.options.distributed_optimizer,
                total_steps=total_steps,
            )
        return models

    def load_hf(self, reader: HFReader) -> None:
        """Load a Hugging Face folder strictly, each rank reading only the slices that it holds.

        A critic takes the trunk of a policy: its language head is left out, a missing value head stays zero. From a
        reward model it takes the head too, which must then be there (a bias need not: transformers has none).

        Raises:
            UserError: a tensor is missing, unknown or of the wrong shape, or a file is damaged.
        """
        optional = {"lm_head.weight"} if self.options.critic or self.spec.tied_embeddings else set()
        missing_head = _VALUE_HEAD - reader.where.keys() if self.options.critic else frozenset()
        if self.spec.scalar_head:
            missing_head -= {"score.weight"}
        reader.check(self.weights.hf_shapes(), optional | missing_head)
        if not self.member:
            return
        load_weights(self.weights, self.chunks, self.context.rank, reader.read, skip=frozenset(missing_head))
        self.sync_master_weights()

    @torch.no_grad()
    def scale_head(self, mean: float, std: float) -> None:
        """Make a critic's head give (what it gave − mean) / std."""
        for chunk in self.chunks:
            if chunk.post_process:
                chunk.output_layer.bias.sub_(mean).div_(std)
                chunk.output_layer.weight.div_(std)
        self.sync_master_weights()

    def sync_master_weights(self) -> None:
        """After the parameters were set from outside: fp32 master copies must follow, or the next step undoes it."""
        if self.optimizer is not None:
            with self.context:
                self.optimizer.inner.reload_model_params()

    # -------------------------------------------------------------- memory
    def _weight_tensors(self) -> list[Tensor]:
        return [tensor for chunk in self.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]

    def wake(self) -> None:
        """Bring back what `sleep` moved to the host. Idempotent; every use of the role does it by itself."""
        for memory in (self._weights_memory, *self._training_memory):
            memory.reload()
        self._training_memory = []

    def sleep(self) -> int:
        """Move to the host what `offload` allows; returns the device bytes freed on this rank. Idempotent."""
        if self.options.offload == "none":
            return 0
        if self.optimizer is not None and not self._training_memory:
            # Optimizer state appears with the first step, so it is looked up each time.
            state = Offloadable(self.optimizer.tensors())
            gradients = Offloadable((buffer.grad_data for buffer in self._buffers()), keep=False)
            self._training_memory = [state, gradients]
        freed = sum(memory.offload() for memory in self._training_memory)
        if self.options.offload == "all":
            freed += self._weights_memory.offload()
        if freed and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def _buffers(self) -> list:
        """megatron's flat gradient (and parameter) buffers of a trained role."""
        return [b for model in self.models for b in (*model.buffers, *model.expert_parallel_buffers)]

    def stream_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """`(hf_name, full tensor)` of the current weights on every rank. Collective."""
        self._weights_memory.reload()
        yield from stream_full_tensors(self.weights, self.chunks, self.context.rank, dtype)

    # -------------------------------------------------------------- running the model
    def _run(self, batch: RolloutBatch, micro_batches, columns, handle, *, train: bool, at: str = "rows") -> None:
        """Feed micro-batches through megatron's pipeline schedule; `handle(micro, output) → loss` on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        row = RowFormat(
            multiple=self.layout.tp if self.config.sequence_parallel else 1,
            cp=self.layout.cp,
            cp_rank=self.context.coords.cp,
            thd=self.thd,
        )
        micros = [prepare(batch, samples, columns, row, self.device, at) for samples in micro_batches]

        def forward_step(iterator, model):
            micro = next(iterator)
            extra = self._router_padding(micro, model) if self.balances_experts else {}
            output = model(micro.tokens, None, None, packed_seq_params=micro.packed, **extra)

            def loss_func(out):
                loss = handle(micro, out)
                return loss, torch.zeros((), dtype=torch.int, device=self.device), {}

            return output, loss_func

        iterators = [iter(micros) for _ in self.models]
        interleaved = len(self.models) > 1
        with self.context, torch.set_grad_enabled(train):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if interleaved else iterators[0],
                model=self.models if interleaved else self.models[0],
                num_microbatches=len(micros),
                seq_length=micros[0].tokens.shape[1],
                micro_batch_size=1,
                forward_only=not train,
            )

    @property
    def balances_experts(self) -> bool:
        """Is the router's auxiliary loss on?"""
        return self.optimizer is not None and bool(self.spec.moe) and self.options.router_aux_loss_coef > 0

    def _router_padding(self, micro: MicroBatch, model) -> dict[str, Tensor]:
        """Padding must not count in the experts' load. megatron scatters the mask itself, on the first stage only."""
        from megatron.core.utils import unwrap_model

        padding = micro.padding
        if self.config.sequence_parallel and not unwrap_model(model).pre_process:
            padding = padding.chunk(self.layout.tp, dim=1)[self.context.coords.tp]
        return {"padding_mask": padding}

    def _rows(self, micro: MicroBatch, output: Tensor) -> Tensor:
        """The output (hidden states of a policy, values of a critic) at the rows that are scored."""
        if self.options.critic:
            return output.reshape(-1)[micro.rows]
        return self.chunks[-1].enter_head(output)[micro.rows]

    def _lasts(self, micro: MicroBatch, output: Tensor) -> Tensor:
        """The scalar head's output `[samples]` at the last token of every sample, on every context-parallel rank."""
        values = output.reshape(-1)
        lasts = values.new_zeros(len(micro.samples)).index_copy(0, micro.last_places, values[micro.last])
        return sum_of_parts(lasts, self.context.cp_group) if self.layout.cp > 1 else lasts

    def _head_options(self) -> dict:
        return {
            "vocab_size": self.spec.vocab_size,
            "temperature": self.temperature,
            "group": self.context.tp_group,
        }

    def forward(self, batch: RolloutBatch, micro_batches: list[list[int]], want: Want) -> dict[str, Tensor]:
        """Score every trained token held here, without gradients.

        Returns:
            `{"logprobs"}` or `{"values", "last_values"}`: fp32 columns `[total local tokens]`, zero where the loss
            mask is; `last_values` `[local samples]` is V after the last token.
        """
        self._weights_memory.reload()
        result = torch.zeros(len(batch["tokens"]) + len(batch.indices), device=self.device)
        columns, lasts = result[: len(batch["tokens"])], result[len(batch["tokens"]) :]
        position = {int(s): i for i, s in enumerate(batch.indices)}

        def handle(micro: MicroBatch, output: Tensor) -> Tensor:
            picked = self._rows(micro, output)
            if want == "logprobs":
                picked, _ = vocab.token_logprobs(
                    picked, self.chunks[-1].head_weight(), micro.targets, **self._head_options()
                )
            elif micro.last_samples:
                lasts[[position[s] for s in micro.last_samples]] = output.reshape(-1)[micro.last].float()
            columns[micro.index.to(self.device)] = picked.float()
            return torch.zeros((), device=self.device)

        if self.member:
            for chunk in self.chunks:
                chunk.eval()
            self._run(batch, micro_batches, (), handle, train=False)
            result = self._share_with_replica(result)
        result = result.cpu()
        columns, lasts = result[: len(batch["tokens"])], result[len(batch["tokens"]) :]
        return {"logprobs": columns} if want == "logprobs" else {"values": columns, "last_values": lasts}

    def _share_with_replica(self, result: Tensor) -> Tensor:
        """Each context-parallel rank filled its tokens, on the last stage only; all ranks of the replica get them."""
        if self.layout.cp > 1 and self.context.is_last_stage:
            dist.all_reduce(result, group=self.context.cp_group)
        if self.layout.pp > 1:
            dist.broadcast(result, src=self.context.last_stage_rank, group=self.context.pp_group)
        return result

    # -------------------------------------------------------------- training
    def train_step(
        self,
        batch: RolloutBatch,
        mini_batch,
        micro_batches: list[list[int]],
        loss: Loss,
        *,
        agg_mode: str,
        norm_length: int | None = None,
    ) -> StepStats | None:
        """One optimizer step on the samples `mini_batch` (global indices), of which this rank runs `micro_batches`.

        The denominators of the loss come from the metadata of the whole mini-batch, so the result does not depend
        on how it is divided over ranks and micro-batches. None on a rank outside the layout.
        """
        if not self.member:
            return None
        self.wake()
        _weigh(batch, np.asarray(mini_batch), agg_mode, norm_length)
        sums = {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in loss.sums}
        maxima = {name: torch.full_like(s, -torch.inf) for s in sums.values() for name in loss.maxima}

        # A loss of whole samples is the same on all context-parallel ranks: one of them reports it.
        counted = loss.at == "rows" or self.context.coords.cp == 0

        def collect(part: LossOutput) -> Tensor:
            for name in loss.sums if counted else ():
                sums[name] += part.sums[name]
            for name in loss.maxima:
                maxima[name] = torch.maximum(maxima[name], part.maxima[name])
            return part.loss

        tokens = int(batch.info.length[mini_batch].sum())
        losses: list[tuple[list[int], Tensor]] = []

        def handle(micro: MicroBatch, output: Tensor) -> Tensor:
            scored = self._rows if loss.at == "rows" else self._lasts
            part = self._loss(micro, scored(micro, output), loss, collect)
            losses.append((micro.samples, part.detach()))
            return part * tokens if self.balances_experts else part

        if self.balances_experts:
            # megatron adds up (auxiliary loss of a micro-batch x its tokens): 1/tokens makes that a mean, and is
            # undone for our own loss, to which megatron applies it too.
            self.config.grad_scale_func = lambda x: x / tokens
        for chunk in self.chunks:
            chunk.train()
        with self.context:
            self.optimizer.zero_grad()
        self._run(batch, micro_batches, (*loss.columns, "weights", "token_share"), handle, train=True, at=loss.at)
        with self.context:
            step = self.optimizer.step()
        broken = [] if step.applied else [s for samples, part in losses if not part.isfinite().all() for s in samples]
        return StepStats(
            {name: float(value) for name, value in sums.items()},
            {name: float(value) for name, value in maxima.items()},
            step.grad_norm,
            step.lr,
            step.applied,
            tuple(broken),
        )

    def _loss(self, micro: MicroBatch, rows: Tensor, loss: Loss, collect) -> Tensor:
        if self.options.critic:
            return collect(loss(rows, None, micro.columns, micro.cu_rows))
        weight = self.chunks[-1].head_weight()
        if loss.token_local:

            def part(logprobs, entropy, start, stop):
                columns = {name: column[start:stop] for name, column in micro.columns.items()}
                return collect(loss(logprobs, entropy, columns, None))

            total, _, _ = vocab.fused_token_loss(
                rows, weight, micro.targets, part, want_entropy=loss.want_entropy, **self._head_options()
            )
            return total
        logprobs, entropy = vocab.token_logprobs(
            rows, weight, micro.targets, want_entropy=loss.want_entropy, **self._head_options()
        )
        return collect(loss(logprobs, entropy, micro.columns, micro.cu_rows))

    # -------------------------------------------------------------- who reports
    @property
    def reports(self) -> bool:
        """True on the ranks whose metric sums count: each context-parallel part of each replica once."""
        return self.member and self.context.coords.tp == 0 and self.context.is_last_stage

    @property
    def primary(self) -> bool:
        """True on one rank of each replica: whoever adds up what its samples hold counts each sample once."""
        c = self.context.coords
        return self.member and (c.tp, c.cp, c.pp) == (0, 0, 0)

    @property
    def dp_rank(self) -> int | None:
        """This rank's replica, None outside the layout."""
        return self.context.coords.dp if self.member else None

    def placement(self, owner) -> Placement:
        """Samples spread over this role's data-parallel replicas."""
        return Placement(self.layout, owner)


def _weigh(batch: RolloutBatch, mini_batch: np.ndarray, agg_mode: str, norm_length: int | None) -> None:
    """`weights` and `token_share` of the policy's tokens, and `sft_weights` of the examples to imitate, if any.

    The two kinds of samples are in each other's denominators nowhere: a policy's loss is what it is without examples.
    """
    info, mask = batch.info, batch["loss_mask"]
    imitated = info.sft[mini_batch]
    if imitated.any():
        per_sample = torch.from_numpy(info.sft[batch.indices])
        sft = torch.repeat_interleave(per_sample, batch.cu_seqlens.diff()) & mask
        batch["sft_weights"] = sft.float() / max(1, int(info.trainable[mini_batch][imitated].sum()))
        mask = mask & ~sft
    trainable = info.trainable[mini_batch][~imitated]
    counts = BatchCounts(tokens=int(trainable.sum()), sequences=int((trainable > 0).sum()))
    batch["weights"] = token_weights(mask, batch.cu_seqlens, agg_mode, counts, norm_length=norm_length)
    batch["token_share"] = mask.float() / max(1, counts.tokens)
