"""Save and restore a whole run: roles, optimizers, schedules, RNG, data position, KL controller, rewards, guard.

Mini-batches and sampling seeds are pure functions of (seed, iteration), the data order of (seed, position), so two
numbers are all that has to be kept of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megappo import __version__
from megappo.checkpoint.distributed import PendingSave, load_engine, save_engine
from megappo.checkpoint.store import CheckpointStore, write_json
from megappo.engine.engine import ModelEngine
from megappo.errors import Interrupted, UserError
from megappo.parallel.reduce import any_rank, from_first_rank, gather_objects
from megappo.rollout.base import RolloutLost
from megappo.trainer.setup import PPORun

# What a resumed run may change without a word: how long to run, what to log and record.
_FREE_TO_CHANGE = ("trainer.", "sft.", "reward_model.", "guard.", "rollout.val.", "rollout.record_dir")
_TOLD = ("trainer.seed", "trainer.critic_warmup", "trainer.rollout_lag")


def trained(engines: dict[str, ModelEngine]) -> dict[str, ModelEngine]:
    """The roles that change. The reference never does: it is loaded from its own folder again, never re-anchored."""
    return {role: engine for role, engine in engines.items() if engine.trained}


@dataclass
class PendingCheckpoint:
    """A checkpoint whose shards are still being written. Nobody can see it before `finish`."""

    store: CheckpointStore
    iteration: int
    roles: list[PendingSave]

    def written(self) -> bool:
        """All ranks have written their parts. Collective."""
        return not any_rank(not all(role.written for role in self.roles))

    def finish(self) -> Path:
        """Wait until it is written, then make it visible. Collective."""
        for role in self.roles:
            role.finish()
        return self.store.commit(self.iteration)


def save_state(
    store: CheckpointStore, iteration: int, engines: dict[str, ModelEngine], extra: dict, *, background: bool = False
) -> PendingCheckpoint:
    """Begin one checkpoint of these roles plus `extra` (JSON). `background`: as of `save_engine`. Collective.

    Raises:
        UserError: the folder cannot be written, the disk is full (then also from `finish`).
    """
    folder = store.begin(iteration)
    pending = [save_engine(engine, folder / role, background=background) for role, engine in trained(engines).items()]
    _save_rng(folder)
    everyone = gather_objects({role: e.optimizer.state() for role, e in trained(engines).items() if e.member})
    if dist.get_rank() == 0:
        optimizers = {role: state for part in reversed(everyone) for role, state in part.items()}
        state = {"megappo": __version__, "iteration": iteration, "world": dist.get_world_size()}
        write_json(folder / "state.json", state | {"optimizers": optimizers} | extra)
    return PendingCheckpoint(store, iteration, pending)


def load_state(folder: Path | None, engines: dict[str, ModelEngine], *, clock: bool = True) -> dict | None:
    """Restore a checkpoint; returns its `state.json`, or None where `folder` is. Collective.

    Args:
        clock: False leaves the position in the learning-rate decay where it is.

    Raises:
        UserError: the checkpoint is damaged, or holds other roles than this run trains.
    """
    if folder is None:
        return None
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    roles = trained(engines)
    if not isinstance(state.get("optimizers"), dict) or not isinstance(state.get("world"), int):
        raise _unreadable(folder)
    if set(state["optimizers"]) != set(roles):
        raise UserError(
            f"{folder} holds {', '.join(state['optimizers'])}, this run trains {', '.join(roles)}: use another "
            "trainer.output_dir, or trainer.resume=never to start anew"
        )
    for role, engine in roles.items():
        load_engine(engine, folder / role)
        if engine.member and clock:
            engine.optimizer.load_state(state["optimizers"][role])
    _load_rng(folder, state["world"])
    return state


def store_of(run: PPORun) -> CheckpointStore:
    """The run's checkpoints."""
    return CheckpointStore(run.checkpoints, run.config.trainer.max_ckpt_to_keep)


def save_run(run: PPORun, *, wait: bool = True) -> None:
    """Checkpoint the run after `run.iteration` iterations; without `wait` it is completed by `settle`. Collective."""
    settle(run, wait=True)
    extra = {
        "weight_version": run.weight_version,
        "kl_controller": run.kl_controller.state_dict(),
        "data_position": run.data_position,
        "guard": run.guard.state_dict(),
        "reward": run.reward.state_dict(),
        "config": run.base.model_dump(mode="json"),
    }
    run.pending_save = save_state(store_of(run), run.iteration, run.engines, extra, background=not wait)
    if wait:
        settle(run, wait=True)


def settle(run: PPORun, *, wait: bool) -> None:
    """Complete the checkpoint under way, if there is one, once it is written (or now, with `wait`). Collective."""
    if run.pending_save is not None and (wait or run.pending_save.written()):
        run.pending_save.finish()
        run.pending_save = None


@contextmanager
def saving_when_lost(run: PPORun) -> Iterator[None]:
    """Around an iteration: when nobody is left to generate, the run is saved as it was before it. Collective.

    Nothing but the place in the data, the rewards' statistics and the group numbers has changed by then.

    Raises:
        Interrupted: with exit code 4, names the checkpoint.
    """
    position, statistics = run.data_position, run.reward.state_dict()
    try:
        yield
    except RolloutLost as lost:
        run.data_position = position
        run.reward.load_state_dict(statistics)
        settle(run, wait=True)
        store = store_of(run)
        if run.iteration not in from_first_rank(store.iterations()):
            save_run(run)
        kept = store.folder(run.iteration)
        raise Interrupted(f"stopped in iteration {run.iteration + 1}: {lost}. The checkpoint is {kept}", 4) from None


def load_run(run: PPORun) -> list[str] | None:
    """Continue from the newest checkpoint of `trainer.output_dir`; None when there is none. Collective.

    Returns:
        The settings that differ from the ones it was saved with, as "key: old -> new": they are in force from now
        on. Those that only say how long to run and what to log are left out.
    """
    state = load_state(store_of(run).latest(), run.engines)
    if state is None:
        return None
    try:
        run.iteration = int(state["iteration"])
        run.weight_version = int(state["weight_version"])
        run.data_position = int(state["data_position"])
        run.kl_controller.load_state_dict(state["kl_controller"])
        run.guard.load_state_dict(state["guard"])
        run.reward.load_state_dict(state["reward"])
        before, now = _flat(dict(state["config"])), _flat(run.base.model_dump(mode="json"))
    except (KeyError, TypeError, ValueError):
        raise _unreadable(store_of(run).folder(int(state["iteration"]))) from None
    keys = [key for key in {**before, **now} if key in _TOLD or not key.startswith(_FREE_TO_CHANGE)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def _unreadable(folder: Path) -> UserError:
    return UserError(f"checkpoint {folder} is damaged: state.json lacks what a run needs; delete it to continue before")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings with dotted keys."""
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}{name}.").items()}


def _rng_file(folder: Path) -> Path:
    return folder / "rng" / f"rank_{dist.get_rank():05d}.safetensors"


def _save_rng(folder: Path) -> None:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    _rng_file(folder).parent.mkdir(exist_ok=True)
    save_file(states, _rng_file(folder))


def _load_rng(folder: Path, world: int) -> None:
    """Generator states belong to ranks: with another number of ranks there is nothing to continue."""
    if world != dist.get_world_size():
        return
    states = load_file(_rng_file(folder))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
