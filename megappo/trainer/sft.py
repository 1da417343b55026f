"""Supervised fine-tuning: the same engine, schedule and checkpoints as PPO, with the likelihood as the loss."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import torch.distributed as dist

from megappo.config.schema import ExperimentConfig
from megappo.data.sft_rows import SftDataset, SftRow, row_batch
from megappo.engine.losses import NLLLoss
from megappo.observe.metrics import MetricAccumulator
from megappo.parallel import backend
from megappo.trainer.interrupt import StopRequest
from megappo.trainer.planning import forward_micro_batches, role_plan
from megappo.trainer.setup import build_engine, load_tokenizer
from megappo.trainer.supervised import Supervised, row_sampler
from megappo.trainer.watch import Watch


def run_sft(config: ExperimentConfig) -> dict[str, float]:
    """Fine-tune as `config.sft` says; returns the last metrics. Every rank calls it."""
    backend.init_distributed(config.trainer.distributed_timeout_s)
    sft = config.sft
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    train = _read(config, sft.train_files, tokenizer)
    val = _read(config, sft.val_files, tokenizer) if sft.val_files else None
    sampler, total = row_sampler(config, "sft", train, "examples")
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


class _Sft(Supervised):
    name = "sft"
    exported = "fine-tuned model"

    def _batch(self, rows: list[SftRow], seed: tuple[int, ...]):
        lengths = np.array([len(r.prompt_ids) + len(r.response_ids) for r in rows])
        plan = role_plan(self.engine, lengths, len(rows), self._budget(), seed=seed, shuffle=False)
        return plan, row_batch(rows, plan.placement, dist.get_rank())

    def _train_step(self) -> dict[str, float]:
        plan, batch = self._batch(self._next_rows(), (self.config.trainer.seed, self.step))
        loss = NLLLoss()
        result = self.engine.train_step(batch, plan.minis[0], plan.micro_batches(0), loss, agg_mode="token-mean")
        return self._step_metrics(loss, result, batch.info)

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
