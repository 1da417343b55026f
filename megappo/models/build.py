"""Build this rank's chunks of a model in megatron-core."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from megappo.models.gpt import CriticModel, PolicyModel
from megappo.models.layers import PackedAttention, PackedRotary, RMSNorm
from megappo.models.spec import ModelSpec, rotary_frequencies
from megappo.parallel import backend
from megappo.parallel.groups import ParallelContext
from megappo.parallel.layout import ParallelLayout

# isort: split
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

Recompute = Literal["selective", "full"] | None


def _moe_options(spec: ModelSpec, layout: ParallelLayout, dtype: torch.dtype, aux_loss_coeff: float) -> dict:
    """megatron-core's settings for a mixture of experts; without Transformer Engine experts run one after another."""
    if spec.moe is None:
        return {}
    moe = spec.moe
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_size,
        # Softmax over the chosen logits alone makes their probabilities sum to 1.
        "moe_router_pre_softmax": not moe.normalize,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux_loss_coeff else "none",
        "moe_aux_loss_coeff": aux_loss_coeff,
        "moe_grouped_gemm": backend.use_fused_layers(dtype),
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def transformer_config(
    spec: ModelSpec,
    layout: ParallelLayout,
    dtype: torch.dtype,
    recompute: Recompute = None,
    aux_loss_coeff: float = 0.0,
) -> TransformerConfig:
    """The megatron-core configuration of a model in a layout. Why the less obvious settings are what they are:

    * `perform_initialization`: without it weights lack the TP attribute and the gradient norm is wrong.
    * `calculate_per_token_loss`: megatron then adds up losses and gradients without averaging over micro-batches,
      replicas or context slices; our losses already carry their global denominators.
    * `variable_seq_lengths`: packed micro-batches differ in length; megatron insists on the alltoall dispatcher
      with it, also for dense models.
    * `deallocate_pipeline_outputs`, p2p modes: freed outputs and batched p2p at PP=2·VPP=2 give silently wrong
      gradients over gloo.
    """
    interleaved = layout.vpp > 1
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not backend.has_cuda(),
        perform_initialization=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if interleaved else None,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        deallocate_pipeline_outputs=backend.has_cuda() and not interleaved,
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        **_moe_options(spec, layout, dtype, aux_loss_coeff),
    )


def _layer_specs(spec: ModelSpec, config: TransformerConfig, vp_stage: int | None):
    experts = spec.moe.num_experts if spec.moe else None
    if backend.use_fused_layers(config.params_dtype):
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=bool(experts), qk_layernorm=spec.qk_norm
        )
    layer = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=spec.qk_norm)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules([layer] * count, layer_norm=RMSNorm)


def build_model(
    spec: ModelSpec,
    context: ParallelContext,
    dtype: torch.dtype,
    *,
    critic: bool = False,
    recompute: Recompute = None,
    aux_loss_coeff: float = 0.0,
) -> list[PolicyModel] | list[CriticModel]:
    """This rank's model chunks (one, or `vpp` of them), randomly initialised, on this rank's device.

    Call inside `with context:`.
    """
    layout, rank = context.layout, context.rank
    config = transformer_config(spec, layout, dtype, recompute, aux_loss_coeff)
    inv_freq = rotary_frequencies(spec.path).to(backend.device())
    chunks = []
    for chunk in range(layout.vpp):
        vp_stage = chunk if layout.vpp > 1 else None
        options = {} if critic else {"share_embeddings_and_output_weights": spec.tied_embeddings}
        model = (CriticModel if critic else PolicyModel)(
            config,
            _layer_specs(spec, config, vp_stage),
            vocab_size=spec.padded_vocab(layout.tp),
            max_sequence_length=spec.max_positions,
            pre_process=layout.is_first(rank, chunk),
            post_process=layout.is_last(rank, chunk),
            parallel_output=True,
            position_embedding_type="rope",
            vp_stage=vp_stage,
            **options,
        )
        if backend.use_fused_layers(dtype):
            model.rotary_pos_emb.inv_freq = inv_freq
        else:
            model.rotary_pos_emb = PackedRotary(inv_freq)
        if dtype == torch.bfloat16:
            model = model.bfloat16()
        chunks.append(model.to(backend.device()))
    return chunks
