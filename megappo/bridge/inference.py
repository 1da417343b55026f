"""An inference engine's side of the bridge: what each of its ranks holds, under the names that SGLang gives them.

Source: the model files of SGLang 0.5 (`python/sglang/srt/models/{llama,qwen2,qwen3,mixtral,qwen3_moe}.py`): query, key
and value in one `qkv_proj`, gate and up in one `gate_up_proj`, the experts of a rank stacked in `w13_weight` and
`w2_weight`, the vocabulary padded to a multiple of 64. A tied head is the embedding and no parameter of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megappo.bridge import algebra
from megappo.bridge.algebra import Piece, Rule, local_shape, pieces
from megappo.bridge.families import dense, moe
from megappo.models.spec import ModelSpec

VOCABULARY_MULTIPLE = 64  # rows


@dataclass(frozen=True)
class InferenceWeights:
    """The weight layout of `replicas` equal engines of `tp` ranks each, on the ranks from `first_rank` on.

    `ep` divides `tp`: each group of `tp / ep` neighbours holds `num_experts / ep` experts, cut along their width.
    """

    spec: ModelSpec
    tp: int = 1
    ep: int = 1
    replicas: int = 1
    first_rank: int = 0
    critic: bool = False

    def __post_init__(self):
        if self.tp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide tp {self.tp}: an engine deals its ranks out to the experts")

    @property
    def ranks(self) -> range:
        """The global ranks of all engines."""
        return range(self.first_rank, self.first_rank + self.tp * self.replicas)

    def shape_key(self, rank: int) -> int:
        """Ranks with the same key hold the same."""
        return (rank - self.first_rank) % self.tp

    def rules(self, rank: int) -> Iterator[tuple[int, Rule]]:
        """`(0, rule)` for every parameter that `rank` holds; experts once an entry of their stack."""
        spec = self.spec
        hidden, vocab, padded = spec.hidden_size, spec.vocab_size, self._padded_vocabulary()
        names = dense.NAMES
        found = [algebra.vocabulary(names.embedding, names.embedding, vocab, padded, hidden)]
        for layer in range(spec.num_layers):
            found += self._layer_rules(f"model.layers.{layer}.", rank)
        found.append(algebra.replicated(names.final_norm, names.final_norm, hidden))
        if self.critic:
            found.append(algebra.replicated(names.value_weight, names.value_weight, 1, hidden))
            found.append(algebra.replicated(names.value_bias, names.value_bias, 1))
        elif not spec.tied_embeddings:
            found.append(algebra.vocabulary(names.head, names.head, vocab, padded, hidden))
        for rule in found:
            yield 0, rule

    def shard(self, rule: Rule, rank: int) -> tuple[int, int]:
        """`(index, count)`: which of how many equal shards of a parameter `rank` holds."""
        tp_rank = self.shape_key(rank)
        if rule.expert:
            return tp_rank % (self.tp // self.ep), self.tp // self.ep
        return tp_rank, self.tp

    def pieces(self, rank: int) -> Iterator[tuple[int, Piece]]:
        """`(0, piece)` for everything that `rank` holds."""
        for chunk, rule in self.rules(rank):
            for piece in pieces(rule, *self.shard(rule, rank)):
                yield chunk, piece

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of `rank` with its shape, stacks included, in order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for _, rule in self.rules(rank):
            shape = local_shape(rule, self.shard(rule, rank)[1])
            shapes[rule.local] = (rule.stack[1], *shape) if rule.stack else shape
        return shapes

    def _padded_vocabulary(self) -> int:
        """SGLang pads to 64 and then needs a multiple of tp; where that fails, a common multiple is taken."""
        padded = -(-self.spec.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        step = math.lcm(VOCABULARY_MULTIPLE, self.tp)
        return padded if padded % self.tp == 0 else -(-padded // step) * step

    def _layer_rules(self, h: str, rank: int) -> list[Rule]:
        spec, hidden = self.spec, self.spec.hidden_size
        rules = [
            algebra.replicated(h + name, h + name, hidden)
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        ]
        rules += self._attention_rules(h + "self_attn.")
        if spec.moe is not None:
            return rules + self._expert_rules(h, rank)
        gate, up, down = (f"{h}mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
        rules.append(algebra.gate_up(f"{h}mlp.gate_up_proj.weight", gate, up, spec.ffn_size, hidden))
        rules.append(algebra.row(down, down, hidden, spec.ffn_size))
        return rules

    def _attention_rules(self, h: str) -> list[Rule]:
        spec, hidden = self.spec, self.spec.hidden_size
        dim, heads, kv = spec.head_dim, spec.num_heads, spec.num_kv_heads
        rules = [algebra.row(h + "o_proj.weight", h + "o_proj.weight", hidden, heads * dim)]
        for kind, tail in (("weight", (hidden,)), ("bias", ())):
            if kind == "weight" or spec.qkv_bias:
                q, k, v = (f"{h}{x}_proj.{kind}" for x in "qkv")
                rules.append(algebra.separate_qkv(f"{h}qkv_proj.{kind}", q, k, v, heads, kv, dim, *tail, tp=self.tp))
        if spec.qk_norm:
            rules += [algebra.replicated(f"{h}{x}_norm.weight", f"{h}{x}_norm.weight", dim) for x in "qk"]
        return rules

    def _expert_rules(self, h: str, rank: int) -> list[Rule]:
        spec, hidden, ffn = self.spec, self.spec.hidden_size, self.spec.moe.ffn_size
        names = moe.NAMES[spec.architecture]
        h += names.block
        router = f"{h}{names.router}.weight"
        rules = [algebra.replicated(router, router, spec.moe.num_experts, hidden)]
        count = spec.moe.num_experts // self.ep
        first = self.shape_key(rank) // (self.tp // self.ep) * count
        for i in range(count):
            e = f"{h}experts.{first + i}."
            gate, up, down = (f"{e}{x}.weight" for x in (names.gate, names.up, names.down))
            rules.append(algebra.gate_up(f"{h}experts.w13_weight", gate, up, ffn, hidden))
            rules.append(algebra.row(f"{h}experts.w2_weight", down, hidden, ffn))
            rules[-2:] = [replace(rule, expert=True, stack=(i, count)) for rule in rules[-2:]]
        return rules
