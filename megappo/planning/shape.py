"""Sizes of a model, from a Hugging Face `config.json` or from the table of published models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.model_folder import SUPPORTED_ARCHITECTURES, language_model
from megappo.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes, in elements. `experts` 0: dense; otherwise every layer has so many of width `expert_ffn`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads (the value heads have the same)."""
        return self.kv_heads * self.head_dim

    def padded_vocabulary(self, tp: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks; as `ModelSpec.padded_vocab`."""
        return -(-self.vocabulary // tp) * tp


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    more = {"num_key_value_heads": 8, "intermediate_size": ffn, "vocab_size": 128256}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **more}


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int = 152064) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    more = {"num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocabulary}
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **sizes, **more}


#: `config.json` of models as their public model cards give it, so that a plan needs no download
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3-405b": _llama(126, 16384, 128, 53248),
    "qwen2.5-0.5b": _qwen(24, 896, 14, 2, 4864, 151936) | {"tie_word_embeddings": True},
    "qwen2.5-7b": _qwen(28, 3584, 28, 4, 18944),
    "qwen2.5-32b": _qwen(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _qwen(80, 8192, 64, 8, 29568),
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
    },
}


def published_shape(name: str) -> ModelShape:
    """A model of the table.

    Raises:
        UserError: it is not in the table.
    """
    if name not in PUBLISHED:
        raise UserError(f"--model {name}: not in the table of published models; known: {', '.join(PUBLISHED)}")
    return shape_of(PUBLISHED[name], name)


def read_shape(folder: str | Path) -> ModelShape:
    """The sizes of the model in a Hugging Face folder; its weights need not be there.

    Raises:
        UserError: there is no usable `config.json`, or the architecture is not supported.
    """
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(
            f"{file}: cannot be read ({err.strerror}); copy the model's config.json there, or give --model"
        ) from None
    except ValueError:
        raise UserError(f"{file}: is not valid JSON; copy it again") from None
    return shape_of(config, str(file))


def shape_of(config: dict[str, Any], where: str) -> ModelShape:
    """Read a `config.json`; `where` names it in errors.

    Raises:
        UserError: a size is missing or the architecture is not supported.
    """
    named = config.get("architectures") or ["none"]
    name = language_model(str(named[0]))
    if name not in SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"{where}: architecture {name} is not supported; use one of {', '.join(SUPPORTED_ARCHITECTURES)}"
        )

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{where}: {key} is {value!r} but must be a positive whole number; copy the file again")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    moe: dict[str, int] = {}
    if name in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        mixtral = name == "MixtralForCausalLM"
        count = "num_experts" if "num_experts" in config and not mixtral else "num_local_experts"
        width = size("intermediate_size" if mixtral else "moe_intermediate_size")
        moe = {"experts": size(count), "top_k": size("num_experts_per_tok"), "expert_ffn": width}
    return ModelShape(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        ffn=size("intermediate_size"),
        vocabulary=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=name == "Qwen2ForCausalLM",
        qk_norm=name in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        **moe,
    )
