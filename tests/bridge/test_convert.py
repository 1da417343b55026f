"""Round trips between the formats, bit for bit, for every family and a grid of layouts, without a process group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import FAMILIES, make_hf_model

from checkpoints_tools.convert import Options, Request, convert
from checkpoints_tools.inspect_model import describe
from checkpoints_tools.sources import open_source
from checkpoints_tools.verify import verify

MOE = ("mixtral", "qwen3_moe")
DENSE_LAYOUTS = [
    {},
    {"tp": 2},
    {"tp": 4},  # more than the two key/value heads, and a vocabulary of 131
    {"pp": 2, "vpp": 2},
    {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1},
    {"tp": 2, "pp": 4},
]
MOE_LAYOUTS = [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "pp": 2, "vpp": 2, "ep": 4}, {"ep": 2, "etp": 2}]
GRID = [(f, x) for f in (*FAMILIES, *MOE) for x in DENSE_LAYOUTS] + [(f, x) for f in MOE for x in MOE_LAYOUTS]
INFERENCE = [(f, x) for f in FAMILIES for x in ({}, {"tp": 2}, {"tp": 4})] + [
    (f, x) for f in MOE for x in ({"tp": 2}, {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4})
]


def ids(value) -> str | None:
    return " ".join(f"{k}{v}" for k, v in value.items()) or "whole" if isinstance(value, dict) else None


def assert_same_files(a: Path, b: Path) -> None:
    """The same tensors, bit for bit, in the folders' safetensors."""
    x, y = ({k: v for f in p.glob("*.safetensors") for k, v in load_file(f).items()} for p in (a, b))
    assert x.keys() == y.keys()
    assert all(x[name].dtype == y[name].dtype and torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize(("family", "layout"), GRID, ids=ids)
def test_to_megatron_and_back(hf_folder, tmp_path, family, layout):
    source = hf_folder(family)
    convert(source, tmp_path / "megatron", Request("megatron", **layout))
    convert(tmp_path / "megatron", tmp_path / "back", Request("hf"))
    assert_same_files(source, tmp_path / "back")


@pytest.mark.parametrize(("family", "layout"), INFERENCE, ids=ids)
def test_to_an_inference_folder_and_back(hf_folder, tmp_path, family, layout):
    source = hf_folder(family)
    convert(source, tmp_path / "inference", Request("inference", **layout))
    assert len(list((tmp_path / "inference").glob("*.safetensors"))) == layout.get("tp", 1)
    convert(tmp_path / "inference", tmp_path / "back", Request("hf"))
    assert_same_files(source, tmp_path / "back")


def test_an_odd_number_of_layers_and_one_key_value_head(tmp_path):
    make_hf_model(tmp_path / "hf", "qwen2_tied", num_hidden_layers=5, num_key_value_heads=1, vocab_size=133)
    convert(tmp_path / "hf", tmp_path / "a", Request("megatron", tp=4, pp=2, first_stage_layers=2))
    convert(tmp_path / "a", tmp_path / "b", Request("inference", tp=4))
    convert(tmp_path / "b", tmp_path / "c", Request("megatron", tp=2))
    convert(tmp_path / "c", tmp_path / "back", Request("hf"))
    assert_same_files(tmp_path / "hf", tmp_path / "back")


def test_bf16_goes_through_every_format_unchanged(hf_folder, tmp_path):
    convert(hf_folder("qwen3"), tmp_path / "bf16", Request("hf", dtype="bf16"))
    want = {name: t.bfloat16() for name, t in load_file(hf_folder("qwen3") / "model.safetensors").items()}
    got = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(torch.equal(got[name], want[name]) for name in want)
    convert(tmp_path / "bf16", tmp_path / "megatron", Request("megatron", tp=2, pp=2))
    convert(tmp_path / "megatron", tmp_path / "inference", Request("inference", tp=2))
    convert(tmp_path / "inference", tmp_path / "back", Request("hf"))
    assert_same_files(tmp_path / "bf16", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("bias", [True, False])
def test_a_value_head_comes_along(hf_folder, tmp_path, bias):
    source = tmp_path / "critic"
    convert(hf_folder("qwen2_tied"), source, Request("hf"))
    tensors = load_file(source / "model.safetensors")
    tensors["score.weight"] = torch.randn(1, 64)
    if bias:
        tensors["score.bias"] = torch.randn(1)
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "megatron", Request("megatron", tp=2, pp=2))
    convert(tmp_path / "megatron", tmp_path / "inference", Request("inference", tp=2))
    convert(tmp_path / "inference", tmp_path / "back", Request("hf"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["score.bias"], tensors.get("score.bias", torch.zeros(1)))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_many_files_make_many_files(hf_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("megappo.checkpoint.hf.SHARD_BYTES", 100_000)
    convert(hf_folder("llama"), tmp_path / "many", Request("hf"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert_same_files(hf_folder("llama"), tmp_path / "many")
    convert(tmp_path / "many", tmp_path / "megatron", Request("megatron", tp=2), Options(workers=3))
    assert verify(tmp_path / "many", tmp_path / "megatron")[1]


def test_what_is_no_weight_is_carried_over(hf_folder, tmp_path):
    source = tmp_path / "source"
    convert(hf_folder("llama"), source, Request("hf"))
    extra = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "LICENSE": "free",
        "generation_config.json": "{}",
    }
    for name, text in extra.items():
        (source / name).write_text(text)
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    convert(source, tmp_path / "megatron", Request("megatron"))
    convert(tmp_path / "megatron", tmp_path / "inference", Request("inference"))
    convert(tmp_path / "inference", tmp_path / "back", Request("hf"))
    for folder in (tmp_path / "megatron" / "hf", tmp_path / "inference", tmp_path / "back"):
        assert {name: (folder / name).read_text() for name in extra} == extra
        assert not (folder / "pytorch_model.bin").exists()
    names = {p.name for p in (tmp_path / "back").iterdir()}
    assert names == {*extra, "config.json", "model.safetensors"}


def test_transformers_loads_what_comes_back(hf_folder, tmp_path):
    import transformers as tf

    convert(hf_folder("mixtral"), tmp_path / "megatron", Request("megatron", tp=2, ep=2))
    convert(tmp_path / "megatron", tmp_path / "back", Request("hf"))
    tokens = torch.arange(1, 9)[None]
    models = [tf.AutoModelForCausalLM.from_pretrained(p).eval() for p in (hf_folder("mixtral"), tmp_path / "back")]
    with torch.no_grad():
        assert torch.equal(*(model(tokens).logits for model in models))


def test_inspect_tells_the_kinds_apart(hf_folder, tmp_path):
    convert(hf_folder("qwen3_moe"), tmp_path / "megatron", Request("megatron", tp=2, ep=2))
    convert(hf_folder("qwen3_moe"), tmp_path / "inference", Request("inference", tp=2, ep=2))
    megatron = describe(tmp_path / "megatron")
    assert megatron.startswith("Megatron torch_dist checkpoint, step release\n")
    assert "decoder.layers.mlp.experts.experts.linear_fc1.weight" in megatron and "[4, 4, 96, 64]" in megatron
    assert "tp 2" in megatron.splitlines()[-1] and "expert 2" in megatron.splitlines()[-1]
    inference = describe(tmp_path / "inference").splitlines()
    assert inference[0] == "inference folder: Qwen3MoeForCausalLM, tp 2, ep 2, float32"
    assert any("experts.w13_weight" in line and "[2, 96, 64]" in line for line in inference)


def test_verify_names_what_differs(hf_folder, tmp_path):
    convert(hf_folder("llama"), tmp_path / "other", Request("hf"))
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    report, same = verify(hf_folder("llama"), tmp_path / "other")
    assert not same and report.splitlines()[0].startswith("model.norm.weight: max 5.000e-01")
    assert report.splitlines()[-1].startswith("different: 39 tensors, 1 differ")
    assert verify(hf_folder("llama"), tmp_path / "other", tolerance=0.6)[1]
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, tmp_path / "other" / "model.safetensors")
    assert not verify(hf_folder("llama"), tmp_path / "other", tolerance=1e9)[1]
    assert verify(tmp_path / "other", tmp_path / "other")[1]


def test_sources_give_boxes_of_any_shape(hf_folder, tmp_path):
    """A read that crosses the chunks of several ranks is put together from them."""
    convert(hf_folder("llama"), tmp_path / "megatron", Request("megatron", tp=4))
    convert(hf_folder("llama"), tmp_path / "inference", Request("inference", tp=4))
    want = load_file(hf_folder("llama") / "model.safetensors")
    for folder in (tmp_path / "megatron", tmp_path / "inference"):
        source = open_source(folder)
        for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight", "lm_head.weight"):
            got = source.read(name, ((5, 61), (7, 50)))
            assert torch.equal(got, want[name][5:61, 7:50]), name
