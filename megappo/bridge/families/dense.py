"""Llama, Mistral, Qwen2/2.5 and Qwen3: one table, read in both directions."""

from __future__ import annotations

from typing import NamedTuple

from megappo.bridge import algebra
from megappo.bridge.algebra import Rule
from megappo.bridge.families import moe
from megappo.models.spec import ModelSpec


class Names(NamedTuple):
    """What is not part of a layer, as the checkpoints name it."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    value_weight: str = "score.weight"
    value_bias: str = "score.bias"


NAMES = Names()


def embedding_rules(spec: ModelSpec, tp: int) -> list[Rule]:
    padded = spec.padded_vocab(tp)
    return [
        algebra.vocabulary(
            "embedding.word_embeddings.weight",
            NAMES.embedding,
            spec.vocab_size,
            padded,
            spec.hidden_size,
        )
    ]


def head_rules(spec: ModelSpec, tp: int, *, critic: bool, has_embedding: bool) -> list[Rule]:
    """The last stage: final norm and head. A tied head on the embedding's own stage is no parameter of its own."""
    h = spec.hidden_size
    rules = [algebra.replicated("decoder.final_layernorm.weight", NAMES.final_norm, h)]
    if critic:
        rules.append(algebra.replicated("output_layer.weight", NAMES.value_weight, 1, h))
        rules.append(algebra.replicated("output_layer.bias", NAMES.value_bias, 1))
    elif not (spec.tied_embeddings and has_embedding):
        source = NAMES.embedding if spec.tied_embeddings else NAMES.head
        rules.append(algebra.vocabulary("output_layer.weight", source, spec.vocab_size, spec.padded_vocab(tp), h))
    return rules


def layer_rules(
    spec: ModelSpec, layer: int, local_layer: int, *, experts: range | None = None, fused: bool
) -> list[Rule]:
    """One decoder layer. `fused`: Transformer Engine's layers, which keep the norms inside the linear layers.

    `experts`: the experts of a mixture that this rank holds (None for a dense model).
    """
    m, h = f"decoder.layers.{local_layer}.", f"model.layers.{layer}."
    hidden = spec.hidden_size
    # In a mixture the norm before the router stays a module of its own, also with Transformer Engine.
    norm1 = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    norm2 = "mlp.linear_fc1.layer_norm_weight" if fused and experts is None else "pre_mlp_layernorm.weight"
    rules = [
        algebra.replicated(m + norm1, h + "input_layernorm.weight", hidden),
        algebra.replicated(m + norm2, h + "post_attention_layernorm.weight", hidden),
        *_attention_rules(spec, m + "self_attention.", h + "self_attn."),
    ]
    if experts is not None:
        return rules + moe.expert_rules(spec, m, h, experts, grouped=fused)
    gate, up = h + "mlp.gate_proj.weight", h + "mlp.up_proj.weight"
    rules.append(algebra.gate_up(m + "mlp.linear_fc1.weight", gate, up, spec.ffn_size, hidden))
    rules.append(algebra.row(m + "mlp.linear_fc2.weight", h + "mlp.down_proj.weight", hidden, spec.ffn_size))
    return rules


def _attention_rules(spec: ModelSpec, m: str, h: str) -> list[Rule]:
    hidden, dim, heads, kv = spec.hidden_size, spec.head_dim, spec.num_heads, spec.num_kv_heads
    rules = [algebra.row(m + "linear_proj.weight", h + "o_proj.weight", hidden, heads * dim)]
    for kind, tail in (("weight", (hidden,)), ("bias", ())):
        if kind == "weight" or spec.qkv_bias:
            q, k, v = (f"{h}{x}_proj.{kind}" for x in "qkv")
            rules.append(algebra.grouped_qkv(f"{m}linear_qkv.{kind}", q, k, v, heads, kv, dim, *tail))
    if spec.qk_norm:
        rules.append(algebra.replicated(m + "q_layernorm.weight", h + "q_norm.weight", dim))
        rules.append(algebra.replicated(m + "k_layernorm.weight", h + "k_norm.weight", dim))
    return rules
