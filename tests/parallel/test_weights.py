"""Weights of every family into every layout and out again, against transformers: same log-probs, same bits."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support import FAMILIES, make_hf_model
from warm_ranks import on_ranks

LAYOUTS = {
    "DP2": {},
    "TP2": {"tp": 2},
    "TP2 SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP2 VPP2": {"pp": 2, "vpp": 2},
}
LENGTHS = [9, 14, 3, 21, 6, 2, 17]
FAMILY_NAMES = [*FAMILIES, "llama3_rope"]


def samples() -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (n,), generator=g).tolist() for n in LENGTHS]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def differing(a: dict, b: dict) -> list[str]:
    return sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n]))


# --- what the ranks do -----------------------------------------------------------------------------------


def build(folder: Path, layout: dict, critic: bool = False, dtype: torch.dtype = torch.float32):
    """A frozen role with the folder's weights, and how many elements this rank read for them."""
    from megappo.checkpoint.hf import HFReader
    from megappo.engine.engine import EngineOptions, ModelEngine
    from megappo.models.spec import load_spec
    from megappo.parallel.layout import ParallelLayout

    engine = ModelEngine(
        load_spec(folder),
        ParallelLayout(world=dist.get_world_size(), **layout),
        EngineOptions(critic=critic, dtype=dtype),
    )
    reader = HFReader(folder)
    read, count = reader.read, []

    def counting(name, box):
        count.append(math.prod(stop - start for start, stop in box))
        tensor = read(name, box)
        assert tensor.numel() == count[-1], f"{name}: more was read than asked for"
        return tensor

    reader.read = counting
    engine.load_hf(reader)
    return engine, sum(count)


def score(engine, want: str) -> torch.Tensor:
    """Log-probs or values of every token but the first of each sample, in order, on every rank."""
    from megappo.data.schedule import Budget, plan_forward
    from megappo.data.sft_rows import SftRow
    from megappo.trainer.sft import row_batch

    rows = [SftRow(i, tokens[:1], tokens[1:]) for i, tokens in enumerate(samples())]
    layout = engine.layout
    placement = engine.placement(np.arange(len(rows)) % layout.dp)
    batch = row_batch(rows, placement, dist.get_rank())
    multiple = layout.pp if layout.vpp > 1 else 1
    micro = plan_forward(batch.info.length, placement.owner, layout.dp, Budget(tokens=32), multiple)
    column = engine.forward(batch, micro[engine.context.coords.dp], want)[want]
    full = torch.zeros(sum(LENGTHS))
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    for i in batch.indices:
        full[starts[i] : starts[i + 1]] = column[batch.token_index([int(i)])]
    dist.all_reduce(full, group=engine.context.dp_group)
    return torch.cat([full[a + 1 : b] for a, b in pairwise(starts)])


def held_elements(engine) -> int:
    """Elements of this rank's parameters, without the rows that pad the vocabulary."""
    count = sum(p.numel() for chunk in engine.chunks for p in chunk.parameters())
    spec, tp = engine.spec, engine.layout.tp
    padding = spec.padded_vocab(tp) - spec.vocab_size
    if engine.context.coords.tp == tp - 1:
        names = [n for chunk in engine.chunks for n, _ in chunk.named_parameters()]
        tables = [
            n for n in names if "word_embeddings" in n or (n == "output_layer.weight" and not engine.options.critic)
        ]
        count -= padding * spec.hidden_size * len(tables)
    return count


def export(engine, source: Path, out: Path) -> None:
    from megappo.checkpoint.hf import write_hf

    shapes = engine.weights.hf_shapes()
    write_hf(engine.stream_weights(torch.float32), shapes, source, out, torch.float32, write=dist.get_rank() == 0)


def round_trip(folder: Path, layout: dict, out: Path) -> dict:
    """Load, score, stream and export a policy."""
    engine, read = build(folder, layout)
    reads = [None] * dist.get_world_size()
    dist.all_gather_object(reads, (read, held_elements(engine)))
    logprobs = score(engine, "logprobs")
    streamed = {name: t.clone() for name, t in engine.stream_weights(torch.float32)}
    export(engine, folder, out)
    return {"logprobs": logprobs, "streamed": streamed, "reads": reads}


def score_bf16(folder: Path, layout: dict) -> dict:
    engine, _ = build(folder, layout, dtype=torch.bfloat16)
    return {
        "logprobs": score(engine, "logprobs"),
        "streamed": {name: t.clone() for name, t in engine.stream_weights(torch.bfloat16)},
    }


