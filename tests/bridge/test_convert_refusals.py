"""Broken sources, layouts that do not fit, targets in the way, full disks, interrupts: one line, nothing lost."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools import write
from checkpoints_tools.average import average
from checkpoints_tools.convert import Options, Request, convert
from checkpoints_tools.inspect_model import describe
from checkpoints_tools.sources import open_source
from megappo.checkpoint.torch_dist import TorchDistReader
from megappo.errors import UserError


def refusal(call: Callable, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def made(hf_folder, tmp_path) -> Callable[..., Path]:
    """A converted model of its own, to be broken."""

    def make(kind: str, family: str = "llama", **layout) -> Path:
        convert(hf_folder(family), tmp_path / kind, Request(kind, **layout))
        return tmp_path / kind

    return make


# --- layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "request_", "said"),
    [
        ("llama", Request("onnx"), "--to onnx: unknown; use one of hf, megatron, inference"),
        ("llama", Request("megatron", tp=3), "--tp 3 does not divide the model's 4 attention heads"),
        ("llama", Request("megatron", tp=0), "--tp 0: must be at least 1"),
        ("llama", Request("megatron", pp=3), "4 layers cannot be divided over 3 pipeline stages"),
        ("llama", Request("megatron", pp=2, vpp=3), "cannot be divided into 3 chunks"),
        ("llama", Request("megatron", ep=2), "--ep 2: the model has no experts"),
        ("mixtral", Request("megatron", ep=3), "--ep 3 does not divide the model's 4 experts"),
        ("mixtral", Request("inference", ep=2), "--ep 2 does not divide --tp 1"),
        ("llama", Request("inference", pp=2), "an inference folder has no pipeline stages"),
        ("llama", Request("hf", dtype="int8"), "--dtype int8: unknown"),
    ],
)
def test_what_does_not_fit_the_model(hf_folder, tmp_path, family, request_, said):
    assert said in refusal(convert, hf_folder(family), tmp_path / "out", request_)
    assert not any(tmp_path.glob("out*"))


def test_mixed_dtypes_need_a_choice(hf_folder, tmp_path):
    convert(hf_folder("llama"), tmp_path / "mixed", Request("hf"))
    file = tmp_path / "mixed" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, file)
    text = refusal(convert, file.parent, tmp_path / "out", Request("hf"))
    assert "mixed dtypes" in text and "model.norm.weight is bfloat16" in text and "--dtype" in text
    convert(file.parent, tmp_path / "out", Request("hf", dtype="bf16"))
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


# --- sources ---------------------------------------------------------------------------------------------


def test_nothing_there(tmp_path):
    assert "no such file" in refusal(open_source, tmp_path / "none")
    assert "no config.json" in refusal(open_source, tmp_path)


def test_an_unknown_architecture_lists_the_known_ones(hf_folder, tmp_path):
    shutil.copytree(hf_folder("llama"), tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["GPT2LMHeadModel"]}))
    text = refusal(open_source, tmp_path / "gpt2")
    assert "GPT2LMHeadModel is not supported" in text and "LlamaForCausalLM" in text and "Qwen3MoeForCausalLM" in text


def test_a_checkpoint_without_configuration(made):
    folder = made("megatron")
    shutil.rmtree(folder / "hf")
    assert "--model" in refusal(open_source, folder)


def test_a_checkpoint_of_another_model(made, hf_folder):
    text = refusal(open_source, made("megatron"), hf_folder("qwen3"))
    assert "decoder.layers.self_attention" in text and "config.json" in text


def test_a_checkpoint_with_more_than_the_architecture_has(made, hf_folder):
    text = refusal(open_source, made("megatron", "qwen2"), hf_folder("llama"))
    assert "linear_qkv.bias is not part of this architecture (1 such tensors)" in text


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_chunks_cut_short(made, tmp_path, share):
    folder = made("megatron", tp=2)
    file = folder / "release" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    text = refusal(convert, folder, tmp_path / "out", Request("hf"))
    assert str(file) in text and "damaged or cut short" in text
    assert not (tmp_path / "out").exists()


def test_a_missing_file_of_chunks(made, tmp_path):
    folder = made("megatron", tp=2)
    (folder / "release" / "__1_0.distcp").unlink()
    assert "__1_0.distcp" in refusal(convert, folder, tmp_path / "out", Request("hf"))


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"garbage", pickle.dumps([1, 2])])
def test_a_damaged_description(made, content):
    folder = made("megatron")
    (folder / "release" / ".metadata").write_bytes(content)
    assert ".metadata is damaged" in refusal(open_source, folder)


class Harmful:
    """A pickle that would run a command."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_description_that_is_a_program_is_not_run(made, tmp_path):
    folder = made("megatron")
    (folder / "release" / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "ran")))
    assert "refused posix.system" in refusal(open_source, folder)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_tensor_is_not_run_either(made, tmp_path):
    folder = made("megatron")
    torch.save({"args": Harmful(tmp_path / "ran")}, folder / "release" / "common.pt")
    assert "holds more than plain data and was not read" in describe(folder)
    convert(folder, tmp_path / "out", Request("hf"))
    assert not (tmp_path / "ran").exists()


