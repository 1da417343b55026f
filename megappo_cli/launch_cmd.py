"""`megappo launch …`: start the same YAML file under a cluster's scheduler. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megappo.config.schema import TrainerConfig
from megappo.errors import UserError

app = typer.Typer(help="Start a run under a cluster's scheduler.", no_args_is_help=True)

ConfigPath = Annotated[Path, typer.Argument(metavar="CFG", help="YAML file of the experiment.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as actor.optim.lr=1e-6."),
]
Kind = Annotated[
    Literal["train", "sft", "reward-model"], typer.Option("--kind", help="The command that the file is meant for.")
]


def _continues(trainer: TrainerConfig) -> None:
    """A requeued run must go on where it was.

    Raises:
        UserError: it would start anew each time.
    """
    if trainer.resume == "never":
        raise UserError("trainer.resume is never: a requeued job would start anew; set trainer.resume=auto")
    if trainer.save_freq == -1:
        raise UserError("trainer.save_freq is -1: a requeued job would start anew; set a period, such as 10")


@app.command()
def slurm(
    cfg: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs, and so ranks, on each node.")] = 8,
    time: Annotated[str, typer.Option(help="Time limit; the run is requeued and goes on after it.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="SLURM partition.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM account.")] = None,
    name: Annotated[str | None, typer.Option(help="Job name; default: trainer.experiment_name.")] = None,
    array: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE,VALUE: one job a value; several --array: every combination.")
    ] = None,
    warn: Annotated[int, typer.Option(min=1, help="Save and stop so long before the time limit (seconds).")] = 600,
    python: Annotated[str, typer.Option(help="Interpreter on the nodes.")] = "python3",
    logs: Annotated[str, typer.Option(help="Folder for the ranks' logs, a folder a job in it.")] = "slurm-logs",
    check: Annotated[bool, typer.Option(help="Look for mistakes first, as the run will.")] = True,
    kind: Kind = "train",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; default: print.")] = None,
) -> None:
    """Write the sbatch script of a run: ranks by srun, requeue at the time limit, sweeps as job arrays."""
    from megappo.config.load import load_config, read_config
    from megappo_cli.slurm import SlurmJob, parse_sweep, script, sweep_overrides, write_script

    given = tuple(overrides or ())
    base, _ = read_config(cfg, given, kind=kind)
    _continues(base.trainer)
    label = name or base.trainer.experiment_name
    settings = parse_sweep(array or [])
    sweep = tuple(sweep_overrides(one, base.trainer.output_dir, base.trainer.experiment_name) for one in settings)
    if check:
        for one in sweep or ((),):
            load_config(cfg, [*given, *one], world_size=nodes * gpus_per_node, kind=kind)
    job = SlurmJob(
        command=kind,
        config=str(cfg.expanduser().resolve()),
        overrides=given,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        time=time,
        partition=partition,
        account=account,
        name=label,
        warn_s=warn,
        python=python,
        logs=logs,
        sweep=sweep,
    )
    if output is None:
        typer.echo(script(job), nl=False)
    else:
        write_script(job, output.expanduser())
        typer.echo(f"written: {output}; submit it with: sbatch {output}")
