"""Training a scalar reward model on preference pairs (Bradley-Terry), and the folder that holds the result."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megappo.algorithms.preference import bradley_terry, calibration_error, preferred
from megappo.config.model_folder import reward_model as reward_architecture
from megappo.config.schema import ExperimentConfig
from megappo.data.batch import Placement, RolloutBatch, SampleInfo
from megappo.data.preferences import NoiseReport, PreferenceDataset, PreferencePair, noise_report
from megappo.engine.losses import PreferenceLoss
from megappo.engine.totals import share_per_sample
from megappo.errors import UserError
from megappo.parallel import backend
from megappo.rewards.model import REWARD_FILE, RewardScale
from megappo.trainer.interrupt import StopRequest
from megappo.trainer.planning import role_plan
from megappo.trainer.setup import build_engine, load_tokenizer
from megappo.trainer.supervised import Supervised, row_sampler
from megappo.trainer.watch import Watch

NORMALISING_PAIRS = 4096  # of the training pairs, where there are no held-out ones


def run_reward_model(config: ExperimentConfig) -> dict[str, float]:
    """Train as `config.reward_model` says; returns the last metrics. Every rank calls it.

    Raises UserError for bad data, or data with more than `max_noise` inconsistent pairs.
    """
    backend.init_distributed(config.trainer.distributed_timeout_s)
    section = config.reward_model
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    train = _read(config, section.train_files, tokenizer)
    val = _read(config, section.val_files, tokenizer) if section.val_files else None
    noise = noise_report(train)
    _check_noise(noise, section.max_noise)
    margins(train, section.margin)  # a missing one shows before the model is loaded
    sampler, total = row_sampler(config, "reward_model", train, "pairs")
    with closing(Watch(config, total)) as watch:
        for name, data in (("train_files", train), ("val_files", val)):
            if data is not None and data.report.dropped:
                watch.say(f"reward_model.{name}: {data.report}")
        if noise.inconsistent or noise.duplicates:
            watch.say(f"reward_model.train_files: {noise}")
        engine = build_engine(
            config.model.path, section.parallel, config.model, critic=True, optim=section.optim, total_steps=total
        )
        with StopRequest() as stop:
            return _RewardModel(config, engine, train, val, sampler, total, watch).run(stop)


def _read(config: ExperimentConfig, files: list[str], tokenizer: Any) -> PreferenceDataset:
    section = config.reward_model
    return PreferenceDataset(
        files,
        tokenizer,
        prompt_key=section.prompt_key,
        chosen_key=section.chosen_key,
        rejected_key=section.rejected_key,
        max_length=section.max_length,
        chat_template=config.model.chat_template,
    )


def _check_noise(noise: NoiseReport, limit: float) -> None:
    if noise.inconsistent_share > limit:
        raise UserError(
            f"reward_model.train_files: {noise}: more than reward_model.max_noise={limit}: remove identical and "
            "contradictory pairs, or raise the limit"
        )


def margins(pairs: Sequence[PreferencePair], margin: float | str | None) -> list[float]:
    """The margin of each pair, as `reward_model.margin` says. UserError for a pair that lacks its own."""
    if margin != "data":
        return [float(margin or 0.0)] * len(pairs)
    for pair in pairs:
        if pair.margin is None:
            raise UserError(
                f"{pair.source}: no margin: fill the column 'margin', or set reward_model.margin to a number"
            )
    return [pair.margin for pair in pairs]


def pair_batch(pairs: Sequence[PreferencePair], margin: Sequence[float], placement: Placement, rank: int):
    """A batch of the pairs' sequences, cut to what `rank` holds: pair i is samples 2i (chosen) and 2i + 1 (rejected).

    The loss mask is on at the last token of each, where the score is read; there also is the column `margin`.
    """
    prompts = [pair.prompt_ids for pair in pairs for _ in range(2)]
    responses = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    n = len(prompts)
    zeros = np.zeros(n, dtype=np.int64)
    prompt = np.array([len(ids) for ids in prompts])
    length = prompt + np.array([len(ids) for ids in responses])
    info = SampleInfo(
        sample_id=np.arange(n),
        group_id=np.arange(n) // 2,
        prompt_len=prompt,
        length=length,
        trainable=np.ones(n, dtype=np.int64),
        score=zeros.astype(np.float64),
        finish_reason=zeros,
        weight_version=zeros,
        source=["preferences"] * n,
    )
    mine = placement.samples_of(rank)
    tokens = torch.tensor([t for i in mine for t in (*prompts[i], *responses[i])], dtype=torch.int64)
    batch = RolloutBatch(info, placement, mine, {"tokens": tokens, "loss_mask": torch.zeros(len(tokens)).bool()})
    ends = batch.cu_seqlens[1:] - 1
    batch["loss_mask"][ends] = True
    batch["margin"] = torch.zeros(len(tokens))
    batch["margin"][ends] = torch.tensor([margin[i // 2] for i in mine], dtype=torch.float32)
    return batch


def _samples(micro_batches: list[list[int]]) -> list[list[int]]:
    """Micro-batches of pairs as micro-batches of their sequences, side by side."""
    return [[sample for pair in pairs for sample in (2 * pair, 2 * pair + 1)] for pairs in micro_batches]


class _RewardModel(Supervised):
    name = "reward_model"
    exported = "reward model"

    def _batch(self, pairs: Sequence[PreferencePair], margin: Sequence[float]):
        """A batch of the pairs and this rank's micro-batches; the two sequences of a pair are never apart."""
        lengths = np.array([sum(pair.lengths) for pair in pairs])
        plan = role_plan(self.engine, lengths, len(pairs), self._budget(), seed=(0,), shuffle=False)
        placement = self.engine.placement(np.repeat(plan.placement.owner, 2))
        return pair_batch(pairs, margin, placement, dist.get_rank()), _samples(plan.micro_batches(0))

    def _train_step(self) -> dict[str, float]:
        pairs = self._next_rows()
        batch, micro = self._batch(pairs, margins(pairs, self.settings.margin))
        loss = PreferenceLoss(self.settings.center_coef)
        result = self.engine.train_step(batch, np.arange(2 * len(pairs)), micro, loss, agg_mode="token-mean")
        return self._step_metrics(loss, result, batch.info)

    def _scores(self, pairs: Sequence[PreferencePair]) -> torch.Tensor:
        """Scores `[pairs, 2]` of chosen and rejected, float64, on every rank. Collective."""
        batch, micro = self._batch(pairs, [0.0] * len(pairs))
        lasts = self.engine.forward(batch, micro, "values")["last_values"]
        return torch.from_numpy(share_per_sample(self.engine, batch, lasts)).view(-1, 2)

    def _validate(self) -> dict[str, float]:
        return held_out_metrics(self._scores(self.val))

    def _export_options(self) -> dict[str, Any]:
        settings = self.settings
        pairs = self.val if self.val is not None else self.train[:NORMALISING_PAIRS]
        scores = self._scores(pairs)
        mean, std = (float(scores.mean()), float(scores.std())) if settings.normalize else (0.0, 1.0)
        scale = RewardScale(mean, std if std > 0 else 1.0, settings.clip)
        measured = {name.removeprefix("val/"): value for name, value in held_out_metrics(scores).items()}
        measured |= {"pairs": len(pairs), "held_out": self.val is not None, "steps": self.step}
        architecture = reward_architecture(self.engine.spec.architecture)
        labels = {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        changes = {"architectures": [architecture], "num_labels": 1, **labels}
        return {"config_changes": changes, "extra_files": {REWARD_FILE: scale.to_json(measured)}}


def held_out_metrics(scores: torch.Tensor) -> dict[str, float]:
    """Loss without margin and centring, accuracy, calibration error and mean margin of `[pairs, 2]` scores."""
    chosen, rejected = scores.double().unbind(1)
    return {
        "val/loss": float(bradley_terry(chosen, rejected).mean()),
        "val/accuracy": float(preferred(chosen, rejected).mean()),
        "val/calibration_error": calibration_error(chosen, rejected),
        "val/margin": float((chosen - rejected).mean()),
    }
