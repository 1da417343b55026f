"""The experts of Mixtral and Qwen3-MoE. Everything else in these models is as in the dense families."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megappo.bridge import algebra
from megappo.bridge.algebra import Rule
from megappo.models.spec import ModelSpec


class ExpertNames(NamedTuple):
    """How a family's checkpoints name the block inside the layer, and what is in it."""

    block: str
    router: str
    gate: str
    up: str
    down: str


NAMES = {
    "MixtralForCausalLM": ExpertNames("block_sparse_moe.", "gate", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": ExpertNames("mlp.", "gate", "gate_proj", "up_proj", "down_proj"),
}


def expert_rules(spec: ModelSpec, m: str, h: str, experts: range, *, grouped: bool) -> list[Rule]:
    """Router and the experts `experts` (global ids) of the layer named `m` in Megatron and `h` in Hugging Face.

    `grouped`: Transformer Engine's grouped layers number their weights; megatron's own experts are modules.
    """
    block, router, gate, up, down = NAMES[spec.architecture]
    h += block
    hidden, ffn = spec.hidden_size, spec.moe.ffn_size
    rules = [algebra.replicated(m + "mlp.router.weight", f"{h}{router}.weight", spec.moe.num_experts, hidden)]
    for local, expert in enumerate(experts):
        if grouped:
            fc1, fc2 = (f"{m}mlp.experts.linear_fc{i}.weight{local}" for i in (1, 2))
        else:
            fc1, fc2 = (f"{m}mlp.experts.local_experts.{local}.linear_fc{i}.weight" for i in (1, 2))
        e = f"{h}experts.{expert}."
        rules.append(algebra.gate_up(fc1, f"{e}{gate}.weight", f"{e}{up}.weight", ffn, hidden))
        rules.append(algebra.row(fc2, f"{e}{down}.weight", hidden, ffn))
    return [rules[0], *(replace(rule, expert=True) for rule in rules[1:])]
