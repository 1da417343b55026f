"""`megappo guard …`: rules over the metrics of finished runs. Reads files only; imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megappo.errors import UserError

if TYPE_CHECKING:
    from megappo.trainer.guard_check import GuardCheck

app = typer.Typer(help="Try the guard's rules on the metrics of a run.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `check` a command of its own."""


@app.command()
def check(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run folder (trainer.output_dir).")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CFG] [KEY=VALUE]...", help="Another experiment's YAML file, and changes to it."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CFG", help="Take the rules of this YAML file.")
    ] = None,
    preset: Annotated[
        Literal["conservative", "loose"] | None, typer.Option("--preset", help="Take the rules of this preset.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> Callable[[], int]:
    """Show which rules would have fired in a run, and which did (default: its own rules)."""
    files = [text for text in changes or [] if "=" not in text]
    if len(files) + (config is not None) > 1:
        raise UserError(f"{', '.join([*files, *([str(config)] if config else [])])}: give one configuration")
    file = config or (Path(files[0]) if files else None)

    def work() -> int:
        from megappo.trainer.guard_check import check_run

        found = check_run(run_dir, file, [text for text in changes or [] if "=" in text], preset=preset)
        if as_json:
            print(json.dumps(found.record(), indent=1))
        else:
            _show(found)
        return 0

    return work


def _show(found: GuardCheck) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    known = found.really is not None
    if found.events:
        table = Table(pad_edge=False, box=None)
        for column in ("step", "rule", "metric", "value", "condition", "actions", *(["fired"] if known else [])):
            table.add_column(column, overflow="fold")
        for event in found.events:
            fired = {True: "yes", False: "no", None: ""}[found.fired(event)]
            cells = (str(event.step), event.rule, event.metric, f"{event.value:.4g}", event.condition, event.told())
            table.add_row(*map(escape, (*cells, *([fired] if known else []))))
        console.print(table)
        console.print()
    counts = Table(pad_edge=False, box=None)
    for column in ("rule", "would fire", *(["fired in the run"] if known else [])):
        counts.add_column(column)
    for rule, numbers in found.counts().items():
        counts.add_row(escape(rule), *map(str, numbers.values()))
    if counts.row_count:
        console.print(counts)
    else:
        console.print(f"no rule would have fired in {found.total} iterations")
    for step, rule in found.missing:
        console.print(f"only in the run: iteration {step}, {escape(rule)}")
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
