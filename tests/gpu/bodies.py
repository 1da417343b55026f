"""What the GPU tests run in a rank of its own. Nothing here names a device: the CPU runs the same lines."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from parallel.test_engine_layouts import LR, MINIS, example_batch, losses

from megappo.checkpoint.distributed import load_engine, save_engine
from megappo.checkpoint.hf import HFReader
from megappo.config.schema.optim import OptimConfig
from megappo.data.batch import Placement, RolloutBatch, SampleInfo
from megappo.data.schedule import Budget, plan, plan_forward
from megappo.engine.engine import EngineOptions, ModelEngine
from megappo.models.spec import load_spec
from megappo.parallel import backend, vocab
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.base import GeneratedSample, GenerateRequest, SamplingParams
from megappo.rollout.embedded import EmbeddedEngine

TOKENS = Budget(tokens=60)
VOCAB = 131


def make_engine(folder: Path, dtype: torch.dtype, *, critic=False, trained=False, **options) -> ModelEngine:
    optim = OptimConfig(lr=LR, max_grad_norm=0.5, weight_decay=0.01) if trained else None
    engine = ModelEngine(
        load_spec(folder),
        ParallelLayout(),
        EngineOptions(critic=critic, dtype=dtype, **options),
        optim=optim,
        total_steps=9,
    )
    engine.load_hf(HFReader(folder))
    return engine


def device_of(engine: ModelEngine) -> str:
    """Where weights and gradients of the engine are."""
    tensors = [p for chunk in engine.chunks for p in chunk.parameters()]
    return " ".join({t.device.type for t in tensors})


def random_batch(lengths: list[int], seed: int = 0) -> RolloutBatch:
    """Samples whose first three tokens are the prompt."""
    n, zeros = len(lengths), np.zeros(len(lengths), dtype=np.int64)
    length = np.array(lengths)
    mask = torch.cat([torch.arange(le) >= 3 for le in lengths])
    info = SampleInfo(np.arange(n), zeros, zeros + 3, length, length - 3, zeros * 1.0, zeros, zeros, ["s"] * n)
    tokens = torch.randint(3, VOCAB, (int(length.sum()),), generator=torch.Generator().manual_seed(seed))
    return RolloutBatch(info, Placement(ParallelLayout(), zeros), np.arange(n), {"tokens": tokens, "loss_mask": mask})


def batch_of(samples: list[GeneratedSample]) -> RolloutBatch:
    """Generated samples with the log-probs that they came with."""
    prompt = np.array([len(s.prompt_ids) for s in samples])
    response = np.array([len(s.response_ids) for s in samples])
    n, zeros = len(samples), np.zeros(len(samples), dtype=np.int64)
    length = prompt + response
    info = SampleInfo(np.arange(n), zeros, prompt, length, response, zeros * 1.0, zeros, zeros, ["s"] * n)
    columns = {
        "tokens": torch.tensor([t for s in samples for t in (*s.prompt_ids, *s.response_ids)]),
        "loss_mask": torch.cat([torch.arange(le) >= p for le, p in zip(length, prompt, strict=True)]),
        "rollout_logprobs": torch.tensor([x for s in samples for x in (*[0.0] * len(s.prompt_ids), *s.logprobs)]),
    }
    return RolloutBatch(info, Placement(ParallelLayout(), zeros), np.arange(n), columns)


@torch.no_grad()
def transformers_logprobs(folder: Path, dtype: torch.dtype, batch: RolloutBatch) -> torch.Tensor:
    """log p of every trained token, one sample at a time, on the engine's device."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model = model.to(backend.device()).eval()
    out = []
    for sample in range(len(batch.info)):
        index = batch.token_index([sample])
        ids = batch["tokens"][index].to(backend.device())
        logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        out.append(logprobs.cpu()[batch["loss_mask"][index][1:]])
    return torch.cat(out)


def forward_errors(folder: Path, dtype: torch.dtype, lengths: list[int]) -> dict[str, float]:
    """Mean and largest difference of the engine's log-probs, and of transformers' own, from transformers in fp32."""
    batch = random_batch(lengths)
    engine = make_engine(folder, dtype)
    assert device_of(engine) == backend.device().type
    assert engine.chunks[0].rotary_pos_emb.inv_freq.dtype == torch.float32
    want = transformers_logprobs(folder, torch.float32, batch)
    theirs = transformers_logprobs(folder, dtype, batch) - want
    out = {"theirs": float(theirs.abs().mean())}
    for name, budget in (("packed", Budget(tokens=max(lengths))), ("one by one", Budget(samples=1))):
        micro = plan_forward(batch.info.length, batch.placement.owner, 1, budget)[0]
        got = engine.forward(batch, micro, "logprobs")["logprobs"]
        assert got.device.type == "cpu" and got.dtype == torch.float32
        error = (got[batch["loss_mask"]] - want).abs()
        out |= {f"{name}, mean": float(error.mean()), f"{name}, largest": float(error.max())}
    return out


