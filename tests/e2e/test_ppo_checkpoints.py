"""Checkpoints that survive whatever happens to the process or to the files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ppo_case import clean_environment, config_of, gone, read_metrics, write_case
from warm_ranks import on_ranks

from megappo.checkpoint import store as store_module
from megappo.checkpoint.store import CheckpointStore
from megappo.errors import UserError
from megappo.trainer.ppo import run_ppo


def save(store: CheckpointStore, iteration: int) -> Path:
    folder = store.begin(iteration)
    (folder / "actor").mkdir()
    (folder / "actor/weights").write_bytes(bytes(100 + iteration))
    (folder / "state.json").write_text(json.dumps({"iteration": iteration}))
    return store.commit(iteration)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


# --- the folder ------------------------------------------------------------------------------------------


def test_the_newest_checkpoints_are_kept(store):
    assert store.latest() is None and store.iterations() == []
    for iteration in (1, 2, 10, 11):
        assert save(store, iteration) == store.latest()
    assert names(store.root) == ["iter_000010", "iter_000011", "latest"]
    assert (store.root / "latest").read_text() == "iter_000011\n"


def test_iterations_beyond_six_digits_are_still_ordered(store):
    for iteration in (999_999, 1_000_000):
        save(store, iteration)
    assert store.iterations() == [999_999, 1_000_000] and store.latest() == store.folder(1_000_000)


def test_foreign_names_are_no_checkpoints(store):
    save(store, 3)
    (store.root / "iter_best").mkdir()
    (store.root / "iter_000009.bak").mkdir()
    (store.root / "iter_000008").write_text("a file")
    assert store.iterations() == [3]


def test_leftovers_of_a_killed_save_are_removed_by_the_next_one(store):
    save(store, 1)
    (store.begin(2) / "half").write_text("x")
    assert store.latest() == store.folder(1)
    save(store, 3)
    assert names(store.root) == ["iter_000001", "iter_000003", "latest"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "manifest_gone"])
def test_damage_is_told_with_the_file_and_the_previous_checkpoint(store, damage):
    save(store, 4)
    newest = save(store, 7)
    file = newest / ("manifest.json" if damage.startswith("manifest") else "actor/weights")
    if damage in ("remove", "manifest_gone"):
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError) as err:
        store.latest()
    what = {"truncate": "actor/weights has 97 bytes instead of 107", "remove": "actor/weights is missing"}
    assert what.get(damage, "manifest.json is missing or unreadable") in str(err.value)
    assert f"checkpoint {newest} is damaged" in str(err.value)
    assert str(err.value).endswith("delete it to continue from iteration 4")
    shutil.rmtree(newest)  # what the message says
    assert store.latest() == store.folder(4)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize("text", ["[]", "null", "x", '{"iteration": "7"}', '{"iteration": 6}'])
def test_a_json_file_of_the_right_size_with_other_contents_is_damage(store, name, text):
    save(store, 4)
    newest = save(store, 7)
    (newest / name).write_text(text)
    manifest = json.loads((newest / "manifest.json").read_text()) if name == "state.json" else None
    if manifest:  # the size alone tells nothing
        manifest["files"][name] = len(text)
        (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=rf"is damaged: {name} is .*unreadable.*; delete it to continue from iteration 4"
    ):
        store.latest()


def test_a_sole_damaged_checkpoint_sends_back_to_the_start(store):
    (save(store, 4) / "state.json").unlink()
    with pytest.raises(UserError, match="continue from the start"):
        store.latest()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("after", range(1, 9))
def test_a_kill_at_any_step_of_a_save_leaves_a_whole_checkpoint(store, monkeypatch, after, again):
    """Every rename and delete is a moment to die; `again` saves an iteration that exists already."""
    for iteration in (1, 2):
        save(store, iteration)
    calls = 0

    def dying(real):
        def step(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == after:
                raise Killed
            return real(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "replace", dying(os.replace))
        patch.setattr(store_module.shutil, "rmtree", dying(shutil.rmtree))
        with contextlib.suppress(Killed):
            save(store, 2 if again else 3)
    left = CheckpointStore(store.root, keep=2)
    assert left.latest() in [left.folder(i) for i in (1, 2, 3)]
    assert json.loads((left.latest() / "state.json").read_text())["iteration"] == left.iterations()[-1]
    save(left, 4)
    assert left.latest() == left.folder(4) and not [name for name in names(left.root) if "partial" in name]
    assert len(left.iterations()) == 2


def test_a_new_run_sets_earlier_checkpoints_aside(store, tmp_path):
    assert store.set_aside() is None
    for expected in ("checkpoints.1", "checkpoints.2"):
        save(store, 5)
        assert store.set_aside() == tmp_path / expected
        assert names(tmp_path / expected) == ["iter_000005", "latest"] and store.latest() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_told(store):
    store.root.parent.chmod(0o500)
    with pytest.raises(UserError, match=r"cannot write .*check trainer\.output_dir"):
        store.begin(1)


def test_a_file_in_the_way_is_told(store):
    store.root.write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot write .*check trainer\.output_dir"):
        store.begin(1)


# --- a real run ------------------------------------------------------------------------------------------

DIES_WHILE_SAVING = """
import os, signal, sys
from megappo.trainer import resume

