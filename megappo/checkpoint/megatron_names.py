"""How Megatron's distributed checkpoints name and stack the parameters of a model.

The layers of a model are stacked along a first dimension, its experts along a second one, and names are those of
Transformer Engine's fused layers whatever layers wrote them (megatron-core's `sharded_state_dict`). Query, key and
value are interleaved by key/value head and gate comes before up, in the whole tensor: no trace of the layout that
wrote it remains.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from megappo.models.spec import ModelSpec

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
NORM = "decoder.layers.pre_mlp_layernorm.weight"
# What megatron-core calls the same norm when its layers are not Transformer Engine's.
NORM_UNFUSED = "decoder.layers.mlp.linear_fc1.layer_norm_weight"


@dataclass(frozen=True)
class StoredName:
    """A parameter is entry `index` of the stored tensor `key`, whose leading dimensions have sizes `count`."""

    key: str
    index: tuple[int, ...] = ()
    count: tuple[int, ...] = ()


def stored_name(spec: ModelSpec, local: str, layers: range, experts: range | None) -> StoredName:
    """Where a parameter of a model chunk (names of the fused layers) is stored.

    Args:
        layers, experts: global numbers of the chunk's layers and of the rank's experts.
    """
    in_layer = _LAYER.fullmatch(local)
    if not in_layer:
        return StoredName(local)
    layer, rest = layers[int(in_layer[1])], in_layer[2]
    expert = _EXPERT.fullmatch(rest)
    if expert:
        index = (layer, experts[int(expert[2])])
        return StoredName(
            f"decoder.layers.mlp.experts.experts.{expert[1]}.weight", index, (spec.num_layers, spec.moe.num_experts)
        )
    return StoredName(f"decoder.layers.{rest}", (layer,), (spec.num_layers,))


def find_stored(name: StoredName, existing: Container[str]) -> StoredName:
    """The same parameter under the name that a checkpoint uses: layers may not be stacked, a norm named otherwise."""
    candidates = [name]
    if name.key == NORM:
        candidates.append(StoredName(NORM_UNFUSED, name.index, name.count))
    for one in list(candidates):
        if one.index:
            key = one.key.replace("decoder.layers.", f"decoder.layers.{one.index[0]}.", 1)
            candidates.append(StoredName(key, one.index[1:], one.count[1:]))
    return next((one for one in candidates if one.key in existing), name)


def extra_states(spec: ModelSpec) -> list[str]:
    """Names of the (empty) extra states that a model asks for when it is loaded: those of megatron's own layers and
    of Transformer Engine's. A loader ignores the ones that it does not know."""
    linear = ["self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.core_attention"]
    norms = ["input_layernorm", "pre_mlp_layernorm"]
    if spec.qk_norm:
        norms += ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    experts = []
    if spec.moe is None:
        linear += ["mlp.linear_fc1", "mlp.linear_fc2"]
    else:
        experts = ["mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"]
    found = ["decoder.final_layernorm._extra_state/shard_0_1"]
    for layer in range(spec.num_layers):
        at = f"shard_{layer}_{spec.num_layers}"
        found += [f"decoder.layers.{name}._extra_state/{at}" for name in (*linear, *norms)]
        for expert in range(spec.moe.num_experts if experts else 0):
            at = f"shard_{layer}.{expert}_{spec.num_layers}.{spec.moe.num_experts}"
            found += [f"decoder.layers.{name}._extra_state/{at}" for name in experts]
    return found
