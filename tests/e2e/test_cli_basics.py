"""The command line around training: errors, local ranks, doctor, model folders, launch scripts."""

import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from checkpoints_tools.hf_headers import describe, read_tensors
from megappo.errors import Interrupted, UserError
from megappo.observe.failures import run_app
from megappo_cli import doctor

ROOT = Path(__file__).parents[2]
TIMEOUT = 60


def clean_environment(**changes):
    """The environment without what a launcher (or the one that runs these tests) sets."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    keep = {k: v for k, v in os.environ.items() if k not in dropped and not k.endswith("_ERROR_FILE")}
    return keep | {"PYTHONPATH": str(ROOT)} | changes


def cli(*args, **environment):
    return subprocess.run(
        [sys.executable, "-m", "megappo_cli", *args],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=clean_environment(**environment),
    )


# --- errors and exit codes -----------------------------------------------------------------------------


def test_help_lists_the_commands_and_the_cli_imports_nothing_heavy():
    out = cli("--help")
    assert out.returncode == 0
    for command in ("train", "sft", "doctor", "config", "ckpt"):
        assert re.search(rf"^  {command} ", out.stdout, re.MULTILINE)
    heavy = "{'torch', 'numpy', 'transformers', 'megatron'}"
    code = f"import sys, megappo_cli.main; print({heavy} & set(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, env=clean_environment()
    )
    assert loaded.stdout == "set()\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "missing.yaml"], "missing.yaml"),
        (["sft", "missing.yaml"], "missing.yaml"),
        (["trian", "x.yaml"], "No such command 'trian'"),
        (["train", "x.yaml", "--ranks", "2"], "No such option"),
        (["train", "x.yaml", "--nproc", "0"], "nproc"),
        (["ckpt", "inspect", "/nonexistent/model"], "/nonexistent/model: no such file or folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, message):
    out = cli(*args)
    assert out.returncode == 2 and out.stdout == ""
    assert out.stderr.startswith("error: ") and message in out.stderr and out.stderr.count("\n") == 1


def test_nproc_inside_torchrun_is_refused():
    out = cli("train", "x.yaml", "--nproc", "2", RANK="0", LOCAL_RANK="0", WORLD_SIZE="4")
    assert out.returncode == 2 and "one of 4 ranks" in out.stderr and "drop --nproc" in out.stderr


def test_only_one_rank_of_a_node_tells_of_a_wrong_configuration():
    for rank, local, expected in ((0, 0, "error: "), (1, 1, None), (8, 0, "[rank 8] error: ")):
        out = cli("train", "missing.yaml", RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE="16")
        assert out.returncode == 2
        assert out.stderr.startswith(expected) if expected else out.stderr == ""


def run_command(work, capsys):
    """Exit code and stderr of a command that does `work`."""
    code = run_app(lambda argv, standalone_mode: work, [])
    return code, capsys.readouterr().err


def raising(error):
    def work():
        raise error

    return work


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "MEGAPPO_ERROR_FILE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_each_problem_is_a_line(alone, capsys):
    assert run_command(raising(UserError("a: bad\nb: worse\n")), capsys) == (
        2,
        "error: a: bad\nerror: b: worse\n",
    )


def test_stopping_on_request_is_not_an_error(alone, capsys):
    assert run_command(raising(KeyboardInterrupt()), capsys) == (130, "")
    assert run_command(raising(Interrupted("saved", 143)), capsys) == (143, "saved\n")
    alone.setenv("RANK", "1")
    assert run_command(raising(Interrupted("saved", 143)), capsys) == (143, "")


@pytest.mark.parametrize("error", [RuntimeError("boom"), EOFError("pipe"), BrokenPipeError("pipe")])
def test_unexpected_errors_keep_their_traceback(error, alone):
    with pytest.raises(type(error)):
        run_app(lambda argv, standalone_mode: raising(error), [])


def test_torchrun_is_told_the_cause(alone, tmp_path, capsys):
    alone.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    alone.setenv("RANK", "3")
    assert run_command(raising(UserError("bad data")), capsys) == (2, "[rank 3] error: bad data\n")
    note = json.loads((tmp_path / "error.json").read_text())
    assert note["message"]["message"] == "UserError: bad data"
    assert int(note["message"]["extraInfo"]["timestamp"]) > 0


# --- how a configuration reaches the trainer -----------------------------------------------------------


@pytest.fixture
def trainer(alone):
    """Stand-ins for the loader and the trainers; records what they were given."""
    seen = []

    def load_config(path, overrides, *, world_size, kind):
        seen.append(("load", str(path), overrides, world_size, kind))
        return "config"

    for kind in ("ppo", "sft"):
        run = types.SimpleNamespace(**{f"run_{kind}": lambda config, kind=kind: seen.append((kind, config))})
        alone.setitem(sys.modules, f"megappo.trainer.{kind}", run)
    alone.setitem(sys.modules, "megappo.config.load", types.SimpleNamespace(load_config=load_config))
    alone.delenv("WORLD_SIZE", raising=False)
    return seen


def test_train_checks_first_and_then_runs_in_this_process(trainer):
    from megappo_cli.main import app

    assert run_app(app, ["train", "c.yaml", "actor.optim.lr=1e-5", "--no-resume"]) == 0
    assert trainer == [
        ("load", "c.yaml", ["actor.optim.lr=1e-5", "trainer.resume=never"], 1, "train"),
        ("ppo", "config"),
    ]


def test_sft_runs_its_own_trainer_and_ranks_know_the_world(trainer, alone):
    from megappo_cli.main import app

    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        alone.setenv(name, value)
    assert run_app(app, ["sft", "c.yaml"]) == 0
    assert trainer == [("load", "c.yaml", [], 4, "sft"), ("sft", "config")]


def test_nproc_starts_local_ranks_with_the_same_arguments(trainer, alone):
    from megappo_cli import launcher
    from megappo_cli.main import app

    alone.setattr(launcher, "launch_local", lambda argv, nproc: trainer.append((argv, nproc)) or 7)
    assert run_app(app, ["train", "c.yaml", "a.b=1", "--nproc", "2", "--resume"]) == 7
    arguments = ["train", "c.yaml", "a.b=1", "trainer.resume=auto"]
    assert trainer == [("load", "c.yaml", arguments[2:], 2, "train"), (arguments, 2)]


# --- local ranks ---------------------------------------------------------------------------------------

# What the ranks of these tests do; `meet` returns when all ranks have come that far.
RANK_SCRIPT = """
import json, os, signal, subprocess, sys, time
from megappo.errors import UserError
from megappo.observe.failures import run_app

