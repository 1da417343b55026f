"""Every layout and micro-batch split gives the loss, gradient norm and updated weights of plain transformers."""

from __future__ import annotations

import functools
import itertools
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import make_hf_model
from warm_ranks import on_ranks

from megappo.config.schema.optim import OptimConfig

LR = 1e-3
LENGTHS = [9, 14, 3, 21, 6, 11, 5]
PROMPTS = [4, 5, 2, 6, 6, 3, 1]  # sample 4 has no response: it owns no trainable token
MINIS = [[0, 2, 3, 6], [1, 4, 5]]


def example_batch(critic: bool):
    """A batch that every rank can build: tokens, old log-probs, advantages, values, returns; all from one seed."""
    from megappo.data.batch import Placement, RolloutBatch, SampleInfo
    from megappo.parallel.layout import ParallelLayout

    n = len(LENGTHS)
    length, prompt = np.array(LENGTHS), np.array(PROMPTS)
    g = torch.Generator().manual_seed(3)
    total = int(length.sum())
    mask = torch.cat([torch.arange(le) >= p for le, p in zip(LENGTHS, PROMPTS, strict=True)])
    mask[7] = False  # a hole: an environment token inside the response of sample 0
    starts = np.concatenate([[0], np.cumsum(length)])
    trainable = np.array([int(mask[a:b].sum()) for a, b in itertools.pairwise(starts)])
    zeros = np.zeros(n, dtype=np.int64)
    info = SampleInfo(np.arange(n), zeros, prompt, length, trainable, zeros * 1.0, zeros, zeros, ["s"] * n)
    columns = {"tokens": torch.randint(3, 131, (total,), generator=g), "loss_mask": mask}
    for name in ("old_logprobs", "advantages", "ref_logprobs", "values", "returns"):
        columns[name] = torch.randn(total, generator=g)
    columns["old_logprobs"] = -4.9 + 0.5 * columns["old_logprobs"]
    columns["ref_logprobs"] = -4.9 + 0.5 * columns["ref_logprobs"]
    for name in ("advantages", "old_logprobs", "returns"):
        columns[name][~mask] = torch.nan  # must never be read
    layout = ParallelLayout(world=1)
    return RolloutBatch(info, Placement(layout, zeros), np.arange(n), columns)


def shard(batch, placement, rank):
    """Cut the whole batch to what `rank` holds, without communication."""
    from megappo.data.batch import RolloutBatch

    mine = placement.samples_of(rank)
    index = batch.token_index(list(mine))
    columns = {name: column[index] for name, column in batch.columns.items()}
    return RolloutBatch(batch.info, placement, mine, columns)


def losses(kind: str):
    from megappo.algorithms.policy_loss import PolicyLossConfig
    from megappo.engine.losses import PolicyLoss, ValueLoss

    if kind == "critic":
        return ValueLoss(0.3)
    config = PolicyLossConfig("gspo" if kind == "gspo" else "ppo", 0.2, 0.28, 3.0)
    return PolicyLoss(config, entropy_coeff=0.01, kl_coef=0.05)