def train(folder: Path, kind: str, dtype: torch.dtype, options: dict) -> dict:
    """Two optimizer steps on the example of the layout tests: metrics of each, resulting weights as fp32 on the CPU."""
    engine = make_engine(folder, dtype, critic=kind == "critic", trained=True, temperature=0.8, **options)
    batch = example_batch(kind == "critic")
    schedule = plan(batch.info.length, [np.array(m) for m in MINIS], 1, TOKENS)
    loss = losses(kind)
    agg = "seq-mean-token-mean" if kind == "gspo" else "token-mean"
    steps = []
    for number, mini in enumerate(MINIS):
        step = engine.train_step(batch, np.array(mini), schedule.micro_batches[number][0], loss, agg_mode=agg)
        assert step.applied
        steps.append({**step.sums, "grad_norm": step.grad_norm})
        engine.sleep()
    weights = {name: tensor.float().cpu().numpy() for name, tensor in engine.stream_weights(torch.float32)}
    return {"steps": steps, "weights": weights}


def continue_from_checkpoint(folder: Path, out: Path, dtype: torch.dtype, distributed: bool) -> list[str]:
    """Names of the weights that differ between an engine that went on and one that was loaded, after one more step."""
    batch = example_batch(False)
    schedule = plan(batch.info.length, [np.array(m) for m in MINIS], 1, TOKENS)
    loss = losses("actor")

    def step(engine: ModelEngine, number: int) -> float:
        micro = schedule.micro_batches[number][0]
        return engine.train_step(batch, np.array(MINIS[number]), micro, loss, agg_mode="token-mean").grad_norm

    straight, loaded = (make_engine(folder, dtype, trained=True, distributed_optimizer=distributed) for _ in range(2))
    step(straight, 0)
    save_engine(straight, out).finish()
    load_engine(loaded, out)
    loaded.optimizer.load_state(straight.optimizer.state())
    assert device_of(loaded) == backend.device().type
    norms = [step(engine, 1) for engine in (straight, loaded)]
    pairs = zip(straight.stream_weights(torch.float32), loaded.stream_weights(torch.float32), strict=True)
    differing = [name for (name, x), (_, y) in pairs if not torch.equal(x, y)]
    return differing + (["grad_norm"] if norms[0] != norms[1] else [])


def rollout_and_training(folder: Path, dtype: torch.dtype) -> dict[str, float]:
    """Log-probs of the embedded engine against the training engine's for the same tokens and weights."""
    from transformers import AutoConfig

    engine = make_engine(folder, dtype, temperature=0.8)
    rollout = EmbeddedEngine(
        AutoConfig.from_pretrained(folder),
        dtype=dtype,
        device=backend.device(),
        max_batch_tokens=4096,
        pad_token_id=0,
    )
    rollout.sleep()
    rollout.wake()
    report = rollout.update_weights(engine.stream_weights(dtype), 1)
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in (1, 4, 9, 30, 4, 2)]
    requests = [GenerateRequest(i, i, prompt, seed=100 + i) for i, prompt in enumerate(prompts)]
    samples = rollout.generate(requests, SamplingParams(24, temperature=0.8, stop_token_ids=(7, 8, 9)))
    again = rollout.generate(requests[::-1], SamplingParams(24, temperature=0.8, stop_token_ids=(7, 8, 9)))
    batch = batch_of(samples)
    micro = plan_forward(batch.info.length, batch.placement.owner, 1, TOKENS)[0]
    scored = engine.forward(batch, micro, "logprobs")["logprobs"]
    mask = batch["loss_mask"]
    gap = (scored - batch["rollout_logprobs"])[mask].abs()
    same = [a.response_ids == b.response_ids for a, b in zip(samples, again[::-1], strict=True)]
    return {
        "mean": float(gap.mean()),
        "largest": float(gap.max()),
        "tokens": int(mask.sum()),
        "bytes": report.bytes,
    } | {"reproduced": sum(same) / len(same)}


def head_memory(
    tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype, chunk_bytes: int, use_triton: bool
) -> dict:
    """Device memory of the fused head beyond inputs and gradients (NaN on a CPU), and whether the kernels ran."""
    device = backend.device()
    g = torch.Generator(device).manual_seed(0)
    h = torch.randn(tokens, hidden, generator=g, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(vocabulary, hidden, generator=g, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), generator=g, device=device)
    saved = vocab.CHUNK_BYTES, vocab.USE_TRITON
    vocab.CHUNK_BYTES, vocab.USE_TRITON = {"cpu": chunk_bytes, "cuda": chunk_bytes}, use_triton
    try:
        kernels = vocab._Head(h, w, targets, vocabulary, 1.0, None, True, None).kernels
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        loss, _, _ = vocab.fused_token_loss(
            h,
            w,
            targets,
            lambda logprobs, entropy, i, j: -logprobs.sum() - 0.01 * entropy.sum(),
            vocab_size=vocabulary,
            want_entropy=True,
        )
        loss.backward()
        extra = math.nan
        if device.type == "cuda":
            # d weight is accumulated in fp32 and handed over in the weight's precision.
            gradients = h.numel() * h.element_size() + w.numel() * (
                4 + (w.element_size() if dtype != torch.float32 else 0)
            )
            extra = torch.cuda.max_memory_allocated() - before - gradients
        return {"extra": extra, "kernels": kernels, "finite": bool(h.grad.isfinite().all() and w.grad.isfinite().all())}
    finally:
        vocab.CHUNK_BYTES, vocab.USE_TRITON = saved


