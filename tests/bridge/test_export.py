"""Exported folders: what transformers loads is what was written, and a failed export changes nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support import FAMILIES

from megappo.checkpoint import hf
from megappo.checkpoint.hf import HFReader, write_hf
from megappo.errors import UserError

COMPANIONS = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"temperature": 0.6}',
    "LICENSE": "free",
    "README.md": "a card",
}
STALE = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "model.onnx")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def export(source: Path, out: Path, dtype: torch.dtype = torch.float32, **options) -> None:
    """Backwards, because a stream need not come in the order of the files."""
    tensors = weights_of(source)
    write_hf(reversed(tensors.items()), shapes_of(tensors), source, out, dtype, **options)


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in tensors.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def load_with_transformers(folder: Path):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("family", [*FAMILIES, "llama3_rope"])
def test_transformers_loads_what_was_written(hf_folder, tmp_path, family):
    source, out = hf_folder(family), tmp_path / "out"
    export(source, out)
    assert same(weights_of(out), weights_of(source))
    was, now = load_with_transformers(source), load_with_transformers(out)
    assert same(dict(now.named_parameters()), dict(was.named_parameters()))
    assert now.dtype == torch.float32
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(now(tokens).logits, was(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_configuration_says_the_dtype_of_the_weights(hf_folder, tmp_path, dtype):
    source, out = hf_folder("qwen2"), tmp_path / "out"
    export(source, out, dtype)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.") and "torch_dtype" not in config
    assert same(weights_of(out), {n: t.to(dtype) for n, t in weights_of(source).items()})
    assert load_with_transformers(out).dtype == dtype


def test_the_old_name_of_the_dtype_does_not_survive(hf_folder, tmp_path):
    source = tmp_path / "source"
    export(hf_folder("llama"), source, config_changes={"torch_dtype": "float16"})
    export(source, tmp_path / "out", torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config


def test_sharded_output(hf_folder, tmp_path, monkeypatch):
    source, out = hf_folder("llama"), tmp_path / "out"
    limit = 60_000  # the largest matrix, gate or up, has 24,576 bytes; the vocabulary's 33,536
    monkeypatch.setattr(hf, "SHARD_BYTES", limit)
    export(source, out)
    files = sorted(out.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    sizes = [sum(t.nbytes for t in load_file(f).values()) for f in files]
    assert len(files) > 5 and max(sizes) <= limit
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}
    assert same(weights_of(out), weights_of(source))
    assert same(
        dict(load_with_transformers(out).named_parameters()), dict(load_with_transformers(source).named_parameters())
    )
    assert {p.parent for p in HFReader(out).where.values()} == {out}


def test_a_tensor_larger_than_a_shard_is_alone_in_its_file(hf_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 1)
    source, out = hf_folder("qwen2_tied"), tmp_path / "out"
    export(source, out)
    assert len(list(out.glob("*.safetensors"))) == len(weights_of(source))
    assert same(weights_of(out), weights_of(source))


def test_what_is_no_weights_is_carried_over(hf_folder, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    export(hf_folder("llama"), source)
    for name, text in COMPANIONS.items():
        (source / name).write_text(text)
    for name in STALE:
        (source / name).write_text("old weights")
    (source / "original").mkdir()
    export(source, out, config_changes={"num_labels": 1})
    assert {f.name for f in out.iterdir()} == {*COMPANIONS, "config.json", "model.safetensors"}
    assert all((out / name).read_text() == text for name, text in COMPANIONS.items())
    config = json.loads((out / "config.json").read_text())
    assert config.pop("num_labels") == 1
    assert config == json.loads((source / "config.json").read_text())


def test_an_earlier_export_is_replaced_whole(hf_folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(hf, "SHARD_BYTES", 60_000)
        export(hf_folder("llama"), out)
    (out / "notes.txt").write_text("of the earlier export")
    export(hf_folder("qwen2"), out)
    assert {f.name for f in out.iterdir()} == {f.name for f in hf_folder("qwen2").iterdir()}
    assert same(weights_of(out), weights_of(hf_folder("qwen2")))
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_an_export_through_a_link_lands_where_it_points(hf_folder, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        export(hf_folder("llama"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and same(weights_of(tmp_path / "real"), weights_of(hf_folder("llama")))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["link", "real"]


def test_other_ranks_take_part_without_writing(hf_folder, tmp_path):
    tensors = weights_of(hf_folder("llama"))
    stream = iter(tensors.items())
    write_hf(stream, shapes_of(tensors), hf_folder("llama"), tmp_path / "out", torch.float32, write=False)
    assert next(stream, None) is None and not (tmp_path / "out").exists()


# --- failures --------------------------------------------------------------------------------------------


@pytest.fixture
def earlier(hf_folder, tmp_path) -> Iterator[Path]:
    """An export that must still be there, bit for bit and with nothing beside it, when the test is over."""
    out = tmp_path / "exports" / "out"
    export(hf_folder("llama"), out)
    before = contents(out)
    yield out
    assert contents(out) == before
    assert [f.name for f in out.parent.iterdir()] == ["out"]


def refusal(*args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        export(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_disk_that_fills_up_leaves_the_earlier_export(hf_folder, earlier, monkeypatch):
    calls = []

    def full(file, offset, tensor):
        calls.append(offset)
        if len(calls) == 20:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        put(file, offset, tensor)

    put = hf._put
    monkeypatch.setattr(hf, "_put", full)
    monkeypatch.setattr(hf, "SHARD_BYTES", 60_000)
    text = refusal(hf_folder("qwen2"), earlier)
    assert f"cannot write {earlier}: No space left on device" in text and "nothing there was changed" in text


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(hf_folder, earlier, monkeypatch):
    monkeypatch.setattr(hf.shutil, "disk_usage", lambda folder: SimpleNamespace(free=400_000))
    monkeypatch.setattr(hf, "_put", pytest.fail)
    assert "needs 0.00 GB but only 0.00 GB are free" in refusal(hf_folder("qwen2"), earlier)


def test_a_write_that_the_system_stops_leaves_the_earlier_export(hf_folder, earlier):
    """A real failure inside safetensors: files of this process may not grow past 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError) as caught:
            export(hf_folder("qwen2"), earlier)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"cannot write {earlier}" in str(caught.value) and "large" in str(caught.value)


