"""`megappo config …`: look at, check and translate configurations. Starts no process and imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from megappo.errors import UserError

app = typer.Typer(help="Look at, check and translate configurations.", no_args_is_help=True)

ConfigPath = Annotated[Path, typer.Argument(metavar="CFG", help="YAML file of the experiment.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as actor.optim.lr=1e-6."),
]
Kind = Annotated[
    Literal["train", "sft", "reward-model"], typer.Option("--kind", help="The command that the file is meant for.")
]


@app.command()
def show(cfg: ConfigPath, overrides: Overrides = None, kind: Kind = "train") -> None:
    """Print every key with the value it has in the end, as YAML."""
    from megappo.config.load import read_config
    from megappo.config.show import dump_config

    config, _ = read_config(cfg, overrides or [], kind=kind)
    typer.echo(dump_config(config), nl=False)


@app.command()
def check(
    cfg: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks (all nodes) to check layouts and batches against."),
    ] = None,
    kind: Kind = "train",
) -> None:
    """Find mistakes without starting anything; exit code 2 if there are any."""
    from megappo.config.checks import check_config
    from megappo.config.load import read_config

    config, sources = read_config(cfg, overrides or [], kind=kind)
    problems = check_config(config, kind=kind, world_size=nproc)
    for line in sources.lines(problem for problem in problems if problem.note):
        typer.echo(f"note: {line}", err=True)
    sources.raise_if_any(problems)
    ranks = f" on {nproc} ranks" if nproc else " (give --nproc to check layouts against a number of ranks)"
    able = {"train": "train", "sft": "fine-tune", "reward-model": "train a reward model"}
    typer.echo(f"ok: {cfg} can {able[kind]}{ranks}")


@app.command()
def keys(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/configuration.md instead.")] = False,
) -> None:
    """List every key with its type, default and meaning."""
    from megappo.config import keys as listing

    if markdown:
        typer.echo(listing.markdown(), nl=False)
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(listing.rich_table(console.width))


@app.command("import-verl")
def import_verl_command(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE] [KEY=VALUE]...", help="verl YAML or launch script, and verl settings."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; default: print.")] = None,
    verl_defaults: Annotated[
        bool, typer.Option("--verl-defaults", help="Write verl's defaults where MegaPPO's differ.")
    ] = False,
) -> None:
    """Translate verl YAML, launch scripts and command lines; what has no counterpart is said on stderr."""
    from megappo.config.import_verl import import_verl

    words = list(settings or [])
    file = words.pop(0) if words and ("=" not in words[0] or Path(words[0]).is_file()) else None
    if file is None and not words:
        raise UserError("nothing to translate; give a verl YAML file, a launch script or settings such as a.b=c")
    result = import_verl(file, words, verl_defaults=verl_defaults)
    for line in result.warnings:
        typer.echo(f"warning: {line}", err=True)
    if output is None:
        typer.echo(result.yaml(), nl=False)
        return
    try:
        output.expanduser().write_text(result.yaml(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); choose another file") from None
    typer.echo(f"written: {output}")
