"""What a run tells the outside: metrics and samples go to the sinks, from rank 0 only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megappo.config.schema import ExperimentConfig
from megappo.config.show import dump_config
from megappo.errors import UserError
from megappo.observe.sinks import build_sinks
from megappo.observe.sinks.base import EVENTS_TAG, Sinks
from megappo.observe.sinks.jsonl import EventLog
from megappo.trainer.guard import Event, Verdict


class Watch:
    """The sinks of a run; on ranks other than 0 every call does nothing."""

    def __init__(self, config: ExperimentConfig, total_steps: int):
        trainer = config.trainer
        self.main = dist.get_rank() == 0
        self.sinks = (
            build_sinks(
                trainer.logger,
                trainer.output_dir,
                trainer.project_name,
                trainer.experiment_name,
                config.model_dump(mode="json"),
                total_steps,
            )
            if self.main
            else Sinks([])
        )
        self.event_log = EventLog(Path(trainer.output_dir))
        self._unwritten: ExperimentConfig | None = config if self.main else None

    def resumed(self, iteration: int) -> None:
        """The run continues after `iteration`: records of later iterations will be made again."""
        self.sinks.truncate_from(iteration + 1)
        if self.main:
            self.event_log.truncate_from(iteration + 1)
        self.say(f"resumed after iteration {iteration}")

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """One iteration's metrics, completed by the throughput."""
        if self.main:
            self.event_log.begin()
        self._keep_config()
        seconds = metrics.get("timing_s/step")
        tokens = metrics.get("perf/total_num_tokens")
        if seconds and tokens:
            metrics["perf/time_per_step"] = seconds
            metrics["perf/throughput"] = tokens / seconds / dist.get_world_size()
        self.sinks.log(metrics, iteration)

    def events(self, iteration: int, events: Sequence[Event]) -> None:
        """What the guard saw and did: events.jsonl, texts for the sinks, and a line for what must not go unseen."""
        if not self.main:
            return
        self.event_log.write([event.record() for event in events])
        rows = [{"rule": e.rule, "metric": e.metric, "value": e.value, "what": str(e)} for e in events]
        self.sinks.text(EVENTS_TAG, rows, iteration)
        for event in events:
            verdict = Verdict.of([event])
            if verdict.warn or verdict.rollback:
                self.say(f"iteration {iteration}: {event}")

    def validation(self, iteration: int, metrics: dict[str, float], answers: Sequence) -> None:
        """Held-out metrics on their own line (before training), and some answers."""
        self._keep_config()
        if iteration == 0:
            self.sinks.log(metrics, iteration)
        self.sinks.text("val/generations", [asdict(answer) for answer in answers], iteration)

    def _keep_config(self) -> None:
        """With the first metrics, not before: a run that cannot start leaves no folder behind."""
        if self._unwritten is not None:
            _write_config(Path(self._unwritten.trainer.output_dir), self._unwritten)
            self._unwritten = None

    def say(self, text: str) -> None:
        if self.main:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self.sinks.close()
        self.event_log.close()


def _write_config(folder: Path, config: ExperimentConfig) -> None:
    """`config.yaml`: the resolved configuration, which loads to the same one. Written beside and renamed."""
    target = folder / "config.yaml"
    beside = target.with_name("config.yaml.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside.write_text(dump_config(config), encoding="utf-8")
        os.replace(beside, target)
    except OSError as err:
        raise UserError(f"cannot write {target} ({err.strerror}): check trainer.output_dir") from None