def critic_round_trip(folder: Path, layout: dict, out: Path) -> dict:
    engine, read = build(folder, layout, critic=True)
    reads = [None] * dist.get_world_size()
    dist.all_gather_object(reads, (read, held_elements(engine)))
    values = score(engine, "values")
    streamed = {name: t.clone() for name, t in engine.stream_weights(torch.float32)}
    export(engine, folder, out)
    return {"values": values, "streamed": streamed, "reads": reads}


def refused(folder: Path, layout: dict, critic: bool) -> str:
    """The error of every rank when a folder is loaded; none of them may wait for another."""
    from megappo.errors import UserError

    try:
        build(folder, layout, critic)
    except UserError as err:
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, str(err))
        assert len(set(said)) == 1
        return said[0]
    return "loaded"


# --- policies --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`models(family)` → its folder and transformers' log-prob of every token, from a sample at a time."""
    root, known = tmp_path_factory.mktemp("weights"), {}

    def get(family: str):
        if family not in known:
            model = make_hf_model(root / family, family)
            known[family] = (root / family, logprobs_of(model))
        return known[family]

    return get


@torch.no_grad()
def logprobs_of(model) -> torch.Tensor:
    parts = []
    for tokens in map(torch.tensor, samples()):
        rows = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
        parts.append(rows[:-1].gather(1, tokens[1:, None]).squeeze(1))
    return torch.cat(parts)


def load_with_transformers(folder: Path, kind: str = "AutoModelForCausalLM", **options):
    import transformers

    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_policy_is_loaded_scored_streamed_and_exported(models, tmp_path, family, layout):
    folder, expected = models(family)
    got = on_ranks(2, round_trip, folder, LAYOUTS[layout], tmp_path / "out")
    assert (got["logprobs"] - expected).abs().max() < 1e-4
    original = weights_of(folder)
    assert differing(got["streamed"], original) == []
    assert differing(weights_of(tmp_path / "out"), original) == []
    assert ("lm_head.weight" in original) == (family != "qwen2_tied")
    for read, held in got["reads"]:
        assert read == held, "a rank reads what it holds and nothing else"
    reads = [read for read, _ in got["reads"]]
    whole = sum(t.numel() for t in original.values())
    if layout == "DP2":
        assert reads == [whole, whole]
    elif layout.startswith("TP2"):
        assert max(reads) < 0.51 * whole
    else:
        shared = original["model.embed_tokens.weight"].numel() if family == "qwen2_tied" else 0
        assert sum(reads) == whole + shared, "a pipeline reads each tensor once, tied embeddings at both ends"