def train(folder, layout_options: dict, kind: str, budget_options: dict, agg: str = "token-mean") -> dict:
    """Two optimizer steps in one layout; metrics, forward columns and resulting weights, on every rank."""
    from megappo.checkpoint.hf import HFReader
    from megappo.data.schedule import Budget, plan, plan_forward
    from megappo.engine.engine import EngineOptions, ModelEngine
    from megappo.models.spec import load_spec
    from megappo.observe.metrics import MetricAccumulator
    from megappo.parallel.layout import ParallelLayout

    options = dict(layout_options)
    distributed = options.pop("distopt", True)
    recompute = options.pop("recompute", None)
    offload = options.pop("offload", "none")
    layout = ParallelLayout(**{"world": dist.get_world_size(), **options})
    engine = ModelEngine(
        load_spec(folder),
        layout,
        EngineOptions(
            critic=kind == "critic",
            temperature=0.8,
            distributed_optimizer=distributed,
            recompute=recompute,
            offload=offload,
        ),
        optim=OptimConfig(lr=LR, max_grad_norm=0.5, weight_decay=0.01),
        total_steps=10,
    )
    engine.load_hf(HFReader(folder))
    whole = example_batch(kind == "critic")
    budget = Budget(**budget_options)
    multiple = layout.pp if layout.vpp > 1 else 1
    schedule = plan(whole.info.length, [np.array(m) for m in MINIS], layout.dp, budget, multiple_of=multiple)
    batch = shard(whole, engine.placement(schedule.owner), dist.get_rank())
    mine = engine.dp_rank or 0
    micro = plan_forward(whole.info.length, schedule.owner, layout.dp, budget, multiple)[mine]
    want = "values" if kind == "critic" else "logprobs"
    column = engine.forward(batch, micro, want)[want]
    full = torch.zeros(int(whole.info.length.sum()))
    if engine.primary:
        full[whole.token_index(list(batch.indices))] = column
    dist.all_reduce(full)
    assert (engine.sleep() > 0) == (offload != "none" and engine.member)
    out = {"forward": full[whole["loss_mask"]].tolist(), "steps": []}
    loss = losses(kind)
    for number, mini in enumerate(MINIS):
        step = engine.train_step(
            batch, np.array(mini), schedule.micro_batches[number][mine], loss, agg_mode=agg, norm_length=50
        )
        numbers = MetricAccumulator()
        for name in loss.sums:
            numbers.add_sum(name, step.sums[name] if engine.reports else 0.0, 1)
        numbers.add_max("grad_norm", [step.grad_norm] if engine.member else [])
        out["steps"].append(numbers.reduce())
        assert (step is None) == (not engine.member)
        engine.sleep()
    out["weights"] = {name: t.clone() for name, t in engine.stream_weights(torch.float32)}
    return out


