"""The PPO loop."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from megappo.config.schema import ExperimentConfig
from megappo.errors import Interrupted
from megappo.observe.memory import PeakMemory, peak_memory
from megappo.observe.timing import Timer
from megappo.parallel import backend
from megappo.trainer import lagged, phases, sampling_rounds
from megappo.trainer.effective import changing_metrics
from megappo.trainer.evaluate import evaluate
from megappo.trainer.external_eval import external_evaluation
from megappo.trainer.guard import Event, Verdict
from megappo.trainer.interrupt import StopRequest
from megappo.trainer.offline import prepare_offline
from megappo.trainer.recover import begin_guard, carry_out, guard_step, update_forbidden
from megappo.trainer.resume import load_run, save_run, saving_when_lost, settle, store_of
from megappo.trainer.setup import PPORun, build_run, configure, export_model, leave_recorded_rollouts, read_inputs
from megappo.trainer.watch import Watch


def run_ppo(config: ExperimentConfig) -> dict[str, float]:
    """Train as `config` says, from the beginning or from the latest checkpoint; returns the last metrics.

    Every rank calls it. Raises Interrupted after a signal, once the state is saved.
    """
    backend.init_distributed(config.trainer.distributed_timeout_s)
    inputs = read_inputs(config)
    # The sinks come before the models, which may take minutes: a logger that is not installed shows at once.
    with closing(inputs.reward), closing(Watch(config, inputs.total_iterations)) as watch:
        for name, data in (("train_files", inputs.train_data), ("val_files", inputs.val_data)):
            if data is not None and data.report.notable:
                watch.say(f"data.{name}: {data.report}")
        if inputs.sft_data is not None:
            watch.say(f"actor.sft_mix: {inputs.sft_data.report}")
        run = build_run(config, inputs)
        with ExitStack() as ending, StopRequest() as stop:
            ending.callback(lambda: run.rollout.close())  # whichever it is by then
            return _train(run, watch, stop)


def _train(run: PPORun, watch: Watch, stop: StopRequest) -> dict[str, float]:
    trainer = run.config.trainer
    _begin(run, watch)
    prepare_offline(run, watch)
    begin_guard(run)
    phases.sync_weights(run)
    metrics: dict[str, float] = {}
    if run.iteration == 0 and trainer.val_before_train and _evaluates(run):
        metrics = _evaluate(run, watch)
    stopping, verdict, events = stop.anywhere(), Verdict(), []
    while run.iteration < run.total_iterations and not stopping:
        timer = Timer(backend.synchronize, memory=PeakMemory())
        with timer("step"), saving_when_lost(run):
            metrics = ppo_iteration(run, timer)
        run.iteration += 1
        last, stopping = run.iteration == run.total_iterations, stop.anywhere()
        if _due(trainer.test_freq, run.iteration, last) and _evaluates(run) and not stopping:
            with timer("testing"):
                metrics |= _evaluate(run, watch)
        metrics |= timer.take() | peak_memory(timer.peaks())  # rules may watch times too
        events = guard_step(run, watch, metrics)
        verdict = Verdict.of(events)
        with timer("guard"):
            carry_out(run, verdict)
        stopping |= verdict.stop
        if not verdict.rollback and (verdict.stop or _due(trainer.save_freq, run.iteration, last or stopping)):
            with timer("save_checkpoint"):
                save_run(run, wait=last or stopping or not trainer.async_save)
        settle(run, wait=False)
        watch.log(run.iteration, metrics | timer.take())
        while run.notes:
            watch.say(f"iteration {run.iteration}: {run.notes.pop(0)}")
    if verdict.stop:
        raise _stopped(run, events)
    if run.iteration < run.total_iterations:
        raise stop.interrupted(f"iteration {run.iteration}", store_of(run), "trainer.save_freq", trainer.resume)
    _export(run, watch)
    return metrics


def _stopped(run: PPORun, events: list[Event]) -> Interrupted:
    """The guard ended the run."""
    reasons = "; ".join(str(event) for event in events if any("stop" in action for action in event.actions))
    kept = store_of(run).folder(store_of(run).iterations()[-1])
    return Interrupted(
        f"stopped after iteration {run.iteration}: {reasons}. The newest checkpoint is {kept}; "
        f"`megappo report {run.config.trainer.output_dir}` shows what happened",
        code=3,
    )


def _begin(run: PPORun, watch: Watch) -> None:
    """Continue from the newest checkpoint, or keep those of an earlier run out of the way."""
    if run.config.trainer.resume == "never":
        aside = store_of(run).set_aside()
        if aside is not None:
            watch.say(f"trainer.resume is never: the earlier checkpoints are now in {aside}")
        return
    changes = load_run(run)
    if changes is not None:
        watch.resumed(run.iteration)
        if run.guard.on_policy:
            leave_recorded_rollouts(run)
        if changes:
            watch.say(f"changed since the checkpoint: {'; '.join(changes)}")


def ppo_iteration(run: PPORun, timer: Timer) -> dict[str, float]:
    """rollout → scores → log-probs, values → rewards → advantages → critic and actor epochs → weights to rollout."""
    configure(run)
    algorithm, lag = run.config.algorithm, run.config.trainer.rollout_lag > 0
    metrics = changing_metrics(run.base, run.config, run.guard.adjustments)
    if algorithm.dynamic_sampling.enabled:
        samples, rows, batch, scored = sampling_rounds.collect(run, timer)
    else:
        with timer("gen"):
            samples, rows = lagged.generate(run) if lag else phases.generate(run)
        if lag:
            with timer("sync_weights"):
                metrics |= lagged.go_on(run)
        with timer("reward"):
            batch, scored = phases.score(run, samples, rows)
    metrics |= scored
    with timer("reward"):
        baseline = phases.greedy_baseline(run, samples, rows) if algorithm.adv_estimator == "remax" else None
    with timer("hacking"):
        metrics |= phases.hacking_watch(batch)
    actor_plan = phases.plan_update(run, "actor", batch)
    batch = batch.to(actor_plan.placement)
    with timer("old_log_prob"):
        phases.add_logprobs(run, batch)
    if run.reference is not None:
        with timer("ref"):
            phases.add_reference(run, batch)
    last_values = None
    if run.critic is not None:
        with timer("values"):
            critic_plan = phases.plan_update(run, "critic", batch)
            critic_batch, last_values = phases.add_values(run, batch, critic_plan)
    with timer("adv"):
        metrics |= phases.add_rewards(run, batch)
        phases.add_advantages(run, batch, last_values, baseline)
        metrics |= phases.batch_metrics(run, batch)
        actor_batch, mismatch = phases.add_correction(run, batch)
        metrics |= mismatch
    skip = update_forbidden(run, metrics)
    updates, train_actor = [], run.iteration >= run.config.trainer.critic_warmup and not skip
    if run.critic is not None and not skip:
        with timer("update_critic"):
            critic_batch["returns"] = batch.only("returns").to(critic_plan.placement)["returns"]
            updates.append(phases.update_critic(run, critic_batch, critic_plan))
    if train_actor:
        with timer("update_actor"):
            updates.append(phases.update_actor(run, actor_batch, actor_plan))
    metrics |= phases.update_metrics(run, updates)
    if train_actor:
        run.weight_version += 1
        if not lag:
            with timer("sync_weights"):
                metrics |= phases.sync_weights(run)
    metrics |= run.rollout.metrics()
    tokens = int(batch.info.length.sum())
    metrics |= {"perf/total_num_tokens": float(tokens), "training/global_step": float(run.iteration + 1)}
    metrics["training/epoch"] = float((run.data_position - 1) // len(run.train_data))
    return metrics


def _due(every: int, iteration: int, last: bool) -> bool:
    """Every so many iterations, and at the end; -1 is never."""
    return every > 0 and (last or iteration % every == 0)


def _evaluates(run: PPORun) -> bool:
    return run.val_data is not None or run.config.trainer.eval_command is not None


def _evaluate(run: PPORun, watch: Watch) -> dict[str, float]:
    if run.config.trainer.rollout_lag:
        lagged.catch_up(run)
    metrics, answers = evaluate(run) if run.val_data is not None else ({}, [])
    if run.config.trainer.eval_command is not None:
        metrics |= external_evaluation(run, watch)
    watch.validation(run.iteration, metrics, answers[: run.config.trainer.log_val_samples])
    return metrics


def _export(run: PPORun, watch: Watch) -> None:
    """The trained policy as a Hugging Face folder."""
    out = Path(run.config.trainer.output_dir) / "final_hf"
    export_model(run.actor, out, run.config.model.dtype)
    watch.say(f"trained model: {out}")
