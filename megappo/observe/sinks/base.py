"""Where metrics go: the protocol of a sink, and several of them as one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Protocol

from megappo.errors import UserError

Row = Mapping[str, object]
EVENTS_TAG = "guard/events"  # texts that are events of the guard; `Watch` itself writes events.jsonl and the console


class Sink(Protocol):
    """Receives metrics and sample texts on rank 0.

    `truncate_from` is called at most once, before anything is logged, when a run is resumed.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one iteration's metrics."""

    def text(self, tag: str, rows: Sequence[Row], step: int) -> None:
        """Record sample generations: one mapping a sample, such as prompt, response, score."""

    def truncate_from(self, step: int) -> None:
        """Forget records with this step or a later one: the resumed run makes them again."""

    def close(self) -> None:
        """Write out what is pending. Nothing may be logged afterwards."""


class Sinks:
    """Several sinks behind the interface of one.

    A remote service (`best_effort`) that fails is reported once on stderr and then left alone: a training run
    must not die of it. A local sink that fails (disk full) raises.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Sink.log`."""
        self._each(lambda sink: sink.log(metrics, step))

    def text(self, tag: str, rows: Sequence[Row], step: int) -> None:
        """See `Sink.text`."""
        if rows:
            self._each(lambda sink: sink.text(tag, rows, step))

    def truncate_from(self, step: int) -> None:
        """See `Sink.truncate_from`."""
        self._each(lambda sink: sink.truncate_from(step))

    def close(self) -> None:
        """See `Sink.close`."""
        self._each(lambda sink: sink.close())
        self.sinks = []

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as err:
                if not getattr(sink, "best_effort", False):
                    raise
                self.sinks.remove(sink)
                name = type(sink).__name__
                print(
                    f"warning: {name} failed and is off from here: {type(err).__name__}: {err}",
                    file=sys.stderr,
                )


def optional_import(module: str, extra: str) -> ModuleType:
    """Import a package of an extra.

    Raises:
        UserError: it is not installed, or its import fails.
    """
    where = f"trainer.logger asks for {extra}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name and err.name.split(".")[0] != module.split(".")[0]:
            raise UserError(f"{where}, which does not import: {err}") from err
        raise UserError(f"{where}, which is not installed: pip install 'megappo[{extra}]'") from err
    except Exception as err:
        raise UserError(f"{where}, which does not import: {type(err).__name__}: {err}") from err
