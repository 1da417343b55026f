"""The `megappo-ckpt` command (also `megappo ckpt`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from megappo.observe.failures import run_app

app = typer.Typer(
    help="Look at models and checkpoints; convert, reshard, compare and average them.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Src = Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face, Megatron or inference folder.")]
Dst = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")]
Tp = Annotated[int, typer.Option(help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option(help="Pipeline stages (Megatron).")]
Vpp = Annotated[int, typer.Option(help="Virtual chunks a pipeline stage (Megatron).")]
Ep = Annotated[int, typer.Option(help="Expert-parallel ranks.")]
Etp = Annotated[int | None, typer.Option(help="Ranks that share an expert (Megatron; default: tp).")]
First = Annotated[int | None, typer.Option("--first-stage-layers", help="Layers of the first pipeline stage.")]
Last = Annotated[int | None, typer.Option("--last-stage-layers", help="Layers of the last pipeline stage.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: as the source).")]
Model = Annotated[Path | None, typer.Option(help="Hugging Face folder with config.json and tokenizer of a checkpoint.")]
Force = Annotated[bool, typer.Option("--force", help="Replace DST if it is a model.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what an interrupt left in DST.partial.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would be written.")]
Workers = Annotated[int, typer.Option(help="Threads that read and write (0: one a core, at most 8).", min=0)]


@app.callback(invoke_without_command=True)
def _top(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Model folder, checkpoint or .safetensors file.")],
) -> None:
    """List a model's tensors: name, dtype, shape, size; of a checkpoint also its layout. Reads no weights."""
    from checkpoints_tools.inspect_model import describe

    print(describe(path))


@app.command()
def convert(
    src: Src,
    dst: Dst,
    to: Annotated[str, typer.Option(help="hf, megatron or inference.")],
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    first_stage_layers: First = None,
    last_stage_layers: Last = None,
    dtype: Dtype = None,
    model: Model = None,
    force: Force = False,
    resume: Resume = False,
    dry_run: DryRun = False,
    workers: Workers = 0,
) -> None:
    """Write the model in SRC (of whatever kind) to DST in another format."""
    from checkpoints_tools.convert import Options, Request, convert

    request = Request(to, tp, pp, vpp, ep, etp, first_stage_layers, last_stage_layers, dtype)
    print(convert(src, dst, request, Options(model, force, resume, dry_run, workers)))


@app.command()
def reshard(
    src: Src,
    dst: Dst,
    tp: Tp = 1,
    pp: Pp = 1,
    vpp: Vpp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    first_stage_layers: First = None,
    last_stage_layers: Last = None,
    dtype: Dtype = None,
    model: Model = None,
    force: Force = False,
    resume: Resume = False,
    dry_run: DryRun = False,
    workers: Workers = 0,
) -> None:
    """Write a Megatron or inference checkpoint in the same format for another layout."""
    from checkpoints_tools.convert import Options, Request, convert
    from checkpoints_tools.detect import detect
    from megappo.errors import UserError

    kind = detect(src).kind
    if kind not in ("megatron", "inference"):
        raise UserError(f"{src} is in no layout: use convert SRC DST --to megatron or inference")
    request = Request(kind, tp, pp, vpp, ep, etp, first_stage_layers, last_stage_layers, dtype)
    print(convert(src, dst, request, Options(model, force, resume, dry_run, workers)))


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="A model of any kind.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    model: Model = None,
    tolerance: Annotated[float, typer.Option(help="Largest difference that still counts as the same.", min=0)] = 0.0,
    all_tensors: Annotated[bool, typer.Option("--all", help="A line a tensor, not only those that differ.")] = False,
) -> int:
    """Are two models the same? Largest difference of each tensor; exit code 1 if any is above the tolerance."""
    from checkpoints_tools.verify import verify

    report, same = verify(a, b, model=model, tolerance=tolerance, all_tensors=all_tensors)
    print(report)
    return 0 if same else 1


Sources = Annotated[list[Path], typer.Argument(metavar="SRC...", help="Models of one architecture.")]
Weights = Annotated[str | None, typer.Option(help="Comma-separated, one a source (default: equal, summing to 1).")]


@app.command()
def average(
    dst: Dst,
    sources: Sources,
    weights: Weights = None,
    dtype: Dtype = None,
    force: Force = False,
    resume: Resume = False,
    dry_run: DryRun = False,
    workers: Workers = 0,
) -> None:
    """Write the weighted mean of several models as a Hugging Face folder: the sum of w x source."""
    from checkpoints_tools.average import average
    from checkpoints_tools.convert import Options

    print(average(dst, sources, weights, None, dtype, Options(None, force, resume, dry_run, workers)))


@app.command()
def merge(
    dst: Dst,
    sources: Sources,
    base: Annotated[Path, typer.Option(help="The model that the sources were trained from.")],
    weights: Weights = None,
    dtype: Dtype = None,
    force: Force = False,
    resume: Resume = False,
    dry_run: DryRun = False,
    workers: Workers = 0,
) -> None:
    """Add what several models have learnt to their base (task arithmetic): base + the sum of w x (source - base)."""
    from checkpoints_tools.average import average
    from checkpoints_tools.convert import Options

    print(average(dst, sources, weights, base, dtype, Options(None, force, resume, dry_run, workers)))


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run_app(app, sys.argv[1:]))
