"""Examples mixed into the actor's update: one step against transformers, in several layouts and micro-batch splits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import make_hf_model
from warm_ranks import on_ranks

from megappo.algorithms.policy_loss import PolicyLossConfig
from megappo.data.batch import Placement, RolloutBatch, SampleInfo
from megappo.data.sft_rows import SftRow
from megappo.trainer import sft_mix

LENGTHS, PROMPTS = [9, 14, 6, 11, 4], [4, 5, 2, 6, 3]
ROWS = [SftRow(i, [3 + i, 5], [7 + i] * (1 + 3 * i)) for i in range(4)]
FRACTION, COEF = 0.3, 0.7  # two examples for five samples


def policy_batch() -> RolloutBatch:
    from megappo.parallel.layout import ParallelLayout

    n, g = len(LENGTHS), torch.Generator().manual_seed(3)
    length, prompt, zeros = np.array(LENGTHS), np.array(PROMPTS), np.zeros(len(LENGTHS), np.int64)
    mask = torch.cat([torch.arange(le) >= p for le, p in zip(LENGTHS, PROMPTS, strict=True)])
    info = SampleInfo(np.arange(n), zeros, prompt, length, length - prompt, zeros * 1.0, zeros, zeros, ["s"] * n)
    total = int(length.sum())
    columns = {"tokens": torch.randint(3, 131, (total,), generator=g), "loss_mask": mask}
    for name in ("old_logprobs", "advantages", "ref_logprobs"):
        columns[name] = torch.randn(total, generator=g) * (0.5 if name != "advantages" else 1.0)
    columns["old_logprobs"] -= 4.9
    columns["ref_logprobs"] -= 4.9
    return RolloutBatch(info, Placement(ParallelLayout(world=1), zeros), np.arange(n), columns)


def one_step(folder, layout_options: dict, sizes: dict, kind: str, coef: float | None) -> dict:
    """One optimizer step; `coef` None: without examples."""
    from megappo.checkpoint.hf import HFReader
    from megappo.config.schema import ActorConfig
    from megappo.config.schema.actor import SftMixConfig
    from megappo.config.schema.optim import OptimConfig
    from megappo.data.schedule import Budget
    from megappo.engine.engine import EngineOptions, ModelEngine
    from megappo.engine.losses import PolicyLoss
    from megappo.models.spec import load_spec
    from megappo.observe.metrics import MetricAccumulator
    from megappo.parallel.layout import ParallelLayout
    from megappo.trainer.planning import role_plan

    layout = ParallelLayout(**{"world": dist.get_world_size(), **layout_options})
    optim = OptimConfig(lr=1e-3, max_grad_norm=0.5)
    engine = ModelEngine(load_spec(folder), layout, EngineOptions(temperature=0.8), optim=optim)
    engine.load_hf(HFReader(folder))
    whole = policy_batch()
    actor = ActorConfig(sft_mix=SftMixConfig(fraction=FRACTION), **sizes)
    budget = Budget(tokens=actor.ppo_max_token_len_per_gpu) if actor.use_dynamic_bsz else Budget(samples=2)
    plan = role_plan(engine, whole.info.length, len(LENGTHS), budget, seed=(1, 0), shuffle=False)
    mine = plan.placement.samples_of(dist.get_rank())
    index = whole.token_index(list(mine))
    batch = RolloutBatch(whole.info, plan.placement, mine, {k: c[index] for k, c in whole.columns.items()})
    samples, micro_batches = plan.minis[0], plan.micro_batches(0)
    if coef is not None:
        config = SimpleNamespace(actor=actor, trainer=SimpleNamespace(seed=1))
        run = SimpleNamespace(config=config, actor=engine, sft_data=ROWS, iteration=4)
        batch, ((more, theirs),) = sft_mix.mixed_in(run, batch, [samples])
        samples, micro_batches = np.concatenate([samples, more]), [*micro_batches, *theirs]
        assert "sft" in batch.info.source and batch.info.sft.sum() == 2
    config = PolicyLossConfig(kind, 0.2, 0.28, 3.0)
    loss = PolicyLoss(config, entropy_coeff=0.01, kl_coef=0.05, sft_coef=coef)
    agg = "seq-mean-token-mean" if kind == "gspo" else "token-mean"
    step = engine.train_step(batch, samples, micro_batches, loss, agg_mode=agg)
    numbers = MetricAccumulator()
    for name in loss.sums:
        numbers.add_sum(name, step.sums[name] if engine.reports else 0.0, 1)
    for name in loss.maxima:
        numbers.add_max(name, [step.maxima[name]] if engine.reports else [])
    numbers.add_max("grad_norm", [step.grad_norm])
    weights = {name: tensor.clone() for name, tensor in engine.stream_weights(torch.float32)}
    return numbers.reduce() | {"weights": weights}


def reference(folder) -> dict:
    """The step's losses and gradient norm with transformers, one sample at a time."""
    from transformers import AutoModelForCausalLM

    from megappo.algorithms.kl import kl_penalty

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def logprobs(tokens, first):
        logits = torch.log_softmax(model(tokens[None]).logits[0][first - 1 : -1] / 0.8, -1)
        return logits.gather(1, tokens[first:][:, None]).squeeze(1), -(logits.exp() * logits).sum(-1)

    batch = policy_batch()
    count = int(batch.info.trainable.sum())
    total = nll = torch.zeros(())
    entropies = torch.zeros(())
    for sample in range(len(LENGTHS)):
        index = batch.token_index([sample])[PROMPTS[sample] :]
        out, entropy = logprobs(batch["tokens"][batch.token_index([sample])], PROMPTS[sample])
        a, ratio = batch["advantages"][index], (out - batch["old_logprobs"][index]).exp()
        per = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
        per = torch.where(a < 0, torch.minimum(per, -3.0 * a), per)
        kl = kl_penalty(out, batch["ref_logprobs"][index], "low_var_kl")
        total = total + (per + 0.05 * kl - 0.01 * entropy).sum() / count
        entropies = entropies + entropy.sum().detach() / count
    chosen = [ROWS[i] for i in sft_mix.draw(len(ROWS), 2, (1, 4))]
    tokens = sum(len(row.response_ids) for row in chosen)
    for row in chosen:
        out, _ = logprobs(torch.tensor(row.prompt_ids + row.response_ids), len(row.prompt_ids))
        nll = nll - out.sum() / tokens
    (total + COEF * nll).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {
        "actor/sft_loss": float(nll.detach()),
        "actor/sft_tokens": tokens,
        "actor/entropy": float(entropies),
        "actor/loss": float((total + COEF * nll).detach()),
        "grad_norm": float(norm),
    }