folder, what = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def write(name, text=""):
    with open(f"{folder}/{name}{rank}.part", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{name}{rank}.part", f"{folder}/{name}{rank}")

def meet():
    if rank == 0:
        for other in range(1, world):
            open(f"{folder}/fifo{other}").read()
        print("ready", flush=True)
    else:
        open(f"{folder}/fifo{rank}", "w").close()

def work():
    write("pid", str(os.getpid()))
    globals()[what]()

def environment():
    print(f"rank {rank} speaks")
    sys.stderr.write("noise " * 100_000)
    write("seen", json.dumps(dict(os.environ)))

def one_fails():
    meet()
    if rank == 1:
        print("about to fail")
        raise ValueError("boom")
    while True:
        signal.pause()

def loss_of_a_peer():
    # rank 1's death closes the pipe; rank 0 then fails of it
    if rank == 1:
        pipe = open(f"{folder}/fifo1", "w")
        raise UserError("data: bad row 7")
    open(f"{folder}/fifo1").read()
    raise ConnectionError("peer closed")

def all_fail_alike():
    meet()
    raise UserError("model: no such folder")

def killed():
    meet()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()

def stops_on_request():
    requests = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: requests.append(n))
    meet()
    while not requests:
        time.sleep(0.01)
    write("finished", " ".join(map(str, requests)))
    sys.exit(128 + requests[0])

def ignores_requests():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: write("asked"))
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    write("child", str(child.pid))
    meet()
    while True:
        signal.pause()