@pytest.mark.parametrize("fault", ["missing", "twice", "unknown", "shape"])
def test_a_stream_that_is_not_the_promised_model_is_never_published(hf_folder, earlier, fault):
    tensors = weights_of(hf_folder("qwen2"))
    items, norm = list(tensors.items()), "model.norm.weight"
    changed = {
        "missing": [item for item in items if item[0] != norm],
        "twice": [*items, items[0]],
        "unknown": [*items, ("model.norm.bias", tensors[norm])],
        "shape": [(name, t[:-1] if name == norm else t) for name, t in items],
    }[fault]
    with pytest.raises(RuntimeError, match=items[0][0] if fault == "twice" else "model.norm"):
        write_hf(iter(changed), shapes_of(tensors), hf_folder("qwen2"), earlier, torch.float32)


@pytest.mark.parametrize("error", [RuntimeError("a rank died"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_stream_that_breaks_off_leaves_the_earlier_export(hf_folder, earlier, error):
    tensors = weights_of(hf_folder("qwen2"))

    def stream():
        yield from list(tensors.items())[:5]
        raise error

    with pytest.raises(type(error)):
        write_hf(stream(), shapes_of(tensors), hf_folder("qwen2"), earlier, torch.float32)


def test_a_failed_last_step_brings_the_earlier_export_back(hf_folder, earlier, monkeypatch):
    replace = os.replace

    def failing(a, b):
        if str(a).endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error", str(a))
        replace(a, b)

    monkeypatch.setattr(hf.os, "replace", failing)
    assert "Input/output error" in refusal(hf_folder("qwen2"), earlier)


def test_left_overs_of_a_killed_export_do_no_harm(hf_folder, tmp_path):
    for name in ("out.partial", "out.previous"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    export(hf_folder("llama"), tmp_path / "out")
    assert same(weights_of(tmp_path / "out"), weights_of(hf_folder("llama")))
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["thesis.tex"], "thesis.tex"),
        (["config.json", "main.py"], "config.json"),
        (["config.json", "model.safetensors", "project/main.py"], "project"),
    ],
)
def test_a_folder_of_something_else_is_never_replaced(hf_folder, tmp_path, names, said):
    out = tmp_path / "home"
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("years of work")
    assert f"holds other things ({said}) that it would delete" in refusal(hf_folder("llama"), out)
    assert contents(out) == dict.fromkeys(names, b"years of work")


def test_the_source_is_never_replaced(hf_folder, tmp_path):
    source = tmp_path / "models" / "source"
    export(hf_folder("llama"), source)
    before = contents(tmp_path)
    (tmp_path / "alias").symlink_to(source)
    for out in (source, tmp_path / "alias", source.parent, tmp_path / "models" / "x" / ".." / "source"):
        assert "would replace the model" in refusal(source, out)
    assert contents(tmp_path / "models") == {k.removeprefix("models/"): v for k, v in before.items()}


def test_a_file_in_the_way(hf_folder, tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(hf_folder("llama"), tmp_path / "file")
    text = refusal(hf_folder("llama"), tmp_path / "file" / "out")
    assert "cannot write" in text and "Not a directory" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(hf_folder, tmp_path):
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in refusal(hf_folder("llama"), tmp_path / "out")
    finally:
        tmp_path.chmod(0o700)


def test_a_source_that_has_gone(hf_folder, tmp_path, earlier):
    with pytest.raises(UserError, match=f"No such file or directory \\({tmp_path}/gone\\)"):
        write_hf(iter(()), {}, tmp_path / "gone", earlier, torch.float32)
