"""Broken model folders: one line that names the file and the tensor or key, before anything is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import make_hf_model

from megappo.bridge.megatron import MegatronWeights
from megappo.checkpoint.hf import HFReader
from megappo.errors import UserError
from megappo.models.spec import load_spec, rotary_frequencies
from megappo.parallel.layout import ParallelLayout


def load(folder: Path) -> None:
    """What an engine does before it reads weights."""
    spec = load_spec(folder)
    rotary_frequencies(folder)
    HFReader(folder).check(MegatronWeights(spec, ParallelLayout()).hf_shapes())


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text


@pytest.fixture
def model(hf_folder, tmp_path) -> Callable[..., Path]:
    """A private copy of a model folder, its config.json changed (None removes a key)."""

    def copy(family: str = "llama", **changes) -> Path:
        folder = tmp_path / family
        shutil.copytree(hf_folder(family), folder)
        file = folder / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in config.items() if changes.get(k, "") is not None}))
        return folder

    return copy


@pytest.fixture
def sharded(tmp_path) -> Path:
    make_hf_model(tmp_path / "sharded", "llama", max_shard_size="150KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def edit_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_good_folders_load(model, sharded):
    load(model())
    load(sharded)


# --- config.json -----------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none")
    with pytest.raises(UserError, match="does not exist"):
        HFReader(tmp_path / "none")


def test_a_missing_config(model):
    folder = model()
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"null", b'{"a": \xff}'])
def test_a_broken_config(model, content):
    folder = model()
    (folder / "config.json").write_bytes(content)
    assert "config.json is not" in refusal(folder)


KEYS = ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_size(model, key):
    assert f"config.json: {key} is missing" in refusal(model(**{key: None}))


@pytest.mark.parametrize("value", ["4", 4.0, 0, -2, True, [4]])
def test_an_impossible_size(model, value):
    assert "config.json: num_hidden_layers is" in refusal(model(num_hidden_layers=value))


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("mistral", "num_key_value_heads"),
        ("qwen2", "num_key_value_heads"),
        ("qwen3", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("mixtral", "num_local_experts"),
        ("mixtral", "num_experts_per_tok"),
        ("qwen3_moe", "moe_intermediate_size"),
    ],
)
def test_a_missing_size_whose_default_differs_between_families(model, family, key):
    assert f"config.json: {key} is missing" in refusal(model(family, **{key: None}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; known: Llama"),
        ({"architectures": []}, "architecture none is not supported"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"num_key_value_heads": 3}, "3 num_key_value_heads do not divide 4 attention heads"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"mlp_bias": True}, "mlp_bias true"),
        ({"model_type": None}, "transformers refuses it"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "RoPE type yarn"),
        ({"rope_parameters": {"rope_type": "new", "rope_theta": 1e4}}, "transformers refuses it"),
    ],
)
def test_what_the_engine_cannot_compute(model, changes, said):
    assert said in refusal(model(**changes))


# --- safetensors -----------------------------------------------------------------------------------------


def test_no_weights(model):
    folder = model()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    assert "holds no *.safetensors" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 0.01, 0.5, -1])
def test_a_file_cut_short(model, keep):
    """`keep` bytes, a share of them, or all but one."""
    file = model() / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    text = refusal(file.parent)
    assert f"{file} is damaged or cut short" in text or f"{file} cannot be read" in text


def test_a_damaged_header(model):
    file = model() / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[20] ^= 0xFF
    file.write_bytes(content)
    assert f"{file} is damaged" in refusal(file.parent)


def test_a_file_with_something_after_its_end(model):
    file = model() / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    assert f"{file} is damaged" in refusal(file.parent)


def test_a_folder_in_the_place_of_a_file(model):
    file = model() / "model-extra.safetensors"
    (file.parent / "model.safetensors").rename(file.parent / "model-1.safetensors")
    file.mkdir()
    assert str(file) in refusal(file.parent)


def test_a_missing_tensor(model):
    folder = model()
    edit_tensors(folder, lambda t: t.pop("model.layers.2.self_attn.k_proj.weight"))
    assert "tensor model.layers.2.self_attn.k_proj.weight is missing" in refusal(folder)


def test_a_missing_head_of_an_untied_model(model):
    folder = model()
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    assert "tensor lm_head.weight is missing" in refusal(folder)


def test_an_extra_tensor(model):
    folder = model()
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    text = refusal(folder)
    assert "model.safetensors: tensor model.layers.0.self_attn.q_proj.bias is not part" in text


def test_more_layers_than_the_configuration_says(model):
    assert "tensor model.layers.3." in refusal(model(num_hidden_layers=3))


def test_derived_tensors_are_left_out(model):
    folder = model()
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(folder)


def test_a_wrong_shape(model):
    folder = model()
    edit_tensors(folder, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64)}))
    text = refusal(folder)
    assert "tensor model.layers.1.mlp.up_proj.weight has shape [95, 64], config.json implies [96, 64]" in text


def test_a_transposed_matrix(model):
    folder = model()
    edit_tensors(folder, lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(64, 96)}))
    assert "has shape [64, 96], config.json implies [96, 64]" in refusal(folder)


def test_another_vocabulary_than_the_configuration_says(model):
    text = refusal(model(vocab_size=140))
    assert "tensor model.embed_tokens.weight has shape [131, 64], config.json implies [140, 64]" in text


def test_quantized_weights(model):
    folder = model()
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(96, 64, dtype=torch.int8)}))
    assert f"tensor {name} has dtype I8" in refusal(folder)


# --- sharded folders -------------------------------------------------------------------------------------


def index_of(folder: Path) -> tuple[Path, dict]:
    file = folder / "model.safetensors.index.json"
    return file, json.loads(file.read_text())


def test_an_index_that_names_a_file_that_is_not_there(sharded):
    _, index = index_of(sharded)
    name = index["weight_map"]["lm_head.weight"]
    (sharded / name).unlink()
    assert f"{sharded / name} is missing, though model.safetensors.index.json names it" in refusal(sharded)


def test_a_shard_cut_short(sharded):
    _, index = index_of(sharded)
    file = sharded / index["weight_map"]["model.norm.weight"]
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} is damaged or cut short" in refusal(sharded)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_a_broken_index(sharded, content):
    file, _ = index_of(sharded)
    file.write_text(content)
    assert f"{file} is no safetensors index" in refusal(sharded)


def test_an_index_that_names_the_wrong_shard(sharded):
    file, index = index_of(sharded)
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = next(s for s in shards if s != index["weight_map"]["lm_head.weight"])
    file.write_text(json.dumps(index))
    assert "index.json: tensor lm_head.weight is not in" in refusal(sharded)


def test_shards_without_an_index_load_but_not_with_a_stale_one_among_them(sharded):
    file, index = index_of(sharded)
    file.unlink()
    load(sharded)
    shutil.copy(sharded / index["weight_map"]["lm_head.weight"], sharded / "old.safetensors")
    text = refusal(sharded)
    assert "old.safetensors: tensor" in text and "is also in model-0" in text


def test_other_weights_beside_the_model_are_not_read(model):
    folder = model()
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    load(folder)
