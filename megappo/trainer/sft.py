"""Supervised fine-tuning: the same engine, schedule and checkpoints as PPO, with the likelihood as the loss."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megappo.checkpoint.hf import write_hf
from megappo.checkpoint.store import CheckpointStore
from megappo.config.schema import ExperimentConfig
from megappo.data.prompts import PromptSampler
from megappo.data.schedule import Budget
from megappo.data.sft_rows import SftDataset, SftRow, row_batch
from megappo.engine.engine import ModelEngine
from megappo.engine.losses import NLLLoss
from megappo.errors import UserError
from megappo.observe.metrics import MetricAccumulator
from megappo.observe.timing import Timer
from megappo.parallel import backend
from megappo.trainer.interrupt import StopRequest
from megappo.trainer.phases import Update, step_metrics
from megappo.trainer.planning import budget, forward_micro_batches, role_plan
from megappo.trainer.resume import load_state, save_state
from megappo.trainer.setup import DTYPES, build_engine, load_tokenizer
from megappo.trainer.watch import Watch


def run_sft(config: ExperimentConfig) -> dict[str, float]:
    """Fine-tune as `config.sft` says; returns the last metrics. Every rank calls it."""
    backend.init_distributed(config.trainer.distributed_timeout_s)
    sft = config.sft
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    train = _read(config, sft.train_files, tokenizer)
    val = _read(config, sft.val_files, tokenizer) if sft.val_files else None
    if len(train) < sft.batch_size:
        raise UserError(f"sft.batch_size is {sft.batch_size} but sft.train_files hold {len(train)} examples")
    sampler = PromptSampler(len(train), sft.batch_size, config.trainer.seed, shuffle=True)
    total = sft.total_steps or sft.total_epochs * sampler.steps_per_epoch
    with closing(Watch(config, total)) as watch:
        for name, data in (("train_files", train), ("val_files", val)):
            if data is not None and data.report.dropped + data.report.truncated:
                watch.say(f"sft.{name}: {data.report}")
        engine = build_engine(config.model.path, sft.parallel, config.model, optim=sft.optim, total_steps=total)
        with StopRequest() as stop:
            return _Sft(config, engine, train, val, sampler, total, watch).run(stop)


def _read(config: ExperimentConfig, files: list[str], tokenizer) -> SftDataset:
    return SftDataset(
        files,
        tokenizer,
        prompt_key=config.sft.prompt_key,
        response_key=config.sft.response_key,
        max_length=config.sft.max_length,
        chat_template=config.model.chat_template,
    )


class _Sft:
    def __init__(self, config, engine: ModelEngine, train, val, sampler, total: int, watch: Watch):
        self.config, self.engine, self.train, self.val = config, engine, train, val
        self.sampler, self.total, self.watch = sampler, total, watch
        self.store = CheckpointStore(Path(config.trainer.output_dir) / "checkpoints", config.trainer.max_ckpt_to_keep)
        self.step = 0

    def run(self, stop: StopRequest) -> dict[str, float]:
        sft = self.config.sft
        self._begin()
        metrics: dict[str, float] = {}
        stopping = stop.anywhere()
        while self.step < self.total and not stopping:
            timer = Timer(backend.synchronize)
            with timer("step"):
                metrics = self._train_step()
            self.step += 1
            last, stopping = self.step == self.total, stop.anywhere()
            if self.val is not None and sft.test_freq > 0 and (last or self.step % sft.test_freq == 0):
                metrics |= self._validate()
            if sft.save_freq > 0 and (last or stopping or self.step % sft.save_freq == 0):
                save_state(self.store, self.step, {"sft": self.engine}, {}).finish()
            self.watch.log(self.step, metrics | timer.take())
        if self.step < self.total:
            raise stop.interrupted(f"step {self.step}", self.store, "sft.save_freq", self.config.trainer.resume)
        if sft.export_path:
            dtype = DTYPES[self.config.model.dtype]
            stream = self.engine.stream_weights(dtype)
            write = dist.get_rank() == 0
            shapes = self.engine.weights.hf_shapes()
            write_hf(stream, shapes, self.engine.spec.path, Path(sft.export_path), dtype, write=write)
            dist.barrier()  # no rank leaves before the folder is there
            self.watch.say(f"fine-tuned model: {sft.export_path}")
        return metrics

    def _begin(self) -> None:
        """Continue from the newest checkpoint, or keep those of an earlier run out of the way."""
        if self.config.trainer.resume == "never":
            aside = self.store.set_aside()
            if aside is not None:
                self.watch.say(f"trainer.resume is never: the earlier checkpoints are now in {aside}")
            return
        state = load_state(self.store.latest(), {"sft": self.engine})
        if state is not None:
            self.step = int(state["iteration"])
            self.watch.resumed(self.step)

    def _budget(self) -> Budget:
        sft = self.config.sft
        return budget(sft.use_dynamic_bsz, sft.micro_batch_size_per_gpu, sft.max_token_len_per_gpu)

    def _batch(self, rows: list[SftRow], seed: tuple[int, ...]):
        lengths = np.array([len(r.prompt_ids) + len(r.response_ids) for r in rows])
        plan = role_plan(self.engine, lengths, len(rows), self._budget(), seed=seed, shuffle=False)
        return plan, row_batch(rows, plan.placement, dist.get_rank())

    def _train_step(self) -> dict[str, float]:
        _, indices = self.sampler.batch(self.step)
        plan, batch = self._batch([self.train[i] for i in indices], (self.config.trainer.seed, self.step))
        loss = NLLLoss()
        result = self.engine.train_step(batch, plan.minis[0], plan.micro_batches(0), loss, agg_mode="token-mean")
        metrics = step_metrics(self.engine, Update("train", loss, [result], batch.info.sample_id))
        tokens = float(batch.info.length.sum())
        epoch = self.step // self.sampler.steps_per_epoch
        return metrics | {"perf/total_num_tokens": tokens, "training/epoch": float(epoch)}

    def _validate(self) -> dict[str, float]:
        """Mean negative log-likelihood of the held-out response tokens."""
        plan, batch = self._batch(list(self.val), (0,))
        micro = forward_micro_batches(self.engine, batch.info.length, plan.placement.owner, self._budget())
        logprobs = self.engine.forward(batch, micro, "logprobs")["logprobs"]
        numbers = MetricAccumulator()
        mine = -logprobs[batch["loss_mask"]]
        numbers.add_mean("val/loss", mine if self.engine.primary else mine[:0])
        loss = numbers.reduce()["val/loss"]
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 50.0))}
