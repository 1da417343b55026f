"""Ctrl-C and failing ranks, seen from the terminal: `megappo train --nproc 2` as a user runs it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ppo_case import clean_environment, gone, read_metrics, write_case

from megappo.trainer.interrupt import resume_command

# Rank 0's reward waits in the middle of an iteration until the test has read that it is there, and lets it go on.
REWARD = """
import os

calls = 0

def score(data_source, solution_str, ground_truth, extra_info, folder, wait_at=0, raise_at=0):
    global calls
    calls += 1
    rank = os.environ["RANK"]
    with open(f"{folder}/pids", "a") as file:
        file.write(f"{os.getpid()} {os.getppid()} ")
    if rank == "0" and calls == wait_at:
        open(f"{folder}/there", "w").close()
        open(f"{folder}/go_on").read()
    if rank == "1" and calls == raise_at:
        raise ValueError("no such answer")
    return len(solution_str)
"""


class Terminal:
    """A command in a process group of its own, as a shell would start it."""

    def __init__(self, folder: Path, arguments: list[str]):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megappo_cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=clean_environment(),
            process_group=0,
        )
        self.said = ""

    def wait_until_in_the_reward(self) -> None:
        with open(self.folder / "there"):  # blocks until the reward opens the other end
            pass

    def control_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def read_until(self, text: str) -> None:
        while text not in self.said:
            line = self.process.stderr.readline()
            assert line, f"ended without saying {text!r}: {self.said}"
            self.said += line

    def end(self) -> int:
        _, err = self.process.communicate(timeout=60)
        self.said += err
        return self.process.returncode

    def check_nothing_runs(self) -> None:
        pids = set(map(int, (self.folder / "pids").read_text().split()))
        assert len(pids) >= 4  # two ranks and their rewards
        for pid in pids:
            gone(pid)


@pytest.fixture
def folder(tmp_path):
    write_case(tmp_path, layers=2)
    (tmp_path / "reward.py").write_text(REWARD)
    for name in ("there", "go_on"):
        os.mkfifo(tmp_path / name)
    return tmp_path


def arguments(folder: Path, **kwargs: int) -> list[str]:
    reward = {"folder": str(folder), **kwargs}
    return ["trainer.save_freq=10", "trainer.total_iterations=5", f"rewards.0.kwargs={reward}"]


@pytest.mark.timeout(200)
def test_control_c_finishes_the_iteration_saves_and_says_how_to_continue(folder):
    """Then the printed command continues, and a second Ctrl-C ends that at once. Rank 0 scores 6 answers a time."""
    first = Terminal(folder, ["train", "run.yaml", "--nproc", "2", *arguments(folder, wait_at=9)])
    first.wait_until_in_the_reward()  # of iteration 2
    first.control_c()
    first.read_until("stopping; once more to stop at once\n")
    with open(folder / "go_on", "w"):
        pass
    assert first.end() == 130
    told = re.search(
        r"interrupted after iteration 2; the newest checkpoint is (.*); to continue from it: (.*)\n", first.said
    )
    assert told and Path(told[1]) == folder / "out/checkpoints/iter_000002", first.said
    assert "Traceback" not in first.said
    assert [line["step"] for line in read_metrics(folder / "out")] == [1, 2]
    first.check_nothing_runs()

    program, *again = shlex.split(told[2])
    assert program == "megappo" and again[-2:] == ["--nproc", "2"]
    second = Terminal(folder, again)
    second.wait_until_in_the_reward()  # of iteration 4
    second.control_c()
    second.read_until("stopping; once more to stop at once\n")
    assert "resumed after iteration 2\n" in second.said
    second.control_c()
    assert second.end() == 130  # though the reward still waits
    assert "Traceback" not in second.said and "interrupted after" not in second.said
    second.check_nothing_runs()
    assert [p.name for p in (folder / "out/checkpoints").glob("iter_*")] == ["iter_000002"]
    assert [line["step"] for line in read_metrics(folder / "out")] == [1, 2, 3]


def test_a_rank_that_fails_ends_the_others_and_its_error_is_shown(folder):
    run = Terminal(folder, ["train", "run.yaml", "--nproc", "2", *arguments(folder, raise_at=8)])
    assert run.end() == 2
    lines = [line for line in run.said.splitlines() if "error: " in line]
    assert len(lines) == 1 and lines[0].startswith("[rank 1] error: reward 'score': sample "), run.said
    assert "ValueError: no such answer" in lines[0] and "Traceback" not in run.said
    run.check_nothing_runs()
    assert [line["step"] for line in read_metrics(folder / "out")] == [1]


@pytest.mark.parametrize(
    ("argv", "resume", "environment", "expected"),
    [
        (["train", "a b.yaml", "x=1"], "auto", {}, "megappo train 'a b.yaml' x=1"),
        (["train", "c.yaml", "trainer.resume=never"], "never", {}, "megappo train c.yaml trainer.resume=auto"),
        (["train", "c.yaml", "--no-resume"], "never", {}, "megappo train c.yaml trainer.resume=auto"),
        (["sft", "c.yaml"], "never", {}, "megappo sft c.yaml trainer.resume=auto"),
        (["train", "c.yaml"], "auto", {"MEGAPPO_ERROR_FILE": "e"}, "megappo train c.yaml --nproc 4"),
        (["train", "c.yaml"], "auto", {"TORCHELASTIC_RUN_ID": "1"}, "torchrun … -m megappo_cli train c.yaml"),
        (["-c"], "auto", {}, "start it again with trainer.resume=auto"),
    ],
)
def test_the_command_to_continue_is_the_one_that_was_given(monkeypatch, argv, resume, environment, expected):
    for name in ("MEGAPPO_ERROR_FILE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    assert resume_command(argv, resume) == expected
