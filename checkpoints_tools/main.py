"""The `megappo-ckpt` command (also `megappo ckpt`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megappo.observe.failures import run_app

app = typer.Typer(
    help="Look at model folders.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def _top(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Hugging Face folder or .safetensors file.")],
) -> None:
    """List a model's tensors: name, dtype, shape, size. Reads only the headers of the files."""
    from checkpoints_tools.hf_headers import describe

    print(describe(path))


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run_app(app, sys.argv[1:]))