@pytest.mark.parametrize(
    "layout",
    [
        {"ep": 2},
        {"tp": 2, "etp": 2, "sequence_parallel": True},
        {"tp": 2, "ep": 2, "sequence_parallel": True},
        {"pp": 2, "vpp": 2},
        {"cp": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_of_experts_is_loaded_scored_streamed_and_exported(models, tmp_path, family, layout):
    folder, expected = models(family)
    got = on_ranks(2, round_trip, folder, layout, tmp_path / "out")
    assert (got["logprobs"] - expected).abs().max() < 1e-4
    original = weights_of(folder)
    assert differing(got["streamed"], original) == []
    assert differing(weights_of(tmp_path / "out"), original) == []
    assert all(read == held for read, held in got["reads"])
    if "cp" not in layout:
        assert max(read for read, _ in got["reads"]) < 0.8 * sum(t.numel() for t in original.values())


def test_context_parallel_ranks_hold_the_same_weights(models, tmp_path):
    folder, expected = models("qwen2_tied")
    got = on_ranks(2, round_trip, folder, {"cp": 2}, tmp_path / "out")
    assert (got["logprobs"] - expected).abs().max() < 1e-4
    assert differing(weights_of(tmp_path / "out"), weights_of(folder)) == []


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_transformers_loads_an_export_of_two_stages(models, tmp_path, family):
    folder, expected = models(family)
    on_ranks(2, round_trip, folder, LAYOUTS["PP2 VPP2"], tmp_path / "out")
    model = load_with_transformers(tmp_path / "out")
    assert torch.equal(logprobs_of(model), expected)


@pytest.mark.parametrize("layout", ["TP2 SP", "PP2"])
@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "qwen3"])
def test_bf16_is_close_to_transformers_and_streams_the_rounded_weights(models, family, layout):
    folder, expected = models(family)
    got = on_ranks(2, score_bf16, folder, LAYOUTS[layout])
    rounded = logprobs_of(load_with_transformers(folder, dtype=torch.bfloat16))
    assert (got["logprobs"] - expected).abs().mean() < 2 * (rounded - expected).abs().mean() + 0.01
    assert (got["logprobs"] - rounded).abs().max() < 0.15
    original = {name: t.bfloat16() for name, t in weights_of(folder).items()}
    assert differing(got["streamed"], original) == []


def test_uneven_and_interleaved_pipelines(tmp_path):
    """Six layers: two on the first stage, four on the last, each stage cut into two chunks."""
    model = make_hf_model(tmp_path / "six", "qwen2", num_hidden_layers=6)
    for layout in ({"pp": 2, "vpp": 2, "first_stage_layers": 2}, {"pp": 2, "last_stage_layers": 1}):
        got = on_ranks(2, round_trip, tmp_path / "six", layout, tmp_path / "out")
        assert (got["logprobs"] - logprobs_of(model)).abs().max() < 1e-4
        assert differing(got["streamed"], weights_of(tmp_path / "six")) == []


def test_a_sharded_folder_is_read_in_slices(models, tmp_path):
    folder, expected = models("llama")
    make_hf_model(tmp_path / "sharded", "llama", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 4
    for layout in ("TP2", "PP2"):
        got = on_ranks(2, round_trip, tmp_path / "sharded", LAYOUTS[layout], tmp_path / "out")
        assert all(read == held for read, held in got["reads"])
        assert (got["logprobs"] - expected).abs().max() < 1e-4
        assert differing(weights_of(tmp_path / "out"), weights_of(folder)) == []
        assert [f.name for f in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_every_rank_refuses_a_damaged_folder_alike(models, tmp_path, layout):
    folder, _ = models("llama")
    tensors = weights_of(folder)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    del tensors["model.layers.3.mlp.down_proj.weight"]  # on the last stage only
    save_file(tensors, tmp_path / "model.safetensors")
    text = on_ranks(2, refused, tmp_path, LAYOUTS[layout], False)
    assert "tensor model.layers.3.mlp.down_proj.weight is missing" in text


# --- critics ---------------------------------------------------------------------------------------------


def critic_folder(source: Path, folder: Path) -> Path:
    """A critic on disk: the policy's trunk with a random value head."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = {name: t for name, t in weights_of(source).items() if name != "lm_head.weight"}
    g = torch.Generator().manual_seed(1)
    head = {"score.weight": torch.randn(1, 64, generator=g), "score.bias": torch.randn(1, generator=g)}
    save_file(tensors | head, folder / "model.safetensors")
    return folder


@torch.no_grad()
def values_of(folder: Path) -> torch.Tensor:
    """V before every token but the first, from transformers' own token classifier."""
    model = load_with_transformers(folder, "AutoModelForTokenClassification", num_labels=1, dtype=torch.float32)
    return torch.cat([model(torch.tensor(t)[None]).logits[0, :-1, 0] for t in samples()])


@pytest.mark.parametrize("layout", ["TP2 SP", "PP2 VPP2"])
@pytest.mark.parametrize("family", ["llama", "qwen2_tied"])
def test_a_critic_takes_the_trunk_of_a_policy_and_starts_at_zero(models, tmp_path, family, layout):
    folder, _ = models(family)
    got = on_ranks(2, critic_round_trip, folder, LAYOUTS[layout], tmp_path / "out")
    assert torch.equal(got["values"], torch.zeros_like(got["values"]))
    head = {name: got["streamed"].pop(name) for name in ("score.weight", "score.bias")}
    assert head["score.weight"].shape == (1, 64) and not any(t.any() for t in head.values())
    trunk = {name: t for name, t in weights_of(folder).items() if name != "lm_head.weight"}
    assert differing(got["streamed"], trunk) == []


@pytest.mark.parametrize("layout", ["DP2", "TP2 SP", "PP2 VPP2"])
@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "qwen3"])
def test_a_critic_is_loaded_scored_and_exported(models, tmp_path, family, layout):
    folder = critic_folder(models(family)[0], tmp_path / "critic")
    got = on_ranks(2, critic_round_trip, folder, LAYOUTS[layout], tmp_path / "out")
    assert (got["values"] - values_of(folder)).abs().max() < 1e-4
    assert differing(got["streamed"], weights_of(folder)) == []
    assert differing(weights_of(tmp_path / "out"), weights_of(folder)) == []
    assert all(read == held for read, held in got["reads"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    assert torch.equal(values_of(tmp_path / "out"), values_of(folder))


def test_a_policy_is_not_loaded_from_a_critic(models, tmp_path):
    folder = critic_folder(models("llama")[0], tmp_path / "critic")
    assert "tensor lm_head.weight is missing" in on_ranks(2, refused, folder, LAYOUTS["TP2"], False)
    folder = critic_folder(models("qwen2_tied")[0], tmp_path / "tied_critic")
    assert "tensor score.bias is not part of this architecture" in on_ranks(2, refused, folder, LAYOUTS["PP2"], False)
