"""`megappo launch slurm`: write the batch script of a run. The script itself is the documentation of how it works."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megappo.errors import UserError

_TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){0,2}|\d+")


@dataclass(frozen=True)
class SlurmJob:
    """One batch script.

    Attributes:
        sweep: the overrides of each job of an array, none for a single job.
        warn_s: how long before the time limit the run is told to save and stop (seconds).
    """

    command: str
    config: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int = 8
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    name: str = "megappo"
    warn_s: int = 600
    python: str = "python3"
    logs: str = "slurm-logs"
    sweep: tuple[tuple[str, ...], ...] = field(default=())

    def __post_init__(self) -> None:
        if not _TIME.fullmatch(self.time):
            raise UserError(f"--time {self.time}: not a SLURM time; write minutes, HH:MM:SS or D-HH:MM:SS")
        for option, value in (("--partition", self.partition), ("--account", self.account), ("--name", self.name)):
            if value is not None and not re.fullmatch(r"[\w.,-]+", value):
                raise UserError(f"{option} {value}: not a SLURM name; use letters, digits, '.', '-' and '_'")


def parse_sweep(options: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """`["a=1,2", "b=x,y"]` → every combination, as overrides. Commas inside brackets and quotes do not separate.

    Raises:
        UserError: an option is not `key=value,value`, or gives a key twice.
    """
    axes = []
    for option in options:
        key, equals, text = option.partition("=")
        values = _split(text)
        if not equals or not key.strip() or not all(values):
            raise UserError(f"--array {option}: write KEY=VALUE,VALUE, such as actor.optim.lr=1e-6,2e-6")
        if any(key.strip() == axis[0].partition("=")[0] for axis in axes):
            raise UserError(f"--array {option}: {key.strip()} is given twice; put its values into one --array")
        axes.append([f"{key.strip()}={value}" for value in values])
    return tuple(itertools.product(*axes)) if axes else ()


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def sweep_overrides(overrides: Sequence[str], output_dir: str, name: str) -> tuple[str, ...]:
    """The overrides of one job of an array: its values, and an output folder and a name of its own."""
    tag = re.sub(r"[^\w.=-]+", "_", "_".join(word.rpartition(".")[2] for word in overrides))
    return (*overrides, f"trainer.output_dir={output_dir}/{tag}", f"trainer.experiment_name={name}-{tag}")


def _header(job: SlurmJob) -> list[str]:
    array = f"{len(job.sweep)} jobs, one a setting" if job.sweep else ""
    log = "%x-%A_%a.log" if job.sweep else "%x-%j.log"
    options = [
        ("job-name", job.name, ""),
        ("nodes", str(job.nodes), ""),
        ("ntasks-per-node", str(job.gpus_per_node), "one process a GPU"),
        ("gpus-per-node", str(job.gpus_per_node), ""),
        ("exclusive", "", "the whole node: its cores and memory too"),
        ("time", job.time, "the run goes on after the limit, see below"),
        ("partition", job.partition, ""),
        ("account", job.account, ""),
        ("array", f"0-{len(job.sweep) - 1}" if job.sweep else None, array),
        ("output", log, ""),
        ("open-mode", "append", "a requeued job goes on in the same log"),
        ("requeue", "", "after a node failure or a preemption SLURM starts it again"),
        ("signal", f"B:USR1@{job.warn_s}", f"tell this script {job.warn_s} s before the time limit"),
    ]
    lines = []
    for option, value, why in options:
        if value is not None:
            text = f"#SBATCH --{option}" + (f"={value}" if value else "")
            lines.append(f"{text:<42} # {why}" if why else text)
    return lines


def _sweep_lines(job: SlurmJob) -> list[str]:
    if not job.sweep:
        return []
    lines = ["# This job's setting of the sweep.", "# shellcheck disable=SC2016 # values are meant as they stand"]
    lines += ['case "$SLURM_ARRAY_TASK_ID" in']
    for number, words in enumerate(job.sweep):
        lines.append(f"    {number}) overrides+=({shlex.join(words)}) ;;")
    return [*lines, '    *) echo "error: no setting number $SLURM_ARRAY_TASK_ID" >&2 && exit 2 ;;', "esac", ""]


_BODY = r"""
# Every rank meets rank 0, on the first node. The port depends on the job, so that jobs on one node do not collide.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# One log a rank. A requeued job goes on in the same files.
logs=${MEGAPPO_LOGS:-@LOGS@}/$SLURM_JOB_ID
mkdir -p "$logs"