real = resume.save_engine
def save_engine(engine, folder, **options):
    pending = real(engine, folder, **options)
    if folder.parent.name.startswith("iter_000002") and folder.name == "actor":
        print("saving", os.getpid(), flush=True)
        signal.pause()
    return pending
resume.save_engine = save_engine

from megappo_cli.main import main
main()
"""


def resume_here(yaml_file) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        run_ppo(config_of(yaml_file, trainer__save_freq=1, trainer__total_iterations=2))
    return text.getvalue()


def full_disk(yaml_file) -> str:
    """The error of a run whose second save may write no more than a few kilobytes a file."""
    import resource

    from megappo.trainer import ppo

    limits, real = resource.getrlimit(resource.RLIMIT_FSIZE), ppo.save_run

    def save_run(run, **kwargs):
        if run.iteration == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        real(run, **kwargs)

    ppo.save_run = save_run
    try:
        run_ppo(config_of(yaml_file, trainer__save_freq=1))
    except UserError as err:
        return str(err)
    finally:
        ppo.save_run = real
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def test_a_disk_that_is_full_while_saving_is_told_and_the_checkpoint_before_stays(tmp_path):
    yaml_file = write_case(tmp_path, layers=2)
    message = on_ranks(1, full_disk, yaml_file)
    assert message.startswith(f"cannot write {tmp_path / 'out/checkpoints/iter_000002.partial'}")
    assert "is the disk full?" in message and message.count("\n") == 0
    assert CheckpointStore(tmp_path / "out/checkpoints").latest().name == "iter_000001"
    assert "resumed after iteration 1" in on_ranks(1, resume_here, yaml_file)


def test_a_run_killed_while_it_saves_continues_from_the_checkpoint_before(tmp_path):
    yaml_file = write_case(tmp_path, layers=2)
    command = [sys.executable, "-c", DIES_WHILE_SAVING, "train", str(yaml_file)]
    command += ["trainer.save_freq=1", "trainer.total_iterations=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())
    try:
        word, pid = process.stdout.readline().split()
        assert (word, int(pid)) == ("saving", process.pid)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    for child in children:  # the reward's process ends with it
        gone(int(child))
    folder = tmp_path / "out/checkpoints"
    assert names(folder) == ["iter_000001", "iter_000002.partial", "latest"]
    text = on_ranks(1, resume_here, yaml_file)
    assert "resumed after iteration 1" in text
    assert names(folder) == ["iter_000001", "iter_000002", "latest"]
    assert [line["step"] for line in read_metrics(tmp_path / "out")] == [1, 2]
