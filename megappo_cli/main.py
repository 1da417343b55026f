"""The `megappo` command. Nothing here imports torch, so `--help` and configuration errors come at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from checkpoints_tools.main import app as checkpoint_app
from megappo.errors import UserError
from megappo.observe.failures import run_app
from megappo_cli.config_cmd import app as config_app
from megappo_cli.guard_cmd import app as guard_app
from megappo_cli.launch_cmd import app as launch_app
from megappo_cli.plan_cmd import plan
from megappo_cli.report import report

app = typer.Typer(
    help="PPO alignment of large language models on Megatron-core.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="ckpt")
app.add_typer(guard_app, name="guard")
app.add_typer(launch_app, name="launch")
app.command()(report)
app.command()(plan)

Work = Callable[[], int]  # what a command leaves to `run_app`
ConfigPath = Annotated[Path, typer.Argument(metavar="CFG", help="YAML file of the experiment.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as actor.optim.lr=1e-6."),
]
Nproc = Annotated[int, typer.Option(min=1, help="Local processes to start; several nodes are started with torchrun.")]
Resume = Annotated[
    bool | None,
    typer.Option("--resume/--no-resume", help="Continue from the latest checkpoint (default: trainer.resume)."),
]


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from megappo import __version__

        print(f"megappo {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what is installed and what training will use."""
    from megappo_cli.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json))


@app.command()
def train(cfg: ConfigPath, overrides: Overrides = None, nproc: Nproc = 1, resume: Resume = None) -> Work:
    """Train a policy with PPO, GRPO, RLOO, ..."""
    return lambda: _start("train", cfg, _with_resume(overrides, resume), nproc)


@app.command()
def sft(cfg: ConfigPath, overrides: Overrides = None, nproc: Nproc = 1, resume: Resume = None) -> Work:
    """Fine-tune a model on given responses."""
    return lambda: _start("sft", cfg, _with_resume(overrides, resume), nproc)


@app.command("reward-model")
def reward_model(cfg: ConfigPath, overrides: Overrides = None, nproc: Nproc = 1, resume: Resume = None) -> Work:
    """Train a reward model on preference pairs."""
    return lambda: _start("reward-model", cfg, _with_resume(overrides, resume), nproc)


def _with_resume(overrides: list[str] | None, resume: bool | None) -> list[str]:
    """The overrides, and what --resume or --no-resume means."""
    given = [] if resume is None else [f"trainer.resume={'auto' if resume else 'never'}"]
    return [*(overrides or []), *given]


def _start(kind: str, path: Path, overrides: list[str], nproc: int) -> int:
    """Check the configuration, then run it: here, or as `nproc` local ranks that each come back through here.

    Raises:
        UserError: the configuration is wrong, or `--nproc` is given to a rank of torchrun.
    """
    world = _launched_world()
    if world is not None and nproc > 1:
        raise UserError(
            f"--nproc {nproc}: this process is already one of {world} ranks (WORLD_SIZE is set): drop --nproc"
        )
    from megappo.config.load import load_config

    try:
        config = load_config(path, overrides, world_size=world or nproc, kind=kind)
    except UserError as err:
        # Every rank of a node reads the same file and finds the same mistake: one of them says so.
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            err.said_elsewhere = True
        raise
    if world is None and nproc > 1:
        from megappo_cli.launcher import launch_local

        return launch_local([kind, str(path), *overrides], nproc)
    if kind == "train":
        from megappo.trainer.ppo import run_ppo as run
    elif kind == "sft":
        from megappo.trainer.sft import run_sft as run
    else:
        from megappo.trainer.reward_model import run_reward_model as run
    run(config)
    return 0


def _launched_world() -> int | None:
    """Number of ranks if a launcher (torchrun, or `launch_local`) started this process, else None."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return None


def main() -> None:
    """Entry point of the console script; ends the process with the exit code (see `observe.failures`)."""
    sys.exit(run_app(app, sys.argv[1:]))
