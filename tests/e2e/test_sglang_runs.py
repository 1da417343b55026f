"""Whole PPO runs whose rollouts come from servers: the embedded engine's numbers, deaths survived, a clear end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.errors import Interrupted
from megappo.rollout.recorded import read_rollouts
from megappo.trainer.ppo import run_ppo

STUB = str(Path(__file__).parents[1] / "sglang_stub.py")
# Sums differ in the last bits where the trainer's batches do not, so that they must be the same to the last digits.
CLOSE = {"rel": 2e-3, "abs": 2e-5}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case(tmp_path_factory.mktemp("sglang"), layers=2)


def go(yaml_file: Path, out: str, changes: dict) -> tuple[int, str]:
    """Run it here; the exit code and what was said."""
    folder = yaml_file.parent
    places = {"trainer__output_dir": str(folder / out), "data__val_files": [str(folder / "val.jsonl")]}
    places["rollout__record_dir"] = str(folder / out / "rollouts")
    places |= {"trainer__val_before_train": True, "trainer__test_freq": 2}
    try:
        run_ppo(config_of(yaml_file, dist.get_world_size(), **{**places, **changes}))
    except Interrupted as stop:
        return stop.code, str(stop)
    return 0, ""


def servers(*options: str, **changes) -> dict:
    return {
        "rollout__engine": "sglang",
        "rollout__sglang__launch": [sys.executable, STUB, *options],
        "rollout__sglang__deterministic": True,
        "rollout__sglang__health_interval_s": 1.0,
    } | changes


@pytest.fixture(scope="module")
def embedded(case):
    assert on_ranks(1, go, case, "embedded", {})[0] == 0
    return read_metrics(case.parent / "embedded")


def same(found: list[dict], wanted: list[dict]) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            if not name.startswith(("timing_s/", "perf/", "sync/")):
                assert mine[name] == pytest.approx(value, **CLOSE), (mine["step"], name)


@pytest.mark.parametrize(("world", "sync"), [(1, "tensor"), (2, "disk")])
def test_a_run_with_servers_has_the_embedded_engine_s_numbers(case, embedded, world, sync):
    changes = servers(
        rollout__sglang__num_servers=2,
        rollout__sglang__tp=world,
        rollout__sglang__weight_sync=sync,
    )
    assert on_ranks(world, go, case, f"servers{world}", changes) == (0, "")
    lines = read_metrics(case.parent / f"servers{world}")
    same(lines, embedded)
    last = lines[-1]
    assert last["rollout/sglang/servers"] == 2 and last["rollout/sglang/dead_servers"] == 0
    assert last["sync/bytes"] > 0 and last["sync/seconds"] > 0 and last["sync/version"] == 3
    assert last["rollout_corr/logprob_abs_diff_mean"] < 1e-4
    logs = sorted((case.parent / f"servers{world}" / "sglang").glob("server_*.log"))
    assert len(logs) == 2 and "stub is ready" in logs[0].read_text()


def test_a_server_that_dies_is_restarted_with_the_current_weights(case, embedded, tmp_path):
    changes = servers("--die-once", f"{tmp_path / 'died'}:20", rollout__sglang__weight_sync="distributed")
    assert on_ranks(1, go, case, "died", changes) == (0, "")
    lines = read_metrics(case.parent / "died")
    same(lines, embedded)
    assert sum(line.get("rollout/sglang/restarts", 0) for line in lines) == 1
    assert sum(line.get("rollout/sglang/resent", 0) for line in lines) >= 1


def test_a_run_without_servers_is_saved_and_continues_as_if_nothing_had_happened(case, embedded, tmp_path):
    changes = servers("--die-once", f"{tmp_path / 'died'}:20")
    changes["rollout__sglang__restarts"] = 0
    code, text = on_ranks(1, go, case, "lost", changes)
    kept = case.parent / "lost/checkpoints"
    assert code == 4 and "no SGLang server is left" in text and str(kept) in text and "\n" not in text
    assert "exit code 9" in text and len(list(kept.iterdir())) >= 1
    assert on_ranks(1, go, case, "lost", changes) == (0, "")
    same(read_metrics(case.parent / "lost")[-2:], embedded[-2:])


# --- one batch ahead -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_ahead_has_the_same_prompts_and_weights_one_update_old(case, embedded, world):
    out = f"ahead{world}"
    assert on_ranks(world, go, case, out, servers(trainer__rollout_lag=1)) == (0, "")
    lines = read_metrics(case.parent / out)
    assert [line["rollout/weight_lag"] for line in lines if line["step"]] == [0, 1, 1]
    assert [line["rollout_corr/ess"] < 1 for line in lines if line["step"]] == [True] * 3
    for iteration, version in enumerate([0, 0, 1]):
        mine = read_rollouts(case.parent / out / "rollouts", iteration)
        theirs = read_rollouts(case.parent / "embedded/rollouts", iteration)
        assert {k: s.prompt_ids for k, s in mine.items()} == {k: s.prompt_ids for k, s in theirs.items()}
        assert {s.weight_version for s in mine.values()} == {version}
    first = read_rollouts(case.parent / "embedded/rollouts", 0)
    second = read_rollouts(case.parent / out / "rollouts", 1)
    assert [s.response_ids for s in read_rollouts(case.parent / out / "rollouts", 0).values()] == [
        s.response_ids for s in first.values()
    ]
    assert len(second) == len(first)
    # The evaluation after iteration 2 and the last one are with the newest weights.
    same_names = [name for name in lines[-1] if name.startswith("val/")]
    assert same_names and next(line for line in lines if line["step"] == 2)["sync/version"] == 1


def test_a_run_with_a_batch_ahead_is_resumed_with_the_prompts_that_were_under_way(case, embedded):
    changes = servers(trainer__rollout_lag=1, trainer__save_freq=2)
    assert on_ranks(1, go, case, "again", changes | {"trainer__total_iterations": 2}) == (0, "")
    assert on_ranks(1, go, case, "again", changes) == (0, "")
    line = read_metrics(case.parent / "again")[-1]
    assert line["step"] == 3 and line["rollout/weight_lag"] == 0  # generated anew, by the newest weights
    mine = read_rollouts(case.parent / "again/rollouts", 2)
    theirs = read_rollouts(case.parent / "embedded/rollouts", 2)
    assert {k: s.prompt_ids for k, s in mine.items()} == {k: s.prompt_ids for k, s in theirs.items()}


# --- processes -------------------------------------------------------------------------------------------


def interrupted_pids(yaml_file: Path, out: str, changes: dict) -> list[int]:
    go(yaml_file, out, changes)
    return children()


def children() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid() and b"sglang_stub" in command:
            found.append(int(folder.name))
    return found


def test_no_server_outlives_its_run(case):
    assert on_ranks(1, interrupted_pids, case, "ended", servers(trainer__total_iterations=1)) == []


def test_a_server_that_cannot_start_is_one_line_with_the_end_of_its_log(case):
    changes = servers("--no-such-option")
    with pytest.raises(AssertionError, match=r"exit code 2.*unrecognized arguments: --no-such-option"):
        on_ranks(1, go, case, "broken", changes)