def reference(folder, kind: str, agg: str = "token-mean") -> dict:
    """The same two steps with transformers, one sample at a time, from the formulas."""
    from transformers import AutoModelForCausalLM

    from megappo.algorithms.kl import kl_penalty

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    params = list(model.parameters())
    head = None
    if kind == "critic":
        hidden = model.config.hidden_size
        head = torch.nn.Linear(hidden, 1)
        torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        lm_head = model.get_output_embeddings().weight
        tied = model.config.tie_word_embeddings
        params = [p for p in params if tied or p is not lm_head] + list(head.parameters())
    decay = [p for p in params if p.dim() > 1]
    plain = [p for p in params if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    batch = example_batch(kind == "critic")

    def outputs(sample):
        rows = batch.token_index([sample])
        wanted = batch["loss_mask"][rows]
        tokens = batch["tokens"][rows]
        where = wanted.nonzero().squeeze(1)
        inner = model.model(tokens[None]).last_hidden_state[0][where - 1]
        cut = {name: c[rows][where] for name, c in batch.columns.items()}
        if head is not None:
            return head(inner).squeeze(1), None, cut
        logits = torch.log_softmax(model.get_output_embeddings()(inner).float() / 0.8, -1)
        entropy = -(logits.exp() * logits).sum(-1)
        return logits.gather(1, tokens[where][:, None]).squeeze(1), entropy, cut

    with torch.no_grad():
        forward = torch.cat([outputs(i)[0] for i in range(len(LENGTHS))]).tolist()
    steps = []
    for mini in MINIS:
        optimizer.zero_grad()
        tokens = batch.info.trainable[mini].sum()
        sequences = (batch.info.trainable[mini] > 0).sum()
        total = {}
        for sample in mini:
            out, entropy, c = outputs(sample)
            if not len(out):
                continue
            weight = {"token-mean": 1 / tokens, "seq-mean-token-mean": 1 / sequences / len(out)}[agg]
            if kind == "critic":
                clipped = c["values"] + (out - c["values"]).clamp(-0.3, 0.3)
                per = 0.5 * torch.maximum((out - c["returns"]) ** 2, (clipped - c["returns"]) ** 2)
                terms = {"critic/vf_loss": per.sum() * weight}
                loss = terms["critic/vf_loss"]
            else:
                ratio = (out - c["old_logprobs"]).exp()
                if kind == "gspo":
                    s = (out - c["old_logprobs"]).mean().exp().detach()
                    ratio = s * (out - out.detach()).exp()
                a = c["advantages"]
                per = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
                if kind != "gspo":
                    per = torch.where(a < 0, torch.minimum(per, -3.0 * a), per)
                kl = kl_penalty(out, c["ref_logprobs"], "low_var_kl")
                terms = {
                    "actor/pg_loss": per.sum() * weight,
                    "actor/kl_loss": kl.sum() * weight,
                    "actor/entropy": entropy.sum() / tokens,
                }
                loss = terms["actor/pg_loss"] + 0.05 * terms["actor/kl_loss"] - 0.01 * entropy.sum() * weight
            loss.backward()
            for name, value in terms.items():
                total[name] = total.get(name, 0.0) + float(value.detach())
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        steps.append({**total, "grad_norm": float(norm)})
    with tempfile.TemporaryDirectory() as saved:  # under the names that checkpoints use
        model.save_pretrained(saved)
        weights = load_file(f"{saved}/model.safetensors")
    if head is not None:
        weights.pop("lm_head.weight", None)
        weights |= {"score.weight": head.weight.detach(), "score.bias": head.bias.detach()}
    return {"forward": forward, "steps": steps, "weights": {name: w.numpy() for name, w in weights.items()}}


def check_equal(got: dict, want: dict, name: str) -> None:
    assert np.allclose(got["forward"], want["forward"], atol=1e-4), name
    for a, b in zip(got["steps"], want["steps"], strict=True):
        for key in b:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), (name, key, a[key], b[key])
    assert got["weights"].keys() == want["weights"].keys(), name
    for key, weight in want["weights"].items():
        # Adam divides by the root of tiny second moments, so an update may differ by a few percent of a step.
        assert np.allclose(got["weights"][key].numpy(), weight, atol=0.1 * LR), (name, key)


ONE = {"samples": 1}
CASES_1 = [
    ("one sample a micro-batch", {}, ONE),
    ("three samples", {}, {"samples": 3}),
    ("packed by tokens", {}, {"tokens": 30}),
    ("everything at once", {"distopt": False}, {"tokens": 200}),
    ("full recomputation", {"recompute": "full"}, {"samples": 2}),
    ("optimizer offloaded between steps", {"offload": "optimizer"}, {"samples": 3}),
    ("everything offloaded between steps", {"offload": "all"}, {"samples": 3}),
]
CASES_2 = [
    ("TP2", {"tp": 2}, {"samples": 2}),
    ("TP2 SP", {"tp": 2, "sequence_parallel": True}, {"tokens": 30}),
    ("TP2 SP recompute", {"tp": 2, "sequence_parallel": True, "recompute": "selective"}, {"samples": 3}),
    ("PP2", {"pp": 2}, ONE),
    ("PP2 packed", {"pp": 2}, {"tokens": 30}),
    ("PP2 VPP2", {"pp": 2, "vpp": 2}, {"tokens": 25}),
    ("PP2 uneven", {"pp": 2, "first_stage_layers": 1}, {"samples": 2}),
    ("CP2 packed", {"cp": 2}, {"tokens": 30}),
    ("DP2", {}, {"samples": 2}),
    ("DP2, everything offloaded", {"offload": "all"}, {"tokens": 40}),
    ("the first rank of two", {"world": 1}, {"samples": 2}),
    ("the second rank of two", {"world": 1, "first_rank": 1}, {"tokens": 40}),
    ("DP2 packed, plain optimizer", {"distopt": False}, {"tokens": 40}),
]
CASES_4 = [
    ("TP2 PP2 SP", {"tp": 2, "pp": 2, "sequence_parallel": True}, {"tokens": 30}),
    ("TP2 DP2", {"tp": 2}, {"samples": 2}),
    ("PP2 DP2", {"pp": 2}, {"tokens": 40}),
    ("DP4: a rank without samples", {}, {"tokens": 60}),
    ("CP2 PP2", {"cp": 2, "pp": 2}, {"tokens": 30}),
    ("TP2 CP2 SP", {"tp": 2, "cp": 2, "sequence_parallel": True}, {"tokens": 30}),
    ("CP2 DP2", {"cp": 2}, ONE),
    ("TP2 on the last two of four ranks", {"world": 2, "first_rank": 2, "tp": 2}, {"tokens": 40}),
    ("PP2 on the middle two of four ranks", {"world": 2, "first_rank": 1, "pp": 2}, {"tokens": 30}),
    ("TP4, more than key/value heads", {"tp": 4}, {"samples": 4}),
]