def offload(folder: Path) -> dict:
    """Device bytes before a role sleeps, while it does, and after it woke up again."""
    engine = make_engine(folder, torch.bfloat16, trained=True, offload="all")
    batch = example_batch(False)
    schedule = plan(batch.info.length, [np.array(MINIS[0])], 1, TOKENS)

    def used() -> int:
        return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    engine.train_step(batch, np.array(MINIS[0]), schedule.micro_batches[0][0], losses("actor"), agg_mode="token-mean")
    before = used()
    freed = engine.sleep()
    asleep = used()
    engine.wake()
    return {"before": before, "asleep": asleep, "awake": used(), "freed": freed}


def sampling_keys() -> dict[str, torch.Tensor]:
    """The integers and the variates behind the draw; the first must be the same on every device."""
    from megappo.rollout.sampling import _token_hashes, race_times, row_keys, seeds_tensor

    device = backend.device()
    seeds = seeds_tensor([0, 1, -5, 1 << 63, 12345678901234567890], device)
    keys = row_keys(seeds[:, None], torch.arange(4, device=device)).reshape(-1)
    tokens = _token_hashes(1000, device)
    return {"keys": keys.cpu().tolist(), "tokens": tokens.cpu().tolist(), "race": race_times(keys, 1000).cpu().tolist()}


def collectives() -> dict[str, float]:
    """CPU and device tensors through the groups of a layout, as the trainer sends them."""
    from megappo.observe.metrics import MetricAccumulator
    from megappo.parallel.groups import parallel_context
    from megappo.parallel.reduce import any_rank, gather_objects

    context = parallel_context(ParallelLayout())
    moments = torch.tensor([1.0, 2.0], dtype=torch.float64)
    dist.all_reduce(moments, group=context.dp_group)
    there = torch.ones(3, device=backend.device())
    for group in (context.dp_group, context.cp_group, context.tp_group):
        dist.all_reduce(there, group=group)
    numbers = MetricAccumulator()
    numbers.add_sum("x", there.sum(), 3)
    numbers.add_max("y", [1.0, 2.0])
    send, received = torch.arange(4), torch.empty(4, dtype=torch.int64)
    dist.all_to_all_single(received, send, [4], [4])
    assert torch.equal(send, received) and not any_rank(False) and gather_objects(5) == [5]
    return {"moments": moments.tolist(), **numbers.reduce(context.dp_group)}


def ppo(yaml_file: Path, out: str, changes: dict) -> list[dict]:
    """Two iterations, saved; then a third by a run that continues. Returns the metrics of all."""
    from ppo_case import config_of, read_metrics

    from megappo.trainer.ppo import run_ppo

    folder = yaml_file.parent / out
    for iterations in (2, 3):
        config = config_of(
            yaml_file,
            trainer__output_dir=str(folder),
            trainer__total_iterations=iterations,
            trainer__save_freq=1,
            **changes,
        )
        run_ppo(config)
    assert (folder / "final_hf" / "model.safetensors").is_file()
    return read_metrics(folder)


def attention_padding(lengths: list[int]) -> float:
    """Largest difference between packed attention and attention over one sequence at a time, outputs and gradients."""
    from megappo.models.layers import PackedAttention, pack

    device = backend.device()
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale, attention.cp_group = None, None
    total = sum(lengths)
    g = torch.Generator(device).manual_seed(0)
    shapes = ((total, 1, 4, 16), (total, 1, 2, 16), (total, 1, 2, 16))
    query, key, value = (torch.randn(s, generator=g, device=device, requires_grad=True) for s in shapes)
    weight = torch.randn(total, 1, 64, generator=g, device=device)
    results = []
    for rows in ([lengths], [[n] for n in lengths]):
        outs, start = [], 0
        for row in rows:
            part = slice(start, start + sum(row))
            outs.append(attention(query[part], key[part], value[part], packed_seq_params=pack(row, device)))
            start = part.stop
        out = torch.cat(outs)
        results.append((out, *torch.autograd.grad((out * weight).sum(), (query, key, value))))
    return max(float((x - y).abs().max()) for x, y in itertools.zip_longest(*results))