# The time limit comes near: pass it on once (srun sends it to every rank). The trainer finishes its iteration, saves
# a checkpoint and exits with 138. Let --signal come earlier than the longest iteration and a save take together.
# SIGTERM (scancel, or a preemption) reaches the ranks in the same way, which stop and save within the grace time; SLURM
# itself requeues a preempted job. A job that was cancelled stays cancelled.
step=
signals=0
out_of_time=false
# shellcheck disable=SC2329 # called by the trap
on_usr1() {
    out_of_time=true
    ((signals += 1))
    if [[ -n $step ]]; then kill -USR1 "$step"; fi
}
# shellcheck disable=SC2329
on_term() {
    ((signals += 1))
    if [[ -n $step ]]; then kill -TERM "$step"; fi
}
trap on_usr1 USR1
trap on_term TERM

# --wait: when one rank has ended the others get 120 s: time to finish a save, and a bound on waiting for a lost one.
# exec: signals must reach Python itself. SLURM signals every process of a rank, its reward workers too: they inherit
# that these two are ignored, which the trainer undoes for itself once it can save.
# SLURM numbers the processes; torch wants these names.
# shellcheck disable=SC2016 # expanded by the shell of each rank
srun --kill-on-bad-exit=0 --wait=120 --open-mode=append --output="$logs/rank%t.log" bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    trap "" USR1 TERM
    exec "$@"
' rank "$python" -m megappo_cli @COMMAND@ "$config" "${overrides[@]}" &
step=$!

# wait returns early when a signal came: ask again until it was srun that ended it.
code=0
while true; do
    before=$signals status=0
    wait "$step" || status=$?
    ((status == 127)) || code=$status # 127: its end was known already
    ((signals > before)) || break
done

# 0 done, 1 unexpected error, 2 a mistake in the configuration, 3 stopped by the guard, 128 + n stopped by signal n.
if $out_of_time && ((code > 128)); then
    echo "time limit: saved; requeued, and trainer.resume=auto continues from the checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
if ((code != 0)); then
    echo "error: the run ended with exit code $code; the first errors of its ranks ($logs):" >&2
    grep -H -m 1 -E '^(\[rank [0-9]+\] )?(error:|[A-Za-z]*Error)' "$logs"/rank*.log >&2 || true
fi
exit "$code"
"""


def script(job: SlurmJob) -> str:
    """The text of the batch script; the same job gives the same text."""
    head = [
        "#!/usr/bin/env bash",
        *_header(job),
        "#",
        "# Submit with sbatch. The configuration, the models, the data and trainer.output_dir lie where all nodes",
        "# can read them. `megappo plan` says beforehand whether the run fits.",
        "set -euo pipefail",
        "",
        f"python=${{PYTHON:-{shlex.quote(job.python)}}}",
        f"config={shlex.quote(job.config)}",
        f"overrides=({shlex.join(job.overrides)})" if job.overrides else "overrides=()",
        "",
        *_sweep_lines(job),
    ]
    body = _BODY.replace("@LOGS@", job.logs).replace("@COMMAND@", job.command).lstrip("\n")
    return "\n".join(head).rstrip("\n") + "\n\n" + body


def write_script(job: SlurmJob, output: Path) -> None:
    """Write the script, executable.

    Raises:
        UserError: it cannot be written.
    """
    try:
        output.write_text(script(job), encoding="utf-8")
        os.chmod(output, 0o755)
    except OSError as err:
        raise UserError(f"{output}: cannot be written ({err.strerror}); choose another file") from None
