"""The reward processes: errors name the sample, nothing hangs, nothing is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megappo
from megappo.errors import UserError
from megappo.rewards.base import Outcome, RewardSample
from megappo.rewards.pool import PoolReward

ROOT = Path(megappo.__file__).parents[1]
USER_CODE = """
import os, re, signal, subprocess, sys, time

def fn(*, data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return float(solution_str == ground_truth) + bonus

def pid(**_):
    return os.getpid()

def torch_loaded(**_):
    return "torch" in sys.modules

def act(*, solution_str, extra_info, **_):
    kind = solution_str
    if kind == "loop":
        while True: pass
    if kind == "sleep":
        time.sleep(3600)
    if kind == "regex":  # holds the interpreter lock
        return float(bool(re.match("(a+)+$", "a" * 64 + "b")))
    if kind == "raise":
        raise KeyError("no such\\nkey")
    if kind == "exit":
        sys.exit(4)
    if kind == "os_exit":
        os._exit(3)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "close":
        os.closerange(3, 64)
        time.sleep(3600)
    if kind == "child_holds_pipe":
        child = os.fork()
        if child == 0:
            time.sleep(3600)
        with open(extra_info["pid_file"], "w") as file:
            file.write(str(child))
        os._exit(5)
    if kind == "print":
        print("to standard output"); os.write(1, b"raw\\n"); sys.stdin.read()
    if kind in ("nan", "inf"):
        return float(kind)
    if kind == "none":
        return None
    if kind == "dict":
        return {"score": 2.0, "acc": 1.0}
    if kind == "meet":  # returns once its partner is being scored as well
        Path = __import__("pathlib").Path
        (Path(extra_info["folder"]) / extra_info["me"]).touch()
        while not (Path(extra_info["folder"]) / extra_info["other"]).exists(): time.sleep(0.001)
    if kind == "pid":
        return os.getpid()
    if kind == "types":
        return float(isinstance(extra_info["when"], tuple) and extra_info["raw"] == b"\\x00")
    return 1.0
"""


def sample(response, sample_id=17, **changes):
    return RewardSample(sample_id, "sums", "1+1=", response, "2", **changes)


@pytest.fixture
def make(tmp_path):
    (tmp_path / "user_code.py").write_text(USER_CODE)
    made = []

    def build(function, timeout_s=60.0, workers=1, late_score=None, **kwargs):
        path = f"{tmp_path}/user_code.py:{function}"
        options = {"timeout_s": timeout_s, "workers": workers, "late_score": late_score}
        made.append(PoolReward(function, "function", path=path, kwargs=kwargs, **options))
        return made[-1]

    yield build
    for reward in made:
        reward.close()


def refused(reward, *samples) -> str:
    with pytest.raises(UserError) as caught:
        reward.score(samples)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def gone(pid) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ended(pid) -> bool:
    """Wait until a process that is not our child has ended (it may stay a zombie of a lazy init)."""
    for _ in range(10_000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        os.sched_yield()
    return False


def test_scores_and_extras_come_in_the_order_of_the_samples(make):
    assert make("fn", bonus=0.5).score([sample("2"), sample("3"), sample("2")]) == [1.5, 0.5, 1.5]
    assert make("act").outcomes([sample("dict"), sample("x")]) == [Outcome(2.0, {"acc": 1.0}), Outcome(1.0)]


def test_the_process_starts_with_the_first_sample_and_is_reused(make):
    reward = make("pid")
    assert reward.score([]) == [] and reward.pids == []
    first = reward.score([sample("a"), sample("b")])
    assert first == reward.pids * 2 and reward.score([sample("c")]) == reward.pids
    assert reward.pids != [os.getpid()]


def test_the_process_does_not_import_torch(make):
    import torch  # noqa: F401  the parent has it, as in training

    assert make("torch_loaded").score([sample("a")]) == [0.0]


def test_values_of_the_data_row_keep_their_types(make):
    assert make("act").score([sample("types", extra_info={"when": (1, 2), "raw": b"\0"})]) == [1.0]


def test_a_sample_larger_than_any_pipe_buffer_passes(make):
    assert make("act").score([sample("x" * 3_000_000)]) == [1.0]


def test_printing_and_reading_standard_input_do_not_disturb(make, capfd):
    assert make("act").score([sample("print"), sample("x")]) == [1.0, 1.0]
    captured = capfd.readouterr()
    assert "to standard output" in captured.err and "raw" in captured.err and captured.out == ""


@pytest.mark.parametrize("kind", ["loop", "regex"])
def test_a_sample_that_takes_too_long_is_named_and_its_process_killed(make, kind):
    reward = make("act")
    reward.score([sample("x")])
    (pid,) = reward.pids
    reward.timeout_s = 0.5  # only now: on a busy machine the first sample may take longer
    message = refused(reward, sample(kind, 17), sample("x", 18))
    assert "sample 17 (data_source 'sums', response '" + kind in message and "0.5 s" in message
    assert gone(pid) and reward.pids == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raise", "KeyError: 'no such\\nkey' ("),
        ("exit", "SystemExit: 4 ("),
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("none", "returned None, not a number"),
    ],
)
def test_an_exception_or_bad_value_names_the_sample_and_the_process_lives_on(make, kind, words):
    reward = make("act")
    message = refused(reward, sample("x", 1), sample(kind, 2), sample("x", 3))
    assert "reward 'act': sample 2 (data_source 'sums'" in message and words in message
    (pid,) = reward.pids
    assert reward.score([sample("x")]) == [1.0] and reward.pids == [pid]


def test_an_exception_names_the_users_file_and_line(make, tmp_path):
    line = 1 + USER_CODE.splitlines().index('        raise KeyError("no such\\nkey")')
    assert f"({tmp_path}/user_code.py:{line})" in refused(make("act"), sample("raise"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("os_exit", "died with exit code 3"),
        ("killed", "was killed by SIGKILL (out of memory?)"),
    ],
)
def test_a_process_that_dies_is_reported_and_replaced(make, kind, words):
    reward = make("act")
    reward.start()
    message = refused(reward, sample(kind))
    assert "sample 17" in message and words in message
    assert reward.score([sample("x")]) == [1.0]


def test_a_child_of_user_code_neither_hides_the_death_nor_survives_it(make, tmp_path):
    reward = make("act", timeout_s=3.0)
    reward.start()
    info = {"pid_file": str(tmp_path / "pid")}
    assert "died with exit code 5" in refused(reward, sample("child_holds_pipe", extra_info=info))
    assert ended(int((tmp_path / "pid").read_text()))


def test_a_process_that_closes_its_pipes_is_reported_and_killed(make, monkeypatch):
    monkeypatch.setattr("megappo.rewards.worker.CLOSE_TIMEOUT_S", 0.2)
    reward = make("act")
    reward.start()
    (pid,) = reward.pids
    assert "closed its connection" in refused(reward, sample("close"))
    assert gone(pid)


def test_samples_are_spread_over_the_processes(make, tmp_path):
    reward = make("act", workers=2)
    a = {"folder": str(tmp_path), "me": "a", "other": "b"}
    b = {"folder": str(tmp_path), "me": "b", "other": "a"}
    assert reward.score([sample("meet", extra_info=a), sample("meet", extra_info=b)]) == [1.0, 1.0]
    assert len(set(reward.pids)) == 2


def test_no_more_processes_start_than_there_are_samples_unless_asked_to(make):
    reward = make("pid", workers=3)
    reward.score([sample("a")])
    assert len(reward.pids) == 1
    reward.start()
    assert len(reward.pids) == 3


def test_trouble_costs_only_the_sample_that_caused_it(make):
    reward = make("act", workers=2)
    reward.start()
    reward.timeout_s = 3.0
    kinds = ["x", "sleep", "dict", "os_exit", "nan", "x", "killed", "raise", "x"]
    found = reward.outcomes([sample(kind, i) for i, kind in enumerate(kinds)])
    assert [outcome.score for outcome in found] == [1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert [i for i, outcome in enumerate(found) if outcome.error] == [1, 3, 4, 6, 7]
    assert [i for i, outcome in enumerate(found) if outcome.timed_out] == [1]
    words = {1: "not scored after 3 s", 3: "exit code 3", 4: "returned nan", 6: "SIGKILL", 7: "KeyError"}
    for i, text in words.items():
        assert found[i].error.startswith(f"reward 'act': sample {i} ") and text in found[i].error
    assert reward.score([sample("x")] * 2) == [1.0, 1.0]


def test_a_late_sample_may_have_a_score_instead_of_an_error(make):
    reward = make("act", late_score=-1.0)
    reward.start()
    reward.timeout_s = 0.5
    assert reward.outcomes([sample("loop")], fail_fast=True) == [Outcome(-1.0, timed_out=True)]


def test_a_fatal_sample_ends_the_work_of_the_others(make):
    reward = make("act", workers=2)
    reward.start()
    pids = reward.pids
    message = refused(reward, sample("loop", 1), sample("raise", 2))
    assert "sample 2" in message and sum(map(gone, pids)) == 1
    assert reward.score([sample("x")] * 2) == [1.0, 1.0]


def test_a_process_that_ended_between_two_calls_costs_no_sample(make):
    reward = make("pid")
    (pid,) = reward.score([sample("a")])
    os.kill(int(pid), signal.SIGKILL)
    os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)  # with all its threads
    assert reward.score([sample("a")]) != [pid]


def test_a_function_that_cannot_be_loaded_is_reported_by_start(tmp_path):
    (tmp_path / "bad.py").write_text("import no_such_module_xyz\n")
    reward = PoolReward("bad", "function", path=f"{tmp_path}/bad.py:fn")
    with pytest.raises(UserError, match=r"reward 'bad': .*No module named 'no_such_module_xyz'"):
        reward.start()
    assert reward.pids == []


def test_a_module_that_ends_the_process_while_loading_is_reported(tmp_path):
    (tmp_path / "bad.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(UserError, match="died with exit code 9 while loading"):
        PoolReward("bad", "function", path=f"{tmp_path}/bad.py:fn").start()


def test_a_module_that_never_finishes_loading_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("megappo.rewards.pool.STARTUP_TIMEOUT_S", 1.0)
    (tmp_path / "bad.py").write_text("while True: pass\n")
    with pytest.raises(UserError, match="not loaded after 1 s"):
        PoolReward("bad", "function", path=f"{tmp_path}/bad.py:fn").start()


def test_close_ends_the_process_and_may_be_repeated(make):
    reward = make("pid")
    (pid,) = reward.score([sample("a")])
    reward.close()
    reward.close()
    assert gone(int(pid)) and reward.pids == []
    assert reward.score([sample("a")]) != [pid]


def test_dropping_the_object_ends_the_process(tmp_path):
    (tmp_path / "user_code.py").write_text(USER_CODE)
    reward = PoolReward("pid", "function", path=f"{tmp_path}/user_code.py:pid")
    (pid,) = reward.score([sample("a")])
    del reward
    assert gone(int(pid))


def test_ctrl_c_in_the_parent_ends_the_process_rather_than_mixing_up_replies(make, monkeypatch):
    reward = make("act")
    reward.start()
    (pid,) = reward.pids

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("megappo.rewards.pool.wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reward.score([sample("sleep")])
    assert gone(pid)
    assert reward.score([sample("x")]) == [1.0]


PARENT = """
import os, signal, sys
from megappo.rewards.base import Outcome, RewardSample
from megappo.rewards.pool import PoolReward
reward = PoolReward("r", "function", path=sys.argv[1] + ":act", timeout_s=60)
reward.score([RewardSample(0, "d", "", "x", "2")])
"""


def run_parent(tmp_path, code, **options):
    """Run a parent process. Its pipes close only when all its descendants are gone: returning proves that."""
    (tmp_path / "user_code.py").write_text(USER_CODE)
    command = [sys.executable, "-c", PARENT + code, f"{tmp_path}/user_code.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, **options)


def test_the_end_of_the_parent_ends_the_process(tmp_path):
    assert run_parent(tmp_path, "").returncode == 0


@pytest.mark.parametrize("kind", ["idle", "loop"])
def test_a_killed_parent_leaves_no_process_behind(tmp_path, kind):
    code = f"""
pid = os.getpid()
if {kind == "loop"}:
    import megappo.rewards.pool as pool
    pool.wait_for = lambda workers: os.kill(pid, signal.SIGKILL)  # the request has been written by then
    reward.score([RewardSample(0, "d", "", "loop", "2")])
os.kill(pid, signal.SIGKILL)
"""
    assert run_parent(tmp_path, code).returncode == -signal.SIGKILL


def test_sigint_to_the_process_group_and_to_the_process_does_not_reach_user_code(tmp_path):
    code = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
(pid,) = reward.pids
os.killpg(os.getpgrp(), signal.SIGINT)
for request in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    os.kill(pid, request)  # as SLURM does with every process of a step
print(reward.score([RewardSample(0, "d", "", "x", "2")]), reward.pids == [pid])
"""
    done = run_parent(tmp_path, code, start_new_session=True)
    assert done.stdout == "[1.0] True\n" and done.stderr == ""


def test_a_forked_child_of_the_parent_does_not_end_the_process(tmp_path):
    code = """
(pid,) = reward.pids
if os.fork() == 0:
    sys.exit(0)  # runs the exit handlers of the child
os.wait()
print(reward.score([RewardSample(0, "d", "", "x", "2")]), reward.pids == [pid])
"""
    assert run_parent(tmp_path, code).stdout == "[1.0] True\n"


def test_a_module_beside_the_users_command_does_not_replace_the_standard_library(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "user_code.py").write_text(USER_CODE)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + PARENT
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, f"{tmp_path}/user_code.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
