"""`launch/torchrun.sh`: restarts, logs and the check of the node; two agents on this machine as two nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ppo_case import clean_environment, read_metrics, write_case

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "torchrun.sh"


def start(*args: str, python: str = sys.executable, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(SCRIPT), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=clean_environment(PYTHON=python, **environment),
        process_group=0,
    )


@pytest.mark.parametrize(("fails", "code"), [(0, 0), (2, 0), (3, 7)])
def test_every_attempt_meets_on_a_port_of_its_own(tmp_path, fails, code):
    python = tmp_path / "python"
    log = tmp_path / "attempts"
    lines = [f'echo "$*" >>{log}', f"[ $(wc -l <{log}) -gt {fails} ] || exit 7"]
    python.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    python.chmod(0o755)
    options = ["--max-restarts", "2", "--master-port", "3000", "--no-check"]
    process = start(*options, "train", "a b", python=str(python))
    _, err = process.communicate(timeout=60)
    attempts = log.read_text().splitlines()
    assert process.returncode == code and len(attempts) == min(fails, 2) + 1
    assert all(f"--master-port {3000 + i} -m megappo_cli train a b" in line for i, line in enumerate(attempts))
    assert err.count("restart") == min(fails, 2)


def test_logs_are_kept_for_each_rank():
    out, _ = start("--dry-run", "--log-dir", "my logs", "train", "c").communicate(timeout=60)
    assert "--log-dir my\\ logs --redirects 3 --tee 0:3 -m megappo_cli train c" in out


@pytest.mark.parametrize("healthy", [True, False])
def test_a_node_that_cannot_train_is_found_first(tmp_path, healthy):
    python = tmp_path / "python"
    doctor = "exit 0" if healthy else "echo 'megatron-core: missing'; exit 1"
    python.write_text(f'#!/bin/sh\ncase "$*" in *doctor*) {doctor};; esac\necho "started: $*"\n')
    python.chmod(0o755)
    process = start("train", "c", python=str(python))
    out, err = process.communicate(timeout=60)
    assert ("started" in out) == healthy
    assert healthy or (process.returncode == 2 and "megatron-core: missing" in err and "cannot train" in err)
    out, _ = start("--no-check", "train", "c", python=str(python)).communicate(timeout=60)
    assert "started" in out


# The second rank dies once, without a word, in the middle of the second iteration.
REWARD = """
import os, signal

calls = 0

def score(data_source, solution_str, ground_truth, extra_info, folder):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls > 8 and not os.path.exists(f"{folder}/died"):
        open(f"{folder}/died", "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
    return len(solution_str)
"""


@pytest.mark.slow
def test_two_nodes_go_on_after_a_rank_was_killed(tmp_path):
    file = write_case(tmp_path, layers=2)
    (tmp_path / "reward.py").write_text(textwrap.dedent(REWARD))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    reward = {"type": "function", "path": f"{tmp_path}/reward.py:score", "kwargs": {"folder": str(tmp_path)}}
    words = [f"rewards=[{json.dumps(reward)}]", "trainer.save_freq=1", "trainer.distributed_timeout_s=30"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    options += ["--max-restarts", "1", "--no-check"]
    agents = [
        start(
            *options, "--node-rank", str(node), "--log-dir", str(tmp_path / f"logs{node}"), "train", str(file), *words
        )
        for node in range(2)
    ]
    try:
        said = [agent.communicate(timeout=150) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, 9)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert (tmp_path / "died").exists()
    assert [line["step"] for line in read_metrics(tmp_path / "out")] == [1, 2, 3]
    assert any("iteration 1" in text for out, err in said for text in (out, err)), said
    assert list((tmp_path / "logs1").rglob("stderr.log"))
