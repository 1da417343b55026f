"""What each inference rank holds, against plain slicing as an engine's own loader does it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support import FAMILIES, make_hf_model

from megappo.bridge.algebra import local_tensor, slices
from megappo.bridge.inference import InferenceWeights
from megappo.models.spec import load_spec

MOE = ("mixtral", "qwen3_moe")
GRID = [(f, tp, 1) for f in FAMILIES for tp in (1, 2, 4)] + [
    (f, tp, ep) for f in MOE for tp, ep in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4))
]


def expected_rank(hf: dict[str, torch.Tensor], spec, rank: int, tp: int, ep: int) -> dict[str, torch.Tensor]:
    """The tensors of one rank, cut the way the engine's weight loaders do: by name, one tensor at a time."""
    copies = max(1, tp // spec.num_kv_heads)
    out: dict[str, torch.Tensor] = {}
    for name, t in hf.items():
        if ".q_proj." in name:
            k, v = (hf[name.replace("q_proj", x)] for x in ("k_proj", "v_proj"))
            kv = [x.chunk(tp // copies)[rank // copies] for x in (k, v)]
            out[name.replace("q_proj", "qkv_proj")] = torch.cat([t.chunk(tp)[rank], *kv])
        elif ".k_proj." in name or ".v_proj." in name or ".experts." in name:
            continue
        elif ".gate_proj." in name:
            up = hf[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat([t.chunk(tp)[rank], up.chunk(tp)[rank]])
        elif ".up_proj." in name:
            continue
        elif ".o_proj." in name or ".down_proj." in name:
            out[name] = t.chunk(tp, dim=1)[rank]
        elif "embed_tokens" in name or "lm_head" in name:
            rows = -(-len(t) // 64) * 64
            out[name] = torch.nn.functional.pad(t, (0, 0, 0, rows - len(t))).chunk(tp)[rank]
        else:
            out[name] = t
    return out | expected_experts(hf, spec, rank, tp, ep)


def expected_experts(hf, spec, rank: int, tp: int, ep: int) -> dict[str, torch.Tensor]:
    if spec.moe is None:
        return {}
    mixtral = spec.architecture == "MixtralForCausalLM"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    width, count = tp // ep, spec.moe.num_experts // ep
    mine, part = range(rank // width * count, (rank // width + 1) * count), rank % width
    out = {}
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}.{block}.experts."
        gates, ups, downs = ([hf[f"{at}{e}.{x}.weight"] for e in mine] for x in (gate, up, down))
        w13 = [torch.cat([g.chunk(width)[part], u.chunk(width)[part]]) for g, u in zip(gates, ups, strict=True)]
        out[f"{at}w13_weight"] = torch.stack(w13)
        out[f"{at}w2_weight"] = torch.stack([d.chunk(width, dim=1)[part] for d in downs])
    return out


@pytest.mark.parametrize(("family", "tp", "ep"), GRID)
def test_ranks_hold_what_an_engine_would_load(hf_folder, family, tp, ep):
    check(hf_folder(family), tp, ep)


def test_one_key_value_head_on_four_ranks(tmp_path):
    make_hf_model(tmp_path, "llama", num_key_value_heads=1, num_hidden_layers=1)
    check(tmp_path, 4, 1)


def check(folder, tp: int, ep: int) -> None:
    hf = load_file(folder / "model.safetensors")
    spec = load_spec(folder)
    weights = InferenceWeights(spec, tp, ep, replicas=2, first_rank=3)
    for rank in weights.ranks:
        held = {name: torch.zeros(shape) for name, shape in weights.local_shapes(rank).items()}
        for _, piece in weights.pieces(rank):
            local_tensor(held[piece.local], piece).copy_(hf[piece.hf][slices(piece.hf_box)])
        want = expected_rank(hf, spec, (rank - 3) % tp, tp, ep)
        assert held.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(held[name], tensor), (rank, name)


def test_experts_need_ranks_to_be_dealt_out_to(hf_folder):
    with pytest.raises(ValueError, match="ep 3 does not divide tp 4"):
        InferenceWeights(load_spec(hf_folder("mixtral")), tp=4, ep=3)