PACKED = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 30}
SPLITS = {
    1: [({}, {"ppo_micro_batch_size_per_gpu": 1}), ({}, {"ppo_micro_batch_size_per_gpu": 3}), ({}, PACKED)],
    2: [
        ({}, {"ppo_micro_batch_size_per_gpu": 2}),
        ({"tp": 2, "sequence_parallel": True}, PACKED),
        ({"pp": 2}, {"ppo_micro_batch_size_per_gpu": 1}),
        ({"pp": 2, "vpp": 2}, PACKED),
        ({"cp": 2}, PACKED),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix") / "qwen2"
    make_hf_model(folder, "qwen2")
    return folder


@pytest.mark.parametrize("world", [1, 2])
def test_a_mixed_step_equals_transformers_in_every_layout(folder, world):
    want = reference(folder)
    for layout, sizes in SPLITS[world]:
        got = on_ranks(world, one_step, folder, layout, sizes, "ppo", COEF)
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (layout, sizes, name)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_with_coefficient_0_the_step_is_that_without_examples(folder, kind):
    sizes = {"ppo_micro_batch_size_per_gpu": 2}
    without = on_ranks(1, one_step, folder, {}, sizes, kind, None)
    zero = on_ranks(1, one_step, folder, {}, sizes, kind, 0.0)
    for name, weight in without.pop("weights").items():
        assert torch.equal(weight, zero["weights"][name]), name
    assert all(zero[name] == value for name, value in without.items())
    assert zero["actor/sft_loss"] > 0


def test_examples_are_drawn_without_repeats_and_from_seed_and_iteration_alone():
    first = sft_mix.draw(10, 25, (1, 3))
    assert first == sft_mix.draw(10, 25, (1, 3)) != sft_mix.draw(10, 25, (1, 4))
    assert sorted(first[:10]) == sorted(first[10:20]) == list(range(10)) and len(set(first[20:])) == 5
    counts = [sft_mix.examples_per_step(0.05, samples) for samples in (1, 20, 21, 40, 60, 128)]
    assert counts == [1, 1, 2, 2, 3, 7]
    assert sft_mix.examples_per_step(0.1, 30) == 3
