"""`megappo launch slurm`: the script it writes, run for real with stand-ins for `srun` and `scontrol`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ppo_case import clean_environment, read_metrics, write_case

from megappo.errors import UserError
from megappo.observe.failures import run_app
from megappo_cli.main import app
from megappo_cli.slurm import SlurmJob, parse_sweep, script, sweep_overrides

ROOT = Path(__file__).parents[2]
SHELLCHECK = shutil.which("shellcheck") or str(Path(sys.executable).parent / "shellcheck")

# Starts every task here, sends on SIGUSR1 and SIGTERM as srun does, and exits with the highest code.
SRUN = """
#!@PYTHON@
import os, signal, subprocess, sys
words = sys.argv[1:]
options = {}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
nodes, per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = []
def send_on(number, frame):
    for task in tasks:
        task.send_signal(number)
signal.signal(signal.SIGUSR1, send_on)
signal.signal(signal.SIGTERM, send_on)
for rank in range(nodes * per_node):
    log = open(options["--output"].replace("%t", str(rank)), "a")
    names = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % per_node, "SLURM_NTASKS": nodes * per_node}
    environment = os.environ | {name: str(value) for name, value in names.items()}
    tasks.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """
#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '127.0.0.1\\nother\\n'; else echo "$@" >>"$SCONTROL_LOG"; fi
"""
# In place of Python: tells what it was given, and waits for a signal if it is asked to.
STAND_IN = """
#!@PYTHON@
import json, os, signal, sys
def note(number, frame):
    sys.exit(128 + number)
ignored = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGUSR1, signal.SIGTERM)]
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGTERM, note)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
with open(os.environ["TOLD"], "a") as file:
    file.write(json.dumps({"argv": sys.argv[1:], "ignored": ignored} | {n: os.environ[n] for n in names}) + "\\n")
if os.environ.get("ENDS") == "with an error":
    print("error: no such model", file=sys.stderr)
    sys.exit(2)
if os.environ.get("ENDS") == "when told":
    with open(os.environ["READY"], "w"):  # a pipe: the test waits at its other end
        pass
    signal.pause()
"""


class Cluster:
    """A folder with stand-ins on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("stand-in", STAND_IN)):
            (folder / name).write_text(textwrap.dedent(text).lstrip().replace("@PYTHON@", sys.executable))
            (folder / name).chmod(0o755)
        self.told = folder / "told"
        os.mkfifo(folder / "ready")

    def start(self, job: Path, *, nodes: int, per_node: int, **environment: str) -> subprocess.Popen:
        names = {
            "PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}",
            "SCONTROL_LOG": str(self.folder / "scontrol.log"),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_NNODES": str(nodes),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "TOLD": str(self.told),
            "READY": str(self.folder / "ready"),
        }
        return subprocess.Popen(
            ["bash", str(job)],
            cwd=self.folder,
            env=clean_environment(**names | environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def requeued(self) -> list[str]:
        log = self.folder / "scontrol.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    return Cluster(folder)


def written(folder: Path, **options) -> Path:
    file = folder / "job.sbatch"
    file.write_text(script(SlurmJob("train", "my exp.yaml", **options)))
    return file


# --- the text ------------------------------------------------------------------------------------------


def test_the_template_is_what_the_command_writes():
    assert (ROOT / "launch" / "slurm.sbatch").read_text() == script(SlurmJob("train", "exp.yaml", nodes=2))


@pytest.mark.skipif(not os.access(SHELLCHECK, os.X_OK), reason="needs shellcheck")
def test_scripts_pass_shellcheck(tmp_path):
    sweep = (("actor.optim.lr=1e-6", "x=$y"), ("a='b c'",))
    job = written(tmp_path, overrides=("data.train_files=[a b.jsonl]",), sweep=sweep, partition="p", account="a")
    out = subprocess.run([SHELLCHECK, str(job), str(ROOT / "launch" / "slurm.sbatch")], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout


def test_sweeps_are_every_combination_with_folders_of_their_own():
    sweep = parse_sweep(["actor.optim.lr=1e-6, 2e-6", "data.train_files=[a,b],[c]"])
    assert sweep == tuple(
        (f"actor.optim.lr={lr}", f"data.train_files={files}") for lr in ("1e-6", "2e-6") for files in ("[a,b]", "[c]")
    )
    folders = {sweep_overrides(one, "/out", "run")[-2] for one in sweep}
    assert len(folders) == 4 and "trainer.output_dir=/out/lr=1e-6_train_files=_a_b_" in folders


@pytest.mark.parametrize("option", ["lr", "=1", "lr=", "lr=1,,2"])
def test_wrong_sweeps_are_refused(option):
    with pytest.raises(UserError, match="--array"):
        parse_sweep([option])


@pytest.mark.parametrize("options", [{"time": "soon"}, {"partition": "a b"}, {"name": "$(rm)"}])
def test_wrong_options_are_refused(options):
    with pytest.raises(UserError, match="not a SLURM"):
        SlurmJob("train", "exp.yaml", **options)


# --- the script at work --------------------------------------------------------------------------------


def test_ranks_get_what_torch_wants(cluster, tmp_path):
    job = written(tmp_path, overrides=("a.b=1 2",))
    process = cluster.start(job, nodes=2, per_node=2, PYTHON=str(cluster.folder / "stand-in"))
    process.communicate(timeout=60)
    assert process.returncode == 0 and not cluster.requeued()
    told = sorted((json.loads(line) for line in cluster.told.read_text().splitlines()), key=lambda t: t["RANK"])
    assert [(t["RANK"], t["LOCAL_RANK"]) for t in told] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    for rank in told:
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("127.0.0.1", "24711")
        assert rank["ignored"] == [True, True]  # so that reward workers, which SLURM signals too, live on
        assert rank["argv"] == ["-m", "megappo_cli", "train", "my exp.yaml", "a.b=1 2"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_time_limit_requeues_and_a_cancelled_job_stays_so(cluster, tmp_path, number):
    stand_in = str(cluster.folder / "stand-in")
    process = cluster.start(written(tmp_path), nodes=1, per_node=1, PYTHON=stand_in, ENDS="when told")
    with open(cluster.folder / "ready"):
        pass
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    if number == signal.SIGUSR1:
        assert process.returncode == 0 and cluster.requeued() == ["requeue 4711"]
        assert "requeued" in out
    else:
        assert process.returncode == 143 and not cluster.requeued()


def test_an_error_ends_the_job_and_is_shown(cluster, tmp_path):
    stand_in = str(cluster.folder / "stand-in")
    process = cluster.start(written(tmp_path), nodes=1, per_node=2, PYTHON=stand_in, ENDS="with an error")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and not cluster.requeued()
    assert "exit code 2" in err and "rank1.log:error: no such model" in err


def test_a_job_of_an_array_takes_its_setting(cluster, tmp_path):
    job = written(tmp_path, sweep=(("lr=1",), ("lr=2",)))
    stand_in = str(cluster.folder / "stand-in")
    for task, code in (("1", 0), ("7", 2)):
        process = cluster.start(job, nodes=1, per_node=1, PYTHON=stand_in, SLURM_ARRAY_TASK_ID=task)
        process.communicate(timeout=60)
        assert process.returncode == code
    (line,) = cluster.told.read_text().splitlines()
    assert json.loads(line)["argv"][-1] == "lr=2"


# The reward waits in the middle of the first iteration until the test has sent the signal.
REWARD = """
import os

