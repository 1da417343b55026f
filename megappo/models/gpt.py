"""The two models that MegaPPO trains, both megatron-core `GPTModel`s that differ only on the last pipeline stage."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.parallel import backend

backend.install()  # before the first import of megatron-core
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402


class PolicyModel(GPTModel):
    """A language model whose last stage hands on hidden states instead of logits.

    The logits of a long batch do not fit in memory and the loss needs one number from each row, so
    `megappo.parallel.vocab` turns hidden rows into log-probs chunk by chunk, outside the model.
    """

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        return hidden_states

    def head_weight(self) -> Tensor:
        """This TP rank's vocabulary rows `[padded_vocab / tp, hidden]`: the tied embedding or the output layer."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def enter_head(self, hidden: Tensor) -> Tensor:
        """`[tokens (or this rank's slice of them), 1, hidden]` → `[tokens, hidden]` on every TP rank.

        A TP rank's gradient covers only its part of the vocabulary; the backward of this step sums the parts.
        """
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
        return hidden.squeeze(1)


class CriticModel(GPTModel):
    """A transformer with a scalar head. Its embeddings are never tied: there is no vocabulary head to tie to."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            self.output_layer = ValueHead(config, self.pg_collection.tp)

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        return self.output_layer(hidden_states) if self.post_process else hidden_states


class ValueHead(MegatronModule):
    """Linear map of the final hidden state to one fp32 scalar, identical on every tensor-parallel rank.

    Starts at zero: a fresh critic predicts V = 0, so the first advantages are the returns themselves.
    Weight and bias are flagged so that megatron sums their sequence-parallel partial gradients.
    """

    def __init__(self, config, tp_group):
        super().__init__(config=config)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        options = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **options))
        self.bias = torch.nn.Parameter(torch.zeros(1, **options))
        self.tp_group = tp_group
        for param in (self.weight, self.bias):
            param.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """`[tokens (or a slice), 1, hidden]` → `[tokens, 1, 1]` in fp32, whole on every TP rank."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.config.sequence_parallel:
            # Every TP rank computes the same loss over the whole row, so the backward must not sum over ranks.
            values = tensor_parallel.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        # Without the data-parallel group every replica would claim to be the one that writes.
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets, **groups
        )
