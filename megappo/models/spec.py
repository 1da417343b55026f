"""What MegaPPO knows of a model's architecture, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from megappo.config.model_folder import SUPPORTED_ARCHITECTURES as ARCHITECTURES
from megappo.config.model_folder import attention_window, language_model
from megappo.errors import UserError


@dataclass(frozen=True)
class MoESpec:
    """The experts of a mixture: every layer has `num_experts` gated MLPs of width `ffn_size`, `top_k` used a token.

    `normalize` makes the chosen experts' probabilities sum to 1.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    normalize: bool


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. Sizes are in elements; `path` is the Hugging Face folder it was read from; `moe` None is dense.

    `scalar_head`: the folder holds a reward model, with a head of one number instead of a vocabulary; `architecture`
    is that of the language model with the same trunk.
    """

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
    moe: MoESpec | None = None
    scalar_head: bool = False

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank holds the same number of rows."""
        return -(-self.vocab_size // tp) * tp


def read_config(path: str | Path) -> dict:
    """The parsed `config.json` of a Hugging Face folder.

    Raises:
        UserError: the folder or file is missing, cannot be read or is not a JSON object.
    """
    folder = Path(path)
    file = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist: give a Hugging Face folder in model.path")
    if not file.is_file():
        raise UserError(f"{folder} has no config.json: model.path must be a Hugging Face model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"{file} cannot be read ({err.strerror}): check its permissions") from None
    except ValueError as err:
        raise UserError(f"{file} is not valid JSON ({err}): copy the model folder again") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object: copy the model folder again")
    return config


def _size(raw: dict, path: str | Path, key: str, default: int | None = None) -> int:
    """A positive whole number of the configuration; null counts as missing."""
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"{path}/config.json: {key} is missing: copy the model folder again")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}/config.json: {key} is {value!r} but must be a positive whole number")
    return value


def load_spec(path: str | Path) -> ModelSpec:
    """Read the architecture of a Hugging Face folder.

    Raises:
        UserError: missing folder, unsupported architecture, a size that is missing or impossible, or a feature
            that the engine does not reproduce.
    """
    raw = read_config(path)
    names = raw.get("architectures") or ["none"]
    named = str(names[0] if isinstance(names, list) else names)
    architecture = language_model(named)
    if architecture not in ARCHITECTURES:
        raise UserError(f"{path}/config.json: architecture {named} is not supported; known: {', '.join(ARCHITECTURES)}")
    if raw.get("mlp_bias"):
        raise UserError(f"{path}/config.json: mlp_bias true is not supported")
    if architecture not in ("Qwen2ForCausalLM",) and raw.get("attention_bias", False):
        raise UserError(f"{path}/config.json: attention_bias true (a bias on o_proj) is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}/config.json: hidden_act {raw['hidden_act']} is not supported, only silu")
    heads = _size(raw, path, "num_attention_heads")
    hidden = _size(raw, path, "hidden_size")
    # What a missing key means differs between families; only where it means the obvious may it be missing.
    obvious = "num_key_value_heads" in raw or architecture == "LlamaForCausalLM"
    kv_heads = _size(raw, path, "num_key_value_heads", heads if obvious else None)
    if heads % kv_heads:
        raise UserError(f"{path}/config.json: {kv_heads} num_key_value_heads do not divide {heads} attention heads")
    head_dim = _size(raw, path, "head_dim", None if architecture == "Qwen3ForCausalLM" else hidden // heads)
    return ModelSpec(
        path=Path(path),
        architecture=architecture,
        num_layers=_size(raw, path, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=_size(raw, path, "intermediate_size"),
        vocab_size=_size(raw, path, "vocab_size"),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_positions=_size(raw, path, "max_position_embeddings", 2048),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        sliding_window=attention_window(raw),
        moe=_moe_spec(architecture, raw, path),
        scalar_head=named != architecture,
    )


def _moe_spec(architecture: str, raw: dict, path: str | Path) -> MoESpec | None:
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    top_k = _size(raw, path, "num_experts_per_tok")
    if architecture == "MixtralForCausalLM":
        ffn = _size(raw, path, "intermediate_size")
        return MoESpec(_size(raw, path, "num_local_experts"), top_k, ffn, normalize=True)
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            f"{path}/config.json: layers without experts (mlp_only_layers, decoder_sparse_step) are not supported"
        )
    experts = _size(raw, path, "num_experts" if "num_experts" in raw else "num_local_experts")
    normalize = raw.get("norm_topk_prob", False)
    return MoESpec(experts, top_k, _size(raw, path, "moe_intermediate_size"), normalize)


def rotary_frequencies(path: str | Path) -> torch.Tensor:
    """Inverse RoPE frequencies `[head_dim / 2]` (radians per position), exactly as transformers computes them.

    Raises:
        UserError: a RoPE variant that also rescales the attention (YaRN and the like), or a configuration that
            transformers refuses.
    """
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(path))
    except Exception as err:  # its checks raise many types
        reason = " ".join(str(err).split())
        raise UserError(f"{path}/config.json: transformers refuses it ({type(err).__name__}: {reason})") from None
    if rotary.attention_scaling != 1.0 or rotary.rope_type not in ("default", "linear", "llama3"):
        raise UserError(
            f"{path}/config.json: RoPE type {rotary.rope_type} is not supported; use default, linear or llama3"
        )
    # A plain copy: the original is an `nn.Buffer`, which any module it is assigned to would make its own and cast.
    return rotary.inv_freq.float().clone()
