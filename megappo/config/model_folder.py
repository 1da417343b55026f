"""What a Hugging Face folder says about its model, read with json alone (no torch, no transformers)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: architectures that the bridge knows
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)

#: what a reward model is called instead: the same trunk with a scalar head
_LANGUAGE_MODEL, _REWARD_MODEL = "ForCausalLM", "ForSequenceClassification"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class ModelFacts:
    """Sizes that decide whether a layout or a length fits; None where config.json does not say."""

    layers: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    max_positions: int | None  # tokens
    window: int | None = None  # tokens that attention looks back on, None: all
    experts: int | None = None  # experts in each layer, None: dense
    expert_ffn: int | None = None
    vocabulary: int | None = None
    scores: bool = False  # a reward model: a scalar head instead of a vocabulary


def language_model(architecture: str) -> str:
    """The architecture of the language model that has the trunk of a reward model; any other name as it is."""
    if architecture.endswith(_REWARD_MODEL):
        return architecture.removesuffix(_REWARD_MODEL) + _LANGUAGE_MODEL
    return architecture


def reward_model(architecture: str) -> str:
    """The architecture of the reward model that has the trunk of a language model."""
    return language_model(architecture).removesuffix(_LANGUAGE_MODEL) + _REWARD_MODEL


def read_model_folder(path: str) -> tuple[ModelFacts | None, str | None]:
    """(facts, None) for a usable folder, else (None, what is wrong and what to do)."""
    folder = Path(path)
    if not os.path.isdir(folder):  # os.path, not pathlib: what may not be looked at counts as absent
        what = "is a file" if os.path.exists(folder) else "no such folder"
        return None, f"{what}; give a local Hugging Face folder (names on a hub are not downloaded)"
    config_file = folder / "config.json"
    if not os.path.isfile(config_file):
        return None, "the folder has no config.json; give the folder that `save_pretrained` wrote"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        return None, "its config.json is not valid JSON; download the model again"
    names = _architectures(config) or ["(none named)"]
    if not any(name in SUPPORTED_ARCHITECTURES for name in names):
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        return None, f"architecture {', '.join(map(str, names))} is not supported; use one of {known}"
    if not any(folder.glob("*.safetensors")):
        return None, "the folder has no *.safetensors; save the model with safe_serialization=True"
    return _facts(config), None


def tokenizer_problem(path: str) -> str | None:
    """What is wrong with a tokenizer folder, or None."""
    folder = Path(path)
    if not os.path.isdir(folder):
        return "no such folder; give a local folder with tokenizer.json"
    if not any(os.path.isfile(folder / name) for name in _TOKENIZER_FILES):
        return "the folder has no tokenizer.json; set model.tokenizer_path to a folder that has one"
    return None


def _facts(config: dict[str, Any]) -> ModelFacts:
    def number(name: str) -> int | None:
        value = config.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    heads = number("num_attention_heads")
    return ModelFacts(
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        ffn=number("intermediate_size"),
        max_positions=_max_positions(config, number("max_position_embeddings")),
        window=attention_window(config),
        experts=number("num_experts") or number("num_local_experts"),
        expert_ffn=number("moe_intermediate_size") or number("intermediate_size"),
        vocabulary=number("vocab_size"),
        scores=_REWARD_MODEL in str(config.get("architectures")),
    )


def _architectures(config: dict[str, Any]) -> list[str]:
    """The architectures named, as language models."""
    names = config.get("architectures") or []
    return [language_model(str(name)) for name in names] if isinstance(names, list) else [str(names)]


def attention_window(config: dict[str, Any]) -> int | None:
    """Tokens that sliding-window attention sees, None when it sees all; defaults as in transformers."""
    names = _architectures(config)
    if "MistralForCausalLM" in names:
        return config.get("sliding_window", 4096)
    if "MixtralForCausalLM" in names or config.get("use_sliding_window"):
        return config.get("sliding_window")
    return None


def export_problem(folder: str, source: str) -> str | None:
    """Why an export may not be written to (or replace) `folder`, or None. An earlier export is replaced: a folder
    with a configuration and weights and no folders in it, so that nobody loses a project to a wrong path.

    `source` is the model folder that the export's configuration and tokenizer are copied from.
    """
    path, origin = os.path.realpath(folder), os.path.realpath(source)
    if origin == path or origin.startswith(os.path.join(path, "")):
        return f"would replace the model in {source}; choose another folder"
    if not os.path.lexists(path):
        return None
    if not os.path.isdir(path):
        return "is a file; choose another folder"
    inside = sorted(os.listdir(path))
    deeper = [name for name in inside if os.path.isdir(os.path.join(path, name))]
    model = "config.json" in inside and any(name.endswith(".safetensors") for name in inside)
    if inside and (deeper or not model):
        return f"holds other things ({(deeper or inside)[0]}) that it would delete; choose another folder"
    return None


def _max_positions(config: dict[str, Any], plain: int | None) -> int | None:
    """max_position_embeddings, or what RoPE scaling stretches the original length to if that is more."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if plain is None or not isinstance(scaling, dict):
        return plain
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if isinstance(original, int) and isinstance(factor, (int, float)):
        return max(plain, int(original * factor))
    return plain
