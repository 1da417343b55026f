"""Shards for SGLang's ranks, put together from a stream of full tensors, against chunks and concatenations by hand."""

from __future__ import annotations

import asyncio
import base64
import pickle
from types import SimpleNamespace

import pytest
import torch
from support import make_hf_model

from megappo.models.spec import load_spec
from megappo.rollout.sglang.shards import ShardWay


def by_hand(state: dict[str, torch.Tensor], tp: int, rank: int, heads: int) -> dict[str, torch.Tensor]:
    """A dense model's parameters as SGLang names, fuses and cuts them; key/value heads are repeated if too few."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            q, k, v = (state[name.replace("q_proj", x)] for x in ("q_proj", "k_proj", "v_proj"))
            dim = q.shape[0] // heads
            kv = k.shape[0] // dim
            if kv < tp:
                spread = [x.unflatten(0, (kv, dim)).repeat_interleave(tp // kv, 0).flatten(0, 1) for x in (k, v)]
                k, v = spread
            out[name.replace("q_proj", "qkv_proj")] = torch.cat([x.chunk(tp)[rank] for x in (q, k, v)])
        elif ".gate_proj." in name:
            up = state[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj", "gate_up_proj")] = torch.cat([x.chunk(tp)[rank] for x in (tensor, up)])
        elif "o_proj" in name or "down_proj" in name:
            out[name] = tensor.chunk(tp, 1)[rank]
        elif "embed_tokens" in name or "lm_head" in name:
            padded = torch.cat([tensor, tensor.new_zeros(192 - tensor.shape[0], tensor.shape[1])])
            out[name] = padded.chunk(tp)[rank]
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            out[name] = tensor
    return out


class FakeUpdate:
    """Keeps the bodies that would be posted."""

    def __init__(self, *sizes: int) -> None:
        self.servers = [SimpleNamespace(tp=tp) for tp in sizes]
        self.version_name, self.bytes, self.transfers = "v", 0, 0
        self.bodies: list[list[dict]] = []

    async def checked(self, path: str, body) -> None:
        assert path == "/update_weights_from_tensor"
        self.bodies.append([body(server) for server in self.servers])


def received(update: FakeUpdate, server: int, rank: int) -> list[tuple[str, torch.Tensor]]:
    texts = [bodies[server]["serialized_named_tensors"][rank] for bodies in update.bodies]
    return [pair for text in texts for pair in pickle.loads(base64.b64decode(text))]  # made here, a few lines ago


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_tied", "qwen3"])
def test_shards_are_those_cut_by_hand(tmp_path, family):
    model = make_hf_model(tmp_path, family)
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    way, update = ShardWay(load_spec(tmp_path), 60_000), FakeUpdate(1, 2, 4)
    way.send(iter(state.items()), update, asyncio.run)
    assert way.trouble is None and update.transfers > 2
    for place, server in enumerate(update.servers):
        for rank in range(server.tp):
            found = received(update, place, rank)
            wanted = by_hand(state, server.tp, rank, model.config.num_attention_heads)
            # The last of four ranks holds rows of the vocabulary that are padding, and nothing is sent for them.
            assert sorted(name for name, _ in found) == sorted(n for n, tensor in wanted.items() if tensor.any())
            for name, tensor in found:
                assert torch.equal(tensor, wanted[name]), name
    flags = [body["flush_cache"] for bodies in update.bodies for body in bodies]
    assert flags == [False] * (len(flags) - 3) + [True] * 3
    assert [("weight_version" in bodies[0]) for bodies in update.bodies] == [False] * (update.transfers - 1) + [True]


def test_weights_that_are_missing_are_named(tmp_path):
    model = make_hf_model(tmp_path, "llama")
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.3.mlp.up" not in name}
    way, update = ShardWay(load_spec(tmp_path), 10**9), FakeUpdate(1)
    way.send(iter(state.items()), update, asyncio.run)
    assert "layers.3.mlp.gate_up_proj.weight" in way.trouble


def test_a_model_that_cannot_be_cut_so_is_one_line(tmp_path):
    model = make_hf_model(tmp_path, "llama")
    way, update, seen = ShardWay(load_spec(tmp_path), 10**9), FakeUpdate(3), []
    way.send(((name, seen.append(name) or tensor) for name, tensor in model.state_dict().items()), update, asyncio.run)
    assert "use weight_sync tensor" in way.trouble and update.bodies == []
    assert len(seen) == len(model.state_dict())  # a collective is never left
