"""What MegaPPO knows of a model's architecture, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from megappo.errors import UserError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder. Sizes are in elements; `path` is the Hugging Face folder it was read from."""

    path: Path
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank holds the same number of rows."""
        return -(-self.vocab_size // tp) * tp


def read_config(path: str | Path) -> dict:
    """The parsed `config.json` of a Hugging Face folder.

    Raises:
        UserError: the folder or file is missing or is not JSON.
    """
    folder = Path(path)
    file = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist: give a Hugging Face folder in model.path")
    if not file.is_file():
        raise UserError(f"{folder} has no config.json: model.path must be a Hugging Face model folder")
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as err:
        raise UserError(f"{file} is not valid JSON ({err}): copy the model folder again") from None


def load_spec(path: str | Path) -> ModelSpec:
    """Read the architecture of a Hugging Face folder.

    Raises:
        UserError: missing folder, unsupported architecture, or a feature that the engine does not reproduce.
    """
    raw = read_config(path)
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{path}/config.json: architecture {architecture} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    if raw.get("mlp_bias"):
        raise UserError(f"{path}/config.json: mlp_bias true is not supported")
    llama_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and raw.get("attention_bias", False)
    if llama_bias:
        raise UserError(f"{path}/config.json: attention_bias true (a bias on o_proj) is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}/config.json: hidden_act {raw['hidden_act']} is not supported, only silu")
    window = raw.get("sliding_window")
    if architecture != "MistralForCausalLM" and not raw.get("use_sliding_window", False):
        window = None
    heads = raw["num_attention_heads"]
    hidden = raw["hidden_size"]
    return ModelSpec(
        path=Path(path),
        architecture=architecture,
        num_layers=raw["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        ffn_size=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_positions=raw.get("max_position_embeddings", 2048),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=window,
    )


def rotary_frequencies(path: str | Path) -> torch.Tensor:
    """Inverse RoPE frequencies `[head_dim / 2]` (radians per position), exactly as transformers computes them.

    Raises:
        UserError: a RoPE variant that also rescales the attention (YaRN and the like).
    """
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(path))
    if rotary.attention_scaling != 1.0 or rotary.rope_type not in ("default", "linear", "llama3"):
        raise UserError(
            f"{path}/config.json: RoPE type {rotary.rope_type} is not supported; use default, linear or llama3"
        )
    return rotary.inv_freq.float()