def score(data_source, solution_str, ground_truth, extra_info, folder):
    if os.path.exists(f"{folder}/wait"):
        os.remove(f"{folder}/wait")
        open(f"{folder}/there", "w").close()
        open(f"{folder}/go_on").read()
    return len(solution_str)
"""


@pytest.mark.slow
def test_a_real_run_is_requeued_and_goes_on_exactly(cluster, tmp_path, capsys):
    case = tmp_path / "case"
    file = write_case(case, layers=2)
    (case / "reward.py").write_text(REWARD)
    for name in ("there", "go_on"):
        os.mkfifo(case / name)
    (case / "wait").touch()
    reward = {"type": "function", "path": str(case / "reward.py") + ":score", "kwargs": {"folder": str(case)}}
    words = [f"rewards=[{json.dumps(reward)}]", "trainer.save_freq=100", "trainer.total_iterations=2"]
    job = tmp_path / "job.sbatch"
    options = ["--gpus-per-node", "1", "--python", sys.executable, "-o", str(job)]
    assert run_app(app, ["launch", "slurm", str(file), *words, *options]) == 0, capsys.readouterr().err
    process = cluster.start(job, nodes=1, per_node=1, PYTHONPATH=str(ROOT))
    with open(case / "there"):
        pass
    process.send_signal(signal.SIGUSR1)
    with open(case / "go_on", "w"):
        pass
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and cluster.requeued() == ["requeue 4711"], err
    assert [line["step"] for line in read_metrics(case / "out")] == [1]
    process = cluster.start(job, nodes=1, per_node=1, PYTHONPATH=str(ROOT))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and len(cluster.requeued()) == 1, err
    interrupted = read_metrics(case / "out")
    assert [line["step"] for line in interrupted] == [1, 2]
    whole = ["train", str(file), *words, f"trainer.output_dir={tmp_path / 'whole'}"]
    subprocess.run([sys.executable, "-m", "megappo_cli", *whole], env=clean_environment(), cwd=ROOT, check=True)
    for mine, theirs in zip(interrupted, read_metrics(tmp_path / "whole"), strict=True):
        for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/score/mean"):
            assert mine[name] == theirs[name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.resume=never", "trainer.save_freq=1"], "trainer.resume is never"),
        ([], "trainer.save_freq is -1"),
        (["trainer.save_freq=1", "--array", "actor.optim.lrr=1,2"], "actor.optim.lrr"),
    ],
)
def test_what_could_not_go_on_is_refused(words, message, tmp_path, capsys):
    file = write_case(tmp_path)
    assert run_app(app, ["launch", "slurm", str(file), "--gpus-per-node", "1", *words]) == 2
    assert message in capsys.readouterr().err