sys.exit(run_app(lambda argv, standalone_mode: work, []))
"""

LAUNCH = """
import sys
from megappo_cli.launcher import launch_local
script, folder, what, nproc = sys.argv[1:]
sys.exit(launch_local([folder, what], int(nproc), command=[sys.executable, script]))
"""


class Ranks:
    """A launcher in a process of its own, running RANK_SCRIPT."""

    def __init__(self, folder, what, nproc=2, **environment):
        self.folder = folder
        script = folder / "rank.py"
        script.write_text(RANK_SCRIPT)
        for rank in range(1, nproc):
            os.mkfifo(folder / f"fifo{rank}")
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(script), str(folder), what, str(nproc)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**environment),
        )

    def wait_ready(self):
        assert self.process.stdout.readline() == "ready\n"

    def end(self):
        """(exit code, stdout, stderr), bounded."""
        out, err = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, out, err

    def pids(self, name="pid"):
        return [int(path.read_text()) for path in sorted(self.folder.glob(f"{name}[0-9]"))]


def assert_gone(pids):
    assert pids
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        readable, _, _ = select.select([handle], [], [], TIMEOUT)
        os.close(handle)
        assert readable, f"process {pid} still runs"


def test_ranks_get_their_environment_and_only_rank_0_is_heard(tmp_path):
    ranks = Ranks(tmp_path, "environment", 3)
    code, out, _ = ranks.end()
    assert (code, out) == (0, "rank 0 speaks\n")
    seen = [json.loads((tmp_path / f"seen{r}").read_text()) for r in range(3)]
    assert [(s["RANK"], s["LOCAL_RANK"]) for s in seen] == [("0", "0"), ("1", "1"), ("2", "2")]
    common = {(s["WORLD_SIZE"], s["LOCAL_WORLD_SIZE"], s["MASTER_ADDR"], s["MASTER_PORT"]) for s in seen}
    assert len(common) == 1 and common.pop()[:3] == ("3", "3", "127.0.0.1")
    assert all(int(s["OMP_NUM_THREADS"]) >= 1 for s in seen)


def test_threads_that_the_user_chose_are_kept(tmp_path):
    assert Ranks(tmp_path, "environment", 1, OMP_NUM_THREADS="5").end()[0] == 0
    assert json.loads((tmp_path / "seen0").read_text())["OMP_NUM_THREADS"] == "5"


def test_a_failing_rank_is_shown_first_and_ends_the_others(tmp_path):
    ranks = Ranks(tmp_path, "one_fails", 3)
    code, _, err = ranks.end()
    lines = err.splitlines()
    assert code == 1
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert "[rank 1] ValueError: boom" in lines
    assert lines[-2:] == ["[rank 1] last output of rank 1:", "[rank 1] about to fail"]
    assert_gone(ranks.pids())


def test_the_cause_comes_before_what_it_caused(tmp_path):
    code, _, err = Ranks(tmp_path, "loss_of_a_peer").end()
    assert code == 2
    assert err.splitlines()[0] == "[rank 1] error: data: bad row 7"
    assert err.splitlines()[1:] in ([], ["[rank 0] then failed: ConnectionError: peer closed"])


def test_an_error_of_all_ranks_is_shown_once(tmp_path):
    code, _, err = Ranks(tmp_path, "all_fail_alike", 3).end()
    assert code == 2 and err.count("error: model: no such folder") == 1 and err.count("\n") == 1


def test_a_rank_killed_by_the_system_is_named(tmp_path):
    ranks = Ranks(tmp_path, "killed")
    code, _, err = ranks.end()
    assert code == 128 + signal.SIGKILL
    assert err == "[rank 1] error: rank 1 was killed by SIGKILL (most often: out of memory)\n"
    assert_gone(ranks.pids())


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGUSR1),
    ],
)
def test_a_request_to_stop_reaches_every_rank_once_and_waits_for_them(sent, received, tmp_path):
    ranks = Ranks(tmp_path, "stops_on_request")
    ranks.wait_ready()
    ranks.process.send_signal(sent)
    code, _, err = ranks.end()
    assert code == 128 + sent
    assert err == "stopping; once more to stop at once\n"
    assert [(tmp_path / f"finished{r}").read_text() for r in range(2)] == [str(int(received))] * 2


def test_ranks_that_were_asked_directly_are_waited_for_too(tmp_path):
    ranks = Ranks(tmp_path, "stops_on_request")
    ranks.wait_ready()
    for pid in reversed(ranks.pids()):  # the launcher knows nothing of it
        os.kill(pid, signal.SIGTERM)
    assert ranks.end() == (128 + signal.SIGTERM, "", "")
    assert (tmp_path / "finished0").exists() and (tmp_path / "finished1").exists()


def test_a_second_ctrl_c_leaves_nothing_behind(tmp_path):
    ranks = Ranks(tmp_path, "ignores_requests")
    ranks.wait_ready()
    ranks.process.send_signal(signal.SIGINT)
    assert ranks.process.stderr.readline() == "stopping; once more to stop at once\n"
    ranks.process.send_signal(signal.SIGINT)
    assert ranks.end()[0] == 130
    assert_gone(ranks.pids() + ranks.pids("child"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses a Linux feature")
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    ranks = Ranks(tmp_path, "killed", 1)  # rank 0 only: waits for ever
    ranks.wait_ready()
    ranks.process.kill()
    ranks.end()
    assert_gone(ranks.pids())


# --- doctor --------------------------------------------------------------------------------------------


def finding(report, name):
    return next(item for item in report.findings if item.name == name)


def test_doctor_reports_what_will_be_used_as_text_and_json(capsys):
    code = doctor.run_doctor(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["can_train"] else 1)
    names = [item["name"] for item in report["findings"]]
    for name in (
        "python",
        "torch",
        "CUDA devices",
        "megatron-core",
        "transformer-engine",
        "apex",
        "sglang",
        "ray",
    ):
        assert name in names
    assert report["uses"]["distributed backend"] in ("gloo", "nccl")
    text = doctor.render(doctor.examine())
    assert "training will use" in text and "layers" in text and "optimizer" in text


def fake_package(folder, distribution, module, version, code):
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(code)


def test_doctor_explains_transformer_engine_without_a_device(tmp_path, monkeypatch):
    fake_package(tmp_path, "transformer-engine", "transformer_engine", "2.20", "raise RuntimeError('no CUDA')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_cuda_devices", lambda torch: [])
    report = doctor.examine()
    item = finding(report, "transformer-engine")
    assert item.found == "2.20" and "breaks the import of megatron-core" in item.problem
    assert item.install.startswith("pip uninstall transformer-engine")
    assert not report.can_train and "torch" in report.uses["layers"]


def test_doctor_survives_packages_that_break_on_import(tmp_path, monkeypatch):
    fake_package(tmp_path, "transformer-engine", "transformer_engine", "2.20", "raise RuntimeError('no cudnn\\nmore')")
    fake_package(tmp_path, "apex", "apex", "0.1", "raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_cuda_devices", lambda torch: ["H200"])
    report = doctor.examine()
    assert "RuntimeError: no cudnn)" in finding(report, "transformer-engine").problem
    assert "OSError: undefined symbol" in finding(report, "apex").problem
    assert report.uses["optimizer"] == "torch AdamW" and report.uses["distributed backend"] == "nccl"
    assert not report.can_train


def test_doctor_wants_the_megatron_version_that_was_checked(monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda n, m: "0.15.0" if n == "megatron-core" else real(n, m))
    report = doctor.examine()
    item = finding(report, "megatron-core")
    assert "0.16.1 is needed" in item.problem and item.install == "pip install megatron-core==0.16.1"
    assert not report.can_train


def test_doctor_setup_and_backend_agree_on_what_is_needed():
    source = (ROOT / "setup.py").read_text()
    block = source[source.index("install_requires=[") : source.index("extras_require")]
    wanted = set(re.findall(r'"([a-z0-9-]+)', block))
    assert wanted == {*doctor.REQUIRED, "torch", "megatron-core"}
    assert f"megatron-core=={doctor.MEGATRON}" in block
    assert f'TESTED_MEGATRON = "{doctor.MEGATRON}"' in (ROOT / "megappo/parallel/backend.py").read_text()


# --- model folders -------------------------------------------------------------------------------------


def write_safetensors(path, tensors, cut=0):
    """Tensors {name: (dtype, shape, nbytes)} of zeros; `cut` bytes are missing at the end."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(header).encode()
    data = struct.pack("<Q", len(raw)) + raw + bytes(offset)
    path.write_bytes(data[: len(data) - cut])


