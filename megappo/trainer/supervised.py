"""Training on a fixed set of rows: the loop, checkpoints and export that fine-tuning and reward models share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megappo.checkpoint.store import CheckpointStore
from megappo.config.schema import ExperimentConfig, RewardModelConfig, SftConfig
from megappo.data.batch import SampleInfo
from megappo.data.prompts import PromptSampler
from megappo.data.schedule import Budget
from megappo.engine.engine import ModelEngine, StepStats
from megappo.engine.losses import Loss
from megappo.errors import UserError
from megappo.observe.timing import Timer
from megappo.parallel import backend
from megappo.trainer.interrupt import StopRequest
from megappo.trainer.phases import Update, step_metrics
from megappo.trainer.planning import budget
from megappo.trainer.resume import load_state, save_state
from megappo.trainer.setup import export_model
from megappo.trainer.watch import Watch

Settings = SftConfig | RewardModelConfig


def row_sampler(config: ExperimentConfig, name: str, rows: Sequence, what: str) -> tuple[PromptSampler, int]:
    """The order of the rows, and the number of optimizer steps of the run; `name` is the configuration's section."""
    section: Settings = getattr(config, name)
    if len(rows) < section.batch_size:
        raise UserError(f"{name}.batch_size is {section.batch_size} but {name}.train_files hold {len(rows)} {what}")
    sampler = PromptSampler(len(rows), section.batch_size, config.trainer.seed, shuffle=True)
    return sampler, section.total_steps or section.total_epochs * sampler.steps_per_epoch


class Supervised:
    """One model, trained on batches of `train`. Subclasses say what a step, validation and the export's extras are.

    Attributes:
        name: the configuration's section, and the role's name in checkpoints.
    """

    name = ""
    exported = "trained model"

    def __init__(
        self,
        config: ExperimentConfig,
        engine: ModelEngine,
        train,
        val,
        sampler: PromptSampler,
        total: int,
        watch: Watch,
    ):
        self.config, self.engine, self.train, self.val = config, engine, train, val
        self.settings: Settings = getattr(config, self.name)
        self.sampler, self.total, self.watch = sampler, total, watch
        self.store = CheckpointStore(Path(config.trainer.output_dir) / "checkpoints", config.trainer.max_ckpt_to_keep)
        self.step = 0

    def _train_step(self) -> dict[str, float]:
        """One optimizer step on the rows of `self.step`."""
        raise NotImplementedError

    def _validate(self) -> dict[str, float]:
        """Metrics of the held-out rows; there are some."""
        raise NotImplementedError

    def _export_options(self) -> dict[str, Any]:
        """What the exported folder has besides the weights: `config_changes` and `extra_files` of `write_hf`."""
        return {}

    def run(self, stop: StopRequest) -> dict[str, float]:
        settings = self.settings
        if not settings.export_path and settings.save_freq < 0:
            self.watch.say(f"warning: the {self.exported} is kept nowhere: set {self.name}.export_path or save_freq")
        self._begin()
        metrics: dict[str, float] = {}
        stopping = stop.anywhere()
        while self.step < self.total and not stopping:
            timer = Timer(backend.synchronize)
            with timer("step"):
                metrics = self._train_step()
            self.step += 1
            last, stopping = self.step == self.total, stop.anywhere()
            if self.val is not None and settings.test_freq > 0 and (last or self.step % settings.test_freq == 0):
                metrics |= self._validate()
            if settings.save_freq > 0 and (last or stopping or self.step % settings.save_freq == 0):
                save_state(self.store, self.step, {self.name: self.engine}, {}).finish()
            self.watch.log(self.step, metrics | timer.take())
        if self.step < self.total:
            key, resume = f"{self.name}.save_freq", self.config.trainer.resume
            raise stop.interrupted(f"step {self.step}", self.store, key, resume)
        if settings.export_path:
            self._export(Path(settings.export_path))
        return metrics

    def _begin(self) -> None:
        """Continue from the newest checkpoint, or keep those of an earlier run out of the way."""
        if self.config.trainer.resume == "never":
            aside = self.store.set_aside()
            if aside is not None:
                self.watch.say(f"trainer.resume is never: the earlier checkpoints are now in {aside}")
            return
        state = load_state(self.store.latest(), {self.name: self.engine})
        if state is not None:
            self.step = int(state["iteration"])
            self.watch.resumed(self.step)

    def _export(self, out: Path) -> None:
        export_model(self.engine, out, self.config.model.dtype, **self._export_options())
        self.watch.say(f"{self.exported}: {out}")

    def _budget(self) -> Budget:
        s = self.settings
        return budget(s.use_dynamic_bsz, s.micro_batch_size_per_gpu, s.max_token_len_per_gpu)

    def _next_rows(self) -> list:
        _, indices = self.sampler.batch(self.step)
        return [self.train[i] for i in indices]

    def _step_metrics(self, loss: Loss, result: StepStats | None, info: SampleInfo) -> dict[str, float]:
        metrics = step_metrics(self.engine, Update("train", loss, [result], info.sample_id))
        epoch = self.step // self.sampler.steps_per_epoch
        return metrics | {"perf/total_num_tokens": float(info.length.sum()), "training/epoch": float(epoch)}
