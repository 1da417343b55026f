"""Carries out what the guard decides: skipped updates, stable checkpoints, the way back. Collective throughout."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megappo.checkpoint.distributed import load_moments
from megappo.errors import UserError
from megappo.parallel.reduce import any_rank, from_first_rank
from megappo.trainer import lagged, phases
from megappo.trainer.guard import Event, Verdict
from megappo.trainer.resume import load_state, save_run, settle, store_of, trained
from megappo.trainer.setup import PPORun, leave_recorded_rollouts
from megappo.trainer.watch import Watch


def begin_guard(run: PPORun) -> None:
    """A run whose guard may go back begins with a stable checkpoint: its starting point, or what it resumed from."""
    store = store_of(run)
    if run.guard.rolls_back and store.stable() is None:
        if not store.iterations():
            save_run(run)
        store.promote(run.iteration)


def update_forbidden(run: PPORun, metrics: dict[str, float]) -> bool:
    """Does a rule forbid the update, given the metrics so far? Adds `training/update_skipped`."""
    if not run.guard.active:
        return False
    vetoes = run.guard.vetoes(metrics, run.iteration + 1, run.total_iterations)
    skip = any_rank(bool(vetoes))  # a difference in the last bit must not part the ranks
    metrics["training/update_skipped"] = float(skip)
    return skip


def guard_step(run: PPORun, watch: Watch, metrics: dict[str, float]) -> list[Event]:
    """Let the guard look at the finished iteration: events told, stable checkpoint promoted. Adds `guard/…`."""
    guard = run.guard
    if not guard.active:
        return []
    seen = from_first_rank(metrics)  # decisions must be the same on every rank
    events = guard.check(seen, run.iteration, run.total_iterations)
    metrics |= guard.metrics()
    watch.events(run.iteration, events)
    if not run.guard_introduced:
        run.guard_introduced = True
        for line in guard.unwatched(seen):
            watch.say(f"warning: {line}")
    store = store_of(run)
    if dist.get_rank() == 0:
        stable = guard.promotable(store.iterations(), run.iteration)
        if stable is not None:
            store.promote(stable)
    return events


def carry_out(run: PPORun, verdict: Verdict) -> None:
    """What is to be done between two iterations."""
    if verdict.on_policy and leave_recorded_rollouts(run):
        phases.sync_weights(run)
    if verdict.rollback:
        _roll_back(run, verdict)
    elif verdict.restore_optimizer:
        _restore_optimizers(run)


def _roll_back(run: PPORun, verdict: Verdict) -> None:
    """Load a checkpoint, all but the clock: iteration, schedules, learning-rate decay and guard go on."""
    lagged.discard(run)
    folder = _checkpoint(run, stable=verdict.rollback == "stable")
    state = load_state(folder, run.engines, clock=False)
    run.kl_controller.load_state_dict(state["kl_controller"])
    run.reward.load_state_dict(state["reward"])
    if not verdict.skip_data:
        run.data_position = int(state["data_position"])
    run.weight_version += 1
    phases.sync_weights(run)
    save_run(run)  # the way back, and what the guard changed, survive a crash
    if run.critic is not None:
        run.critic.sleep()


@torch.no_grad()
def _restore_optimizers(run: PPORun) -> None:
    folder = _checkpoint(run, stable=False)
    for role, engine in trained(run.engines).items():
        load_moments(engine, folder / role)
        engine.sleep()


def _checkpoint(run: PPORun, *, stable: bool) -> Path:
    settle(run, wait=True)
    dist.barrier()  # rank 0 may just have promoted one
    store = store_of(run)
    folder = store.stable() if stable else store.latest()
    if folder is None:
        raise UserError(f"the guard has no checkpoint in {store.root} to go back to: do not delete them during a run")
    return folder