def write_sharded(folder):
    write_safetensors(folder / "a.safetensors", {"b.weight": ("F32", [2, 3], 24)})
    write_safetensors(folder / "b.safetensors", {"a.weight": ("BF16", [4], 8), "c": ("I64", [], 8)})
    index = {"weight_map": {"b.weight": "a.safetensors", "a.weight": "b.safetensors", "c": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_inspect_lists_the_tensors_of_all_shards(tmp_path):
    write_sharded(tmp_path)
    assert describe(tmp_path).splitlines() == [
        "a.weight  BF16  [4]      8 B",
        "b.weight  F32   [2, 3]  24 B",
        "c         I64   []       8 B",
        "3 tensors, 11 elements, 40 bytes (40 B)",
    ]
    out = cli("ckpt", "inspect", str(tmp_path / "a.safetensors"))
    assert out.returncode == 0 and "1 tensors, 6 elements, 24 bytes" in out.stdout


def test_inspect_reads_what_safetensors_writes(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3, 5), "h": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in read_tensors(tmp_path)] == [
        ("h", "BF16", (2,), 4),
        ("w", "F32", (3, 5), 60),
    ]


def broken_folders():
    def truncated(folder):
        write_safetensors(folder / "model.safetensors", {"w": ("F32", [2], 8)}, cut=1)

    def cut_in_the_header(folder):
        write_safetensors(folder / "model.safetensors", {"w": ("F32", [2], 8)}, cut=20)

    def empty_file(folder):
        (folder / "model.safetensors").write_bytes(b"")

    def not_json(folder):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"\xff{}[")

    def header_is_a_list(folder):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")

    def wrong_size(folder):
        write_safetensors(folder / "model.safetensors", {"w": ("F32", [3], 8)})

    def negative_shape(folder):
        write_safetensors(folder / "model.safetensors", {"w": ("F32", [-1, -2], 8)})

    def no_weights(folder):
        (folder / "pytorch_model.bin").write_bytes(b"x")

    def missing_shard(folder):
        write_sharded(folder)
        (folder / "b.safetensors").unlink()

    def index_names_another_file(folder):
        write_sharded(folder)
        write_safetensors(folder / "b.safetensors", {"a.weight": ("BF16", [4], 8)})

    def index_leaves_the_folder(folder):
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x.safetensors"}}')

    def index_is_garbage(folder):
        (folder / "model.safetensors.index.json").write_text("[1, 2")

    def doubled_tensor(folder):
        for name in ("a", "b"):
            write_safetensors(folder / f"{name}.safetensors", {"w": ("F32", [2], 8)})

    return [value for value in locals().values() if callable(value)]


