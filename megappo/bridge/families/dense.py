"""Llama, Mistral, Qwen2/2.5 and Qwen3: one table, read in both directions."""

from __future__ import annotations

from megappo.bridge import algebra
from megappo.bridge.algebra import Rule
from megappo.models.spec import ModelSpec

VALUE_HEAD = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}


def embedding_rules(spec: ModelSpec, tp: int) -> list[Rule]:
    padded = spec.padded_vocab(tp)
    return [
        algebra.vocabulary(
            "embedding.word_embeddings.weight",
            "model.embed_tokens.weight",
            spec.vocab_size,
            padded,
            spec.hidden_size,
        )
    ]


def head_rules(spec: ModelSpec, tp: int, *, critic: bool, has_embedding: bool) -> list[Rule]:
    """The last stage: final norm and head. A tied head on the embedding's own stage is no parameter of its own."""
    h = spec.hidden_size
    rules = [algebra.replicated("decoder.final_layernorm.weight", "model.norm.weight", h)]
    if critic:
        rules.append(algebra.replicated("output_layer.weight", VALUE_HEAD["output_layer.weight"], 1, h))
        rules.append(algebra.replicated("output_layer.bias", VALUE_HEAD["output_layer.bias"], 1))
    elif not (spec.tied_embeddings and has_embedding):
        source = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        rules.append(algebra.vocabulary("output_layer.weight", source, spec.vocab_size, spec.padded_vocab(tp), h))
    return rules


def layer_rules(spec: ModelSpec, layer: int, local_layer: int, *, fused_norms: bool) -> list[Rule]:
    """One decoder layer. `fused_norms`: Transformer Engine keeps the norms inside the linear layers."""
    m, h = f"decoder.layers.{local_layer}.", f"model.layers.{layer}."
    hidden, ffn, dim = spec.hidden_size, spec.ffn_size, spec.head_dim
    heads, kv = spec.num_heads, spec.num_kv_heads
    if fused_norms:
        norm1, norm2 = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    else:
        norm1, norm2 = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    attn = h + "self_attn."
    rules = [
        algebra.replicated(m + norm1, h + "input_layernorm.weight", hidden),
        algebra.replicated(m + norm2, h + "post_attention_layernorm.weight", hidden),
        algebra.row(m + "self_attention.linear_proj.weight", attn + "o_proj.weight", hidden, heads * dim),
        algebra.gate_up(m + "mlp.linear_fc1.weight", h + "mlp.gate_proj.weight", h + "mlp.up_proj.weight", ffn, hidden),
        algebra.row(m + "mlp.linear_fc2.weight", h + "mlp.down_proj.weight", hidden, ffn),
    ]
    for kind, tail in (("weight", (hidden,)), ("bias", ())):
        if kind == "bias" and not spec.qkv_bias:
            continue
        q, k, v = (f"{attn}{x}_proj.{kind}" for x in "qkv")
        rules.append(algebra.grouped_qkv(m + f"self_attention.linear_qkv.{kind}", q, k, v, heads, kv, dim, *tail))
    if spec.qk_norm:
        rules.append(algebra.replicated(m + "self_attention.q_layernorm.weight", attn + "q_norm.weight", dim))
        rules.append(algebra.replicated(m + "self_attention.k_layernorm.weight", attn + "k_norm.weight", dim))
    return rules
