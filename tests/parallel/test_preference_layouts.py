"""The preference loss in every layout and micro-batch split is that of transformers in float64."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support import make_hf_model
from warm_ranks import on_ranks

from megappo.config.schema.optim import OptimConfig

LR, CENTER = 1e-3, 0.02
#: prompt, chosen and rejected tokens, margin; lengths odd and even, so that last tokens fall on any CP rank
SIZES = [(4, 5, 9, 0.5), (3, 11, 2, 0.0), (1, 1, 6, 1.5), (7, 3, 3, 0.0), (2, 14, 8, 0.3), (5, 2, 1, 0.1)]
STEPS = [[0, 1, 2, 3, 4, 5], [5, 2, 4]]


def example_pairs():
    from megappo.data.preferences import PreferencePair

    g = torch.Generator().manual_seed(5)

    def ids(n):
        return torch.randint(3, 131, (n,), generator=g).tolist()

    return [
        PreferencePair(i, ids(p), "", ids(c), ids(r), [True] * c, [True] * r, "", "", margin)
        for i, (p, c, r, margin) in enumerate(SIZES)
    ]


def train(folder, layout_options: dict, budget_options: dict) -> dict:
    """Two optimizer steps in one layout; metrics and weights, on every rank."""
    from megappo.checkpoint.hf import HFReader
    from megappo.data.schedule import Budget
    from megappo.engine.engine import EngineOptions, ModelEngine
    from megappo.engine.losses import PreferenceLoss
    from megappo.models.spec import load_spec
    from megappo.parallel.layout import ParallelLayout
    from megappo.trainer.phases import Update, step_metrics
    from megappo.trainer.planning import role_plan
    from megappo.trainer.reward_model import margins, pair_batch

    layout = ParallelLayout(**{"world": dist.get_world_size(), **layout_options})
    optim = OptimConfig(lr=LR, max_grad_norm=0.5, weight_decay=0.01)
    engine = ModelEngine(load_spec(folder), layout, EngineOptions(critic=True), optim=optim, total_steps=10)
    engine.load_hf(HFReader(folder))
    steps = []
    for chosen in STEPS:
        pairs = [example_pairs()[i] for i in chosen]
        lengths = np.array([sum(pair.lengths) for pair in pairs])
        plan = role_plan(engine, lengths, len(pairs), Budget(**budget_options), seed=(0,), shuffle=False)
        placement = engine.placement(np.repeat(plan.placement.owner, 2))
        batch = pair_batch(pairs, margins(pairs, "data"), placement, dist.get_rank())
        micro = [[s for p in part for s in (2 * p, 2 * p + 1)] for part in plan.micro_batches(0)]
        loss = PreferenceLoss(CENTER)
        result = engine.train_step(batch, np.arange(2 * len(pairs)), micro, loss, agg_mode="token-mean")
        steps.append(step_metrics(engine, Update("train", loss, [result], batch.info.sample_id)))
    return {"steps": steps, "weights": {name: t.clone() for name, t in engine.stream_weights(torch.float32)}}


def reference(folder) -> dict:
    """The same with a transformers trunk and a linear head in float64, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    head = torch.nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        head.weight.copy_(tensors["score.weight"]), head.bias.copy_(tensors["score.bias"])
    lm_head = model.get_output_embeddings().weight
    trunk = [p for p in model.parameters() if model.config.tie_word_embeddings or p is not lm_head]
    params = [*trunk, *head.parameters()]
    groups = [{"params": [p for p in params if (p.dim() > 1) == on], "weight_decay": 0.01 * on} for on in (1, 0)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)

    def score(ids):
        return head(model.model(torch.tensor([ids])).last_hidden_state[0, -1])[0]

    steps = []
    for chosen in STEPS:
        optimizer.zero_grad()
        scores = [
            (score(p.prompt_ids + p.chosen_ids), score(p.prompt_ids + p.rejected_ids), p.margin)
            for p in (example_pairs()[i] for i in chosen)
        ]
        loss = sum(-torch.log(torch.sigmoid(c - r - m)) + CENTER * (c + r) ** 2 for c, r, m in scores) / len(scores)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        scores = [(float(c.detach()), float(r.detach()), m) for c, r, m in scores]
        steps.append(
            {
                "train/loss": float(loss.detach()),
                "train/margin": sum(c - r for c, r, _ in scores) / len(scores),
                "reward_model/chosen_mean": sum(c for c, _, _ in scores) / len(scores),
                "train/grad_norm": float(norm),
            }
        )
    with tempfile.TemporaryDirectory() as saved:  # under the names that checkpoints use
        model.save_pretrained(saved)
        weights = load_file(f"{saved}/model.safetensors")
    weights.pop("lm_head.weight", None)
    weights |= {"score.weight": head.weight.detach(), "score.bias": head.bias.detach()}
    return {"steps": steps, "weights": {name: w.numpy() for name, w in weights.items()}}


CASES = {
    1: [("one pair", {}, {"samples": 1}), ("packed", {}, {"tokens": 40}), ("all", {}, {"tokens": 200})],
    2: [
        ("TP2 SP", {"tp": 2, "sequence_parallel": True}, {"samples": 2}),
        ("TP2", {"tp": 2}, {"tokens": 40}),
        ("PP2", {"pp": 2}, {"samples": 1}),
        ("PP2 VPP2", {"pp": 2, "vpp": 2}, {"tokens": 50}),
        ("CP2", {"cp": 2}, {"samples": 1}),
        ("CP2 packed", {"cp": 2}, {"tokens": 60}),
        ("DP2", {}, {"samples": 1}),
        ("DP2 packed", {}, {"tokens": 60}),
    ],
    4: [
        ("TP2 CP2 SP", {"tp": 2, "cp": 2, "sequence_parallel": True}, {"tokens": 60}),
        ("CP2 PP2", {"cp": 2, "pp": 2}, {"samples": 2}),
        ("CP2 DP2", {"cp": 2}, {"samples": 1}),
        ("TP2 PP2 on ranks", {"tp": 2, "pp": 2}, {"tokens": 60}),
        ("DP4: a rank without pairs", {}, {"samples": 3}),
    ],
}


def check(folder, cases: list, want: dict) -> int:
    for name, layout, budget in cases:
        got = train(folder, layout, budget)
        for a, b in zip(got["steps"], want["steps"], strict=True):
            for key in b:
                assert a[key] == pytest.approx(b[key], rel=2e-4, abs=1e-6), (name, key, a[key], b[key])
        assert got["weights"].keys() == want["weights"].keys()
        for key, weight in want["weights"].items():
            # Adam divides by the root of tiny second moments, so an update may differ by a few percent of a step.
            assert np.allclose(got["weights"][key].numpy(), weight, atol=0.1 * LR), (name, key)
    return len(cases)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "qwen2"
    model = make_hf_model(path, "qwen2")
    # With a head of zeros the gradient of its bias is rounding noise, which Adam blows up to a whole step.
    tensors = load_file(path / "model.safetensors")
    tensors["score.weight"] = torch.randn(1, model.config.hidden_size) * 0.2
    tensors["score.bias"] = torch.tensor([0.3])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def wanted(folder):
    return reference(folder)


@pytest.mark.parametrize("world", CASES)
def test_every_layout_equals_transformers(folder, wanted, world):
    assert on_ranks(world, check, folder, CASES[world], wanted, timeout=280) == len(CASES[world])