@pytest.mark.parametrize("breakage", broken_folders(), ids=lambda f: f.__name__)
def test_inspect_refuses_a_broken_folder_in_one_line(breakage, tmp_path):
    breakage(tmp_path)
    with pytest.raises(UserError) as caught:
        describe(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


# --- launch scripts ------------------------------------------------------------------------------------


def torchrun_sh(*args, **environment):
    return subprocess.run(
        ["bash", str(ROOT / "launch" / "torchrun.sh"), *args],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=clean_environment(PYTHON="py", **environment),
    )


def test_torchrun_script_takes_flags_and_environment():
    out = torchrun_sh(
        "--nnodes",
        "2",
        "--dry-run",
        "train",
        "a b.yaml",
        "x=1",
        NODE_RANK="1",
        MASTER_ADDR="n0",
        NPROC_PER_NODE="8",
    )
    assert out.stdout.split(" -m megappo_cli ") == [
        "py -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr n0 --master-port 29500",
        "train a\\ b.yaml x=1 \n",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no command"),
        (["--nnodes", "2", "train", "c"], "--master-addr is required"),
        (["--nnodes", "two", "train", "c"], "--nnodes must be a number"),
        (["--node-rank", "1", "train", "c"], "is not below"),
        (["--gpus", "1"], "unknown option --gpus"),
        (["--nnodes"], "--nnodes needs a value"),
        (["--max-restarts", "-1", "train", "c"], "--max-restarts must be a number"),
    ],
)
def test_torchrun_script_explains_mistakes(args, message):
    out = torchrun_sh(*args)
    assert out.returncode == 2 and message in out.stderr and out.stderr.startswith("error: ")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_installs_once_into_the_given_python(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "setup.py").write_text("")
    python = tmp_path / "python"
    python.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        echo "$@" >> {tmp_path}/calls
        """)
    )
    python.chmod(0o755)

    def make(target):
        out = subprocess.run(
            ["make", target, f"PYTHON={python}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert out.returncode == 0, out.stderr
        calls = (tmp_path / "calls").read_text().splitlines()
        (tmp_path / "calls").unlink()
        return calls

    assert make("test") == ["-c import torch", "-m pip install -q -e .[test]", "-m pytest -n 2 --dist loadfile"]
    again = make("test")
    assert again[0].startswith("-P -c") and again[-1].startswith("-m pytest") and "-m pip" not in " ".join(again)