def test_another_format(made):
    folder = made("megatron")
    (folder / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "format zarr is not supported" in refusal(open_source, folder)


def test_a_tracker_that_leads_nowhere(made):
    folder = made("megatron")
    (folder / "latest_checkpointed_iteration.txt").write_text("300")
    assert "names iter_0000300, which is not there" in refusal(open_source, folder)
    (folder / "release").rename(folder / "iter_0000300")
    assert open_source(folder).step == "300"
    (folder / "latest_checkpointed_iteration.txt").write_text("../../etc")
    assert "neither an iteration nor 'release'" in refusal(open_source, folder)


def test_a_broken_inference_folder(made):
    folder = made("inference", tp=2)
    file = folder / "model-rank-1-part-0.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "qkv" not in k}, file)
    assert f"{file}: tensor model.layers.0.self_attn.qkv_proj.weight is missing" in refusal(open_source, folder)
    save_file(tensors | {"extra": torch.zeros(2)}, file)
    assert f"{file}: tensor extra is not part" in refusal(open_source, folder)
    save_file(tensors | {"model.norm.weight": torch.zeros(3)}, file)
    assert "model.norm.weight has shape [3], expected [64]" in refusal(open_source, folder)
    file.write_bytes(file.read_bytes()[:-8])
    assert f"{file} is damaged or cut short" in refusal(open_source, folder)
    file.unlink()
    assert str(file) in refusal(open_source, folder)


# --- targets ---------------------------------------------------------------------------------------------


def test_what_is_there_is_replaced_only_by_force_and_only_if_it_is_a_model(hf_folder, tmp_path):
    out = tmp_path / "out"
    for kind in ("hf", "megatron", "inference"):
        convert(hf_folder("llama"), out, Request(kind), Options(force=True))
        assert "give --force to replace it" in refusal(convert, hf_folder("llama"), out, Request("hf"))
    (out / "thesis").mkdir()
    text = refusal(convert, hf_folder("llama"), out, Request("hf"), Options(force=True))
    assert "something else than a model" in text and (out / "thesis").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_source_and_target_in_each_other(made, tmp_path):
    folder = made("megatron")
    for out in (folder, folder / "x", tmp_path):
        assert "lie in each other" in refusal(convert, folder, out, Request("hf"), Options(force=True))


def test_a_full_disk_is_noticed_before(hf_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    text = refusal(convert, hf_folder("llama"), tmp_path / "out", Request("hf"))
    assert "needs 0.00 GB but the disk has 0.00 GB free" in text
    assert not (tmp_path / "out").exists()


def test_a_full_disk_in_the_middle(hf_folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    for kind in ("hf", "megatron"):
        monkeypatch.setattr(write.os, "pwrite", full)
        text = refusal(convert, hf_folder("llama"), tmp_path / kind, Request(kind))
        assert "No space left" in text or "disk full" in text
        assert not (tmp_path / kind).exists() and (tmp_path / f"{kind}.partial").exists()
        monkeypatch.undo()
        convert(hf_folder("llama"), tmp_path / kind, Request(kind))
        assert not (tmp_path / f"{kind}.partial").exists()


def test_dry_run_writes_nothing(hf_folder, tmp_path):
    text = convert(hf_folder("llama"), tmp_path / "out", Request("megatron", tp=2), Options(dry_run=True))
    assert "release/__1_0.distcp" in text and "nothing was written" in text
    assert not any(tmp_path.iterdir())


# --- resuming --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hf", "megatron", "inference"])
def test_an_interrupted_conversion_goes_on_where_it_was(hf_folder, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("megappo.checkpoint.hf.SHARD_BYTES", 100_000)
    request = Request(kind, tp=1 if kind == "hf" else 4)
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert(hf_folder("llama"), whole, request, Options(workers=1))
    real, calls = write.os.replace, []

    def interrupted(source, target):
        calls.append(target)
        if len([c for c in calls if str(c).endswith((".safetensors", ".distcp"))]) == 3:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(write.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(hf_folder("llama"), out, request, Options(workers=1))
    monkeypatch.setattr(write.os, "replace", real)
    done = json.loads((tmp_path / "out.partial" / ".conversion.json").read_text())["done"]
    assert len(done) == 2
    other = Request(kind, dtype="bf16", tp=1 if kind == "hf" else 4)
    assert "another conversion" in refusal(convert, hf_folder("llama"), out, other, Options(resume=True))
    stamps = {name: (tmp_path / "out.partial" / name).stat().st_mtime_ns for name in done}
    convert(hf_folder("llama"), out, request, Options(resume=True, workers=1))
    assert stamps == {name: (out / name).stat().st_mtime_ns for name in done}
    names = sorted(str(p.relative_to(whole)) for p in whole.rglob("*.safetensors"))
    assert names == sorted(str(p.relative_to(out)) for p in out.rglob("*.safetensors"))
    assert all((whole / name).read_bytes() == (out / name).read_bytes() for name in names)
    if kind == "megatron":
        readers = [TorchDistReader(folder / "release") for folder in (whole, out)]
        assert readers[0].tensors == readers[1].tensors


# --- averages --------------------------------------------------------------------------------------------


def test_averages_and_merges(hf_folder, tmp_path):
    a = load_file(hf_folder("llama") / "model.safetensors")
    paths = [hf_folder("llama"), tmp_path / "b", tmp_path / "c"]
    others = []
    for seed, path in enumerate(paths[1:]):
        convert(paths[0], path, Request("hf"))
        g = torch.Generator().manual_seed(seed)
        others.append({k: v + torch.randn(v.shape, generator=g) for k, v in a.items()})
        save_file(others[-1], path / "model.safetensors")
    b, c = others
    none = Options()
    average(tmp_path / "mean", paths, None, None, None, none)
    average(tmp_path / "weighted", paths, "0.5,0.25,0.25", None, None, none)
    average(tmp_path / "merged", paths[1:], "1,0.5", paths[0], None, none)
    mean, weighted, merged = (load_file(tmp_path / n / "model.safetensors") for n in ("mean", "weighted", "merged"))
    for name in a:
        torch.testing.assert_close(mean[name], (a[name] + b[name] + c[name]) / 3)
        torch.testing.assert_close(weighted[name], 0.5 * a[name] + 0.25 * b[name] + 0.25 * c[name])
        torch.testing.assert_close(merged[name], a[name] + (b[name] - a[name]) + 0.5 * (c[name] - a[name]))
    assert "2 numbers for 3 models" in refusal(average, tmp_path / "x", paths, "1,2", None, None, none)
    assert "give numbers" in refusal(average, tmp_path / "x", paths, "1,x,2", None, None, none)
    other = [hf_folder("llama"), hf_folder("qwen2")]
    assert "different models" in refusal(average, tmp_path / "x", other, None, None, None, none)