CASES_2_MOE = [
    ("EP2", {"ep": 2}, {"samples": 2}),
    ("EP2 packed", {"ep": 2}, {"tokens": 30}),
    ("TP2 SP EP2", {"tp": 2, "sequence_parallel": True, "ep": 2}, {"tokens": 30}),
    ("TP2 SP ETP2", {"tp": 2, "sequence_parallel": True, "etp": 2}, {"samples": 2}),
    ("PP2", {"pp": 2}, {"tokens": 30}),
    ("CP2 EP2", {"cp": 2, "ep": 2}, {"tokens": 30}),
]
CASES_4_MOE = [
    ("EP2 PP2", {"ep": 2, "pp": 2}, {"tokens": 30}),
    ("EP4", {"ep": 4}, {"samples": 1}),
    ("TP2 SP EP2 DP2", {"tp": 2, "sequence_parallel": True, "ep": 2}, {"tokens": 40}),
]


def aggregation(kind: str) -> str:
    return "seq-mean-token-mean" if kind == "gspo" else "token-mean"


def check_layouts(folders: dict, cases: list, wanted: dict) -> int:
    """All cases of a world size in one group of ranks; returns how many were checked."""
    checked = 0
    for (family, kind), want in wanted.items():
        for name, layout, budget in cases:
            got = train(folders[family], layout, kind, budget, aggregation(kind))
            check_equal(got, want, f"{family} {kind} {name}")
            checked += 1
    return checked


@pytest.fixture(scope="module")
def references(folders):
    """`references(family, kind)`: what transformers does, computed once."""
    return functools.cache(lambda family, kind: reference(folders[family], kind, aggregation(kind)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    families = ("qwen2", "qwen2_tied", "qwen3", "mixtral", "qwen3_moe")
    for family in families:
        make_hf_model(root / family, family)
    return {f: root / f for f in families}


@pytest.mark.parametrize(
    ("world", "families", "cases", "kinds"),
    [
        (1, ("qwen2", "qwen2_tied", "qwen3"), CASES_1, ("actor", "critic", "gspo")),
        (1, ("mixtral", "qwen3_moe"), CASES_1[:3], ("actor", "critic")),
        (2, ("qwen2_tied",), CASES_2, ("actor", "critic")),
        (2, ("qwen2", "qwen3"), CASES_2[:5], ("actor", "gspo")),
        (2, ("mixtral", "qwen3_moe"), CASES_2_MOE, ("actor",)),
        (2, ("qwen3_moe",), CASES_2_MOE[2:3], ("critic",)),
        (4, ("qwen2_tied",), CASES_4, ("actor",)),
        (4, ("qwen2",), CASES_4, ("critic",)),
        (4, ("qwen3_moe",), CASES_4_MOE, ("actor",)),
    ],
)
def test_every_layout_equals_transformers(folders, references, world, families, cases, kinds):
    wanted = {(family, kind): references(family, kind) for family in families for kind in kinds}
    assert on_ranks(world, check_layouts, folders, cases, wanted, timeout=280) == len(wanted) * len(cases)
