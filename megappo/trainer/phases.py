"""The phases of one PPO iteration. Each takes the run and the batch, adds columns, and returns metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from megappo.algorithms import advantages as adv
from megappo.algorithms import shaping
from megappo.algorithms.correction import correction, mismatch_from, mismatch_moments
from megappo.algorithms.kl import kl_moments, kl_penalty
from megappo.algorithms.policy_loss import PolicyLossConfig
from megappo.algorithms.segments import segment_mean, segment_sum
from megappo.algorithms.value_loss import explained_variance_from, explained_variance_moments
from megappo.data.batch import RolloutBatch
from megappo.data.prompts import PromptRow
from megappo.engine.engine import ModelEngine, StepStats
from megappo.engine.losses import Loss, PolicyLoss, ValueLoss
from megappo.engine.totals import share_per_sample, total
from megappo.observe.metrics import MetricAccumulator, summarize
from megappo.parallel.reduce import gather_objects
from megappo.rewards import hacking
from megappo.rewards.combine import Scored
from megappo.rewards.signals import stable_signal
from megappo.rollout.base import GeneratedSample, GenerateRequest, SamplingParams
from megappo.rollout.collect import assemble, make_requests, my_share
from megappo.rollout.offline import OfflineEngine
from megappo.rollout.recorded import RecordedEngine, write_rollouts
from megappo.trainer import sft_mix
from megappo.trainer.effective import largest_batch
from megappo.trainer.planning import (
    RolePlan,
    Step,
    budget,
    even_placement,
    forward_micro_batches,
    log_prob_budget,
    role_plan,
)
from megappo.trainer.rebel import RebelTarget
from megappo.trainer.scoring import measure
from megappo.trainer.setup import DTYPES, PPORun

Metrics = dict[str, float]
_SHOWN_IDS = 32  # of samples in a message
_GREEDY_ID = 1 << 40  # ids of ReMax's greedy baselines, apart from the samples'


# ------------------------------------------------------------------ rollout
def sync_weights(run: PPORun) -> Metrics:
    """Send the actor's weights to the rollout engine. Collective."""
    run.rollout.wake()
    stream = run.actor.stream_weights(DTYPES[run.config.rollout.dtype])
    report = run.rollout.update_weights(stream, run.weight_version)
    run.actor.sleep()
    return {
        "sync/bytes": float(report.bytes),
        "sync/seconds": report.seconds,
        "sync/version": float(report.version),
    }


def generate(run: PPORun) -> tuple[list[GeneratedSample], list[PromptRow]]:
    """This rank's share of the iteration's responses, in order of sample id."""
    samples, rows = draw(run, run.config.data.train_batch_size)
    record(run, samples)
    return samples, rows


def draw(run: PPORun, prompts: int, rounds: int = 0) -> tuple[list[GeneratedSample], list[PromptRow]]:
    """This rank's share of the responses to the next `prompts` prompts, after so many `rounds` in this iteration."""
    requests, rows = draw_requests(run, prompts, run.iteration, rounds)
    if isinstance(run.rollout, RecordedEngine):
        run.rollout.iteration = run.iteration
    if isinstance(run.rollout, OfflineEngine):
        return run.rollout.recall(requests, rows), rows
    return run.rollout.generate(requests, run.sampling), rows


def draw_requests(
    run: PPORun, prompts: int, iteration: int, rounds: int = 0
) -> tuple[list[GenerateRequest], list[PromptRow]]:
    """This rank's share of the requests for the next `prompts` prompts of the data."""
    config, most = run.config, largest_batch(run.base)
    indices, run.data_position = run.sampler.take(run.data_position, prompts)
    rows = [run.train_data[i] for i in indices]
    n = config.rollout.n
    # Ids stay unique while the batch grows, and over the rounds of dynamic sampling.
    first = (iteration * config.algorithm.dynamic_sampling.rounds + rounds) * most * n
    pairs = my_share(make_requests(rows, n, first, config.trainer.seed, first_group=rounds * most), n)
    return [request for request, _ in pairs], [row for _, row in pairs]


def record(run: PPORun, samples: list[GeneratedSample], *, greedy: bool = False) -> None:
    """Write the iteration's samples of all ranks to `rollout.record_dir`, if there is one. Collective."""
    folder = run.config.rollout.record_dir
    if folder:
        everyone = gather_objects(samples)
        if dist.get_rank() == 0:
            write_rollouts(folder, run.iteration, [s for part in everyone for s in part], greedy=greedy)


@dataclass
class Part:
    """This rank's responses of one round of generation, with their prompts and scores."""

    samples: list[GeneratedSample]
    rows: list[PromptRow]
    scored: Scored

    @property
    def finished(self) -> np.ndarray:
        """bool `[n]`: not aborted."""
        return np.array([s.finish_reason != "abort" for s in self.samples], bool)


def score(run: PPORun, samples: list[GeneratedSample], rows: list[PromptRow]) -> tuple[RolloutBatch, Metrics]:
    """Score this rank's responses, update the rewards' statistics, and assemble the batch of all ranks."""
    return score_parts(run, [Part(samples, rows, measure(run, samples, rows))])


def score_parts(run: PPORun, parts: list[Part], keep: np.ndarray | None = None) -> tuple[RolloutBatch, Metrics]:
    """Update the rewards' statistics with all parts, and assemble the batch of all ranks. Collective.

    `keep`: groups to train on, ascending (None: all). They are numbered anew from 0 (in the samples, too), the others
    get group −1 and are left out.
    """
    tallies = [run.reward.tally(part.scored, part.finished) for part in parts]
    metrics = run.reward.absorb([tally for rank in gather_objects(tallies) for tally in rank])
    kept, columns = [], []
    for part in parts:
        rewards = run.reward.rewards(part.scored)  # with statistics that include this batch
        values = zip(part.scored.scores.tolist(), rewards.tolist(), part.scored.dropped.tolist(), strict=True)
        for sample, row, value in zip(part.samples, part.rows, values, strict=True):
            if keep is not None:
                place = int(np.searchsorted(keep, sample.group_id))
                sample.group_id = place if place < len(keep) and keep[place] == sample.group_id else -1
            if sample.group_id >= 0:
                kept.append((sample, row))
                columns.append(value)
    scores, rewards, dropped = zip(*columns, strict=True) if columns else ((), (), ())
    return assemble([s for s, _ in kept], [r for _, r in kept], scores, rewards, dropped), metrics


def hacking_watch(batch: RolloutBatch) -> Metrics:
    """Signs of reward hacking, over the whole batch as it was assembled (each sample on one rank). Collective."""
    info, mine = batch.info, batch.indices
    tokens, cu = batch["tokens"].numpy(), batch.cu_seqlens.numpy()
    sketches = gather_objects(hacking.sketch(tokens, cu, info.prompt_len[mine], mine, int(info.response_len.sum())))
    return hacking.hacking_metrics(sketches, info.score, info.group_id, info.response_len, info.whole)


def greedy_baseline(run: PPORun, samples: list[GeneratedSample], rows: list[PromptRow]) -> np.ndarray:
    """ReMax: the shaped score of the greedy answer to each prompt of the batch, by group id."""
    n = run.config.rollout.n
    prompts, groups = rows[::n], [sample.group_id for sample in samples[::n]]
    greedy = SamplingParams(
        max_new_tokens=run.sampling.max_new_tokens,
        temperature=0.0,
        stop_token_ids=run.sampling.stop_token_ids,
        stop_strings=run.sampling.stop_strings,
    )
    pairs = make_requests(prompts, 1, _GREEDY_ID, run.config.trainer.seed, groups=groups)
    answers = run.rollout.generate([request for request, _ in pairs], greedy)
    record(run, answers, greedy=True)
    scores = run.reward.rewards(measure(run, answers, prompts))
    scores = shaped_scores(run, scores, np.array([len(a.response_ids) for a in answers]))
    everyone = gather_objects((groups, scores))
    baseline = np.empty(sum(len(part) for part, _ in everyone))
    for part, values in everyone:
        baseline[part] = values
    return baseline


# ------------------------------------------------------------------ plans and forward passes
def plan_update(run: PPORun, role: str, batch: RolloutBatch) -> RolePlan:
    """Mini- and micro-batches of the actor's or the critic's update."""
    section, n = getattr(run.config, role), run.config.rollout.n
    return role_plan(
        run.engines[role],
        batch.info.length,
        section.ppo_mini_batch_size * n,
        budget(section.use_dynamic_bsz, section.ppo_micro_batch_size_per_gpu, section.ppo_max_token_len_per_gpu),
        seed=(run.config.trainer.seed, run.iteration),
        shuffle=section.shuffle,
        unit=n if run.config.actor.policy_loss == "rebel" else 1,
    )


def add_logprobs(run: PPORun, batch: RolloutBatch) -> None:
    """`old_logprobs`: the actor's own, before the update."""
    sizes = log_prob_budget(run.config.actor)
    micro = forward_micro_batches(run.actor, batch.info.length, batch.placement.owner, sizes)
    batch["old_logprobs"] = run.actor.forward(batch, micro, "logprobs")["logprobs"]


def add_reference(run: PPORun, batch: RolloutBatch) -> None:
    """`ref_logprobs`: the frozen policy's, computed in its own layout."""
    ref = run.config.reference
    sizes = budget(
        run.config.actor.use_dynamic_bsz,
        ref.log_prob_micro_batch_size_per_gpu,
        ref.log_prob_max_token_len_per_gpu,
    )
    same = run.reference.layout == run.actor.layout
    placement = batch.placement if same else even_placement(run.reference, batch.info.length, sizes)
    there = batch.only("tokens", "loss_mask").to(placement)
    micro = forward_micro_batches(run.reference, there.info.length, placement.owner, sizes)
    there["ref_logprobs"] = run.reference.forward(there, micro, "logprobs")["logprobs"]
    run.reference.sleep()
    batch["ref_logprobs"] = there.only("ref_logprobs").to(batch.placement)["ref_logprobs"]


def add_values(run: PPORun, batch: RolloutBatch, plan: RolePlan) -> tuple[RolloutBatch, np.ndarray]:
    """`values` on the batch; also the batch as the critic holds it, and V after the last token of every sample."""
    critic = run.config.critic
    there = batch.only("tokens", "loss_mask").to(plan.placement)
    sizes = budget(critic.use_dynamic_bsz, critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu)
    micro = forward_micro_batches(run.critic, there.info.length, plan.placement.owner, sizes)
    result = run.critic.forward(there, micro, "values")
    there["values"] = result["values"]
    batch["values"] = there.only("values").to(batch.placement)["values"]
    last = share_per_sample(run.critic, there, result["last_values"])
    run.critic.sleep()
    return there, last


# ------------------------------------------------------------------ rewards and advantages
def shaped_scores(run: PPORun, scores: np.ndarray, response_len: np.ndarray) -> np.ndarray:
    """Scores after clipping and the overlong penalty."""
    rules = run.config.algorithm.reward_shaping
    shaped = torch.from_numpy(scores)
    if rules.clip is not None:
        shaped = shaping.clip_scores(shaped, *rules.clip)
    if rules.overlong.enabled:
        limit, buffer = run.config.data.max_response_length, rules.overlong.buffer_len
        lengths = torch.from_numpy(response_len)
        shaped = shaped + shaping.overlong_penalty(lengths, limit, buffer, rules.overlong.penalty_factor)
    return shaped.double().numpy()


def add_rewards(run: PPORun, batch: RolloutBatch) -> Metrics:
    """`rewards`: the score spread over the response, minus β·KL to the reference. Moves the KL controller."""
    algorithm = run.config.algorithm
    mask, cu = batch["loss_mask"], batch.cu_seqlens
    scores = batch.sample_values(shaped_scores(run, batch.info.reward, batch.info.response_len))
    credit = algorithm.reward_shaping
    batch["rewards"] = shaping.token_rewards(scores, mask, cu, credit.credit, credit.decay)
    if "ref_logprobs" not in batch.columns:
        return {}
    kl = kl_penalty(batch["old_logprobs"], batch["ref_logprobs"], algorithm.kl_penalty, loss_mask=mask)
    moments = total(run.actor, kl_moments(kl, mask, cu))
    current = float(moments[0] / moments[1].clamp(min=1))
    metrics = {"actor/reward_kl_penalty": current} | kl_by_source(run, batch, kl)
    if algorithm.use_kl_in_reward:
        ctrl = algorithm.kl_ctrl
        coefficient = run.kl_controller.value(ctrl.kl_coef)
        metrics["actor/reward_kl_penalty_coeff"] = coefficient
        batch["rewards"] = shaping.apply_kl_penalty(batch["rewards"], kl, coefficient, mask)
        run.kl_controller.update(ctrl.kl_coef, current, int(moments[1]), ctrl.target_kl)
    return metrics


def kl_by_source(run: PPORun, batch: RolloutBatch, kl: torch.Tensor) -> Metrics:
    """`actor/kl/<data_source>`: as `actor/reward_kl_penalty`, over the responses to one data source. Collective."""
    means = share_per_sample(run.actor, batch, segment_mean(kl, batch["loss_mask"], batch.cu_seqlens))
    counted, sources = batch.info.trainable > 0, np.array(batch.info.source)
    return {f"actor/kl/{s}": float(means[counted & (sources == s)].mean()) for s in np.unique(sources[counted])}


def add_advantages(
    run: PPORun, batch: RolloutBatch, last_values: np.ndarray | None, baseline: np.ndarray | None
) -> None:
    """`advantages` (and `returns` for GAE), whitened over the global batch where configured."""
    algorithm = run.config.algorithm
    mask, cu, kind = batch["loss_mask"], batch.cu_seqlens, algorithm.adv_estimator
    if kind == "gae":
        bootstrap = None
        decoupled = algorithm.adaptive_lam_alpha is not None or algorithm.lam_critic != algorithm.lam
        if algorithm.bootstrap_truncated:
            bootstrap = batch.sample_values(np.where(batch.info.truncated, last_values, 0.0))
        batch["advantages"], batch["returns"] = adv.gae(
            batch["rewards"],
            batch["values"],
            mask,
            cu,
            algorithm.gamma,
            algorithm.lam,
            lam_returns=algorithm.lam_critic if decoupled else None,
            adaptive_alpha=algorithm.adaptive_lam_alpha,
            bootstrap_values=bootstrap,
        )
    elif kind == "reinforce_plus_plus":
        batch["advantages"] = adv.rewards_to_go(batch["rewards"], mask, cu, algorithm.gamma)
    else:
        totals = share_per_sample(run.actor, batch, segment_sum(batch["rewards"], cu))
        groups = batch.info.group_id
        # A sample without trainable tokens (aborted, empty) has no score to compare others with: a group of its own.
        alone = np.where(batch.info.trainable > 0, groups, -1 - np.arange(len(groups)))
        per_sample = adv.group_advantages(
            torch.from_numpy(totals),
            torch.from_numpy(alone),
            kind,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            baseline_scores=None if baseline is None else torch.from_numpy(baseline[groups]),
        )
        batch["advantages"] = adv.broadcast_to_tokens(batch.sample_values(per_sample.numpy()), mask, cu)
    if algorithm.normalize_advantages and kind not in ("grpo", "rloo", "remax"):
        moments = total(run.actor, adv.moments(batch["advantages"], mask))
        batch["advantages"] = adv.whiten(batch["advantages"], mask, moments)


def add_correction(run: PPORun, batch: RolloutBatch) -> tuple[RolloutBatch, Metrics]:
    """`correction`: weights for the gap between rollout and training log-probs, which is measured in any case."""
    rules = run.config.algorithm.correction
    mask = batch["loss_mask"]
    moments = total(run.actor, mismatch_moments(batch["old_logprobs"], batch["rollout_logprobs"], mask))
    metrics = mismatch_from(moments)
    if rules.mode == "none":
        return batch, metrics
    result = correction(
        batch["old_logprobs"],
        batch["rollout_logprobs"],
        mask,
        batch.cu_seqlens,
        rules.mode,
        rules.clip_max,
        rules.band_low,
        rules.band_high,
    )
    kept = share_per_sample(run.actor, batch, segment_sum(result.keep.float(), batch.cu_seqlens))
    info = replace(batch.info, trainable=kept.round().astype(np.int64))
    columns = {**batch.columns, "loss_mask": result.keep, "correction": result.weights}
    metrics["rollout_corr/kept_share"] = float(kept.sum() / max(1, batch.info.trainable.sum()))
    return replace(batch, info=info, columns=columns), metrics


# ------------------------------------------------------------------ updates
@dataclass
class Update:
    """The optimizer steps of one role in one iteration, as this rank saw them (None outside the role's layout)."""

    role: str
    loss: Loss
    steps: list[StepStats | None]
    sample_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    metrics: Metrics = field(default_factory=dict)  # what is known on every rank already


def update_critic(run: PPORun, batch: RolloutBatch, plan: RolePlan) -> Update:
    critic = run.config.critic
    loss = ValueLoss(critic.cliprange_value)
    steps = _steps(run, run.critic, batch, plan, loss, critic.ppo_epochs, critic.loss_agg_mode)
    run.critic.sleep()
    return Update("critic", loss, steps, batch.info.sample_id)


def update_actor(run: PPORun, batch: RolloutBatch, plan: RolePlan) -> Update:
    actor = run.config.actor
    # REBEL trains on -advantages * log-prob, with coefficients of its own as advantages.
    kind = "reinforce" if actor.policy_loss == "rebel" else actor.policy_loss
    loss = PolicyLoss(
        PolicyLossConfig(kind, actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c),
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
        kl_type=actor.kl_loss_type,
        corrected="correction" in batch.columns,
        sft_coef=None if run.sft_data is None else actor.sft_mix.coef,
    )
    examples: list[Step] = []
    if run.sft_data is not None:
        batch, examples = sft_mix.mixed_in(run, batch, [plan.minis[mini] for mini in plan.steps(actor.ppo_epochs)])
    rebel = RebelTarget(run, batch) if actor.policy_loss == "rebel" else None
    steps = _steps(run, run.actor, batch, plan, loss, actor.ppo_epochs, actor.loss_agg_mode, examples, rebel)
    return Update("actor", loss, steps, batch.info.sample_id, rebel.metrics() if rebel else {})


def _steps(
    run: PPORun,
    engine: ModelEngine,
    batch: RolloutBatch,
    plan: RolePlan,
    loss: Loss,
    epochs: int,
    mode: str,
    examples: Sequence[Step] = (),
    before: Callable[[np.ndarray, list[list[int]]], None] | None = None,
) -> list[StepStats | None]:
    """All optimizer steps of a role, each with its `examples` (none: without any), after a call of `before`."""
    norm_length = run.config.actor.loss_agg_norm_length
    steps = []
    for number, mini in enumerate(plan.steps(epochs)):
        samples, micro_batches = plan.minis[mini], plan.micro_batches(mini)
        if examples:
            more, their_micro_batches = examples[number]
            samples, micro_batches = np.concatenate([samples, more]), [*micro_batches, *their_micro_batches]
        if before is not None:
            before(samples, micro_batches)
        steps.append(engine.train_step(batch, samples, micro_batches, loss, agg_mode=mode, norm_length=norm_length))
    return steps


def update_metrics(run: PPORun, updates: list[Update]) -> Metrics:
    """Means (maxima) over the optimizer steps of all roles. After all updates, so that roles on ranks of their own
    train at the same time."""
    metrics: Metrics = {}
    for update in updates:
        metrics |= step_metrics(run.engines[update.role], update) | update.metrics
        if metrics[f"{update.role}/skipped_steps"]:
            run.notes.append(skipped_steps(update, int(metrics[f"{update.role}/skipped_steps"])))
    if "actor/ratio_min_neg" in metrics:
        metrics["actor/ratio_min"] = -metrics.pop("actor/ratio_min_neg")
    if run.config.actor.use_kl_loss:
        metrics["actor/kl_coef"] = run.config.actor.kl_loss_coef
    return metrics


def skipped_steps(update: Update, count: int) -> str:
    """One line about steps whose loss or gradient was not finite, with the samples at fault. Collective."""
    suspects = [sample for step in update.steps if step is not None for sample in step.suspects]
    found = sorted({sample for part in gather_objects(suspects) for sample in part})
    ids = ", ".join(str(update.sample_ids[sample]) for sample in found[:_SHOWN_IDS])
    more = f" and {len(found) - _SHOWN_IDS} more" if len(found) > _SHOWN_IDS else ""
    where = f"in the micro-batches of samples {ids}{more}" if found else "in the gradient; every loss is finite"
    return f"{update.role}: {count} optimizer steps skipped on all ranks, not finite {where}"


def step_metrics(engine: ModelEngine, update: Update) -> Metrics:
    """One role's metrics, made global."""
    role, steps = update.role, update.steps
    numbers = MetricAccumulator()
    counted = steps if engine.reports else []
    for name in update.loss.sums:
        numbers.add_sum(name, sum(s.sums[name] for s in counted), len(steps))
    for name in update.loss.maxima:
        numbers.add_max(name, [s.maxima[name] for s in counted])
    mine = steps if engine.member else []
    norms = [s.grad_norm for s in mine if s.applied]
    numbers.add_mean(f"{role}/grad_norm", norms)
    numbers.add_max(f"{role}/grad_norm_max", norms)
    numbers.add_max(f"{role}/lr", [s.lr for s in mine[-1:]])
    numbers.add_max(f"{role}/skipped_steps", [float(len(mine) - len(norms))] if mine else [])
    return numbers.reduce()


def batch_metrics(run: PPORun, batch: RolloutBatch) -> Metrics:
    """Scores and lengths of the samples that were finished and scored; rewards, advantages, … of all trained tokens."""
    info = batch.info
    whole = info.whole
    out = summarize("critic/score", info.score[whole])
    out |= stable_signal(info.score[whole])
    out |= summarize("response_length", info.response_len[whole])
    out |= summarize("prompt_length", info.prompt_len)
    out["response_length/clip_ratio"] = float(info.truncated.mean())
    out["response/aborted_ratio"] = float(info.aborted.mean())
    if run.config.trainer.rollout_lag:
        out["rollout/weight_lag"] = float((run.weight_version - info.weight_version).mean())
    sources = np.array(info.source)
    for source in np.unique(sources[whole]):
        out[f"critic/score/{source}/mean"] = float(info.score[whole & (sources == source)].mean())
    numbers = MetricAccumulator()
    mask = batch["loss_mask"] if run.actor.primary else torch.zeros_like(batch["loss_mask"])
    totals = segment_sum(batch["rewards"], batch.cu_seqlens)
    numbers.add_stats("critic/rewards", totals if run.actor.primary else totals[:0])
    for name in ("advantages", "returns", "values"):
        if name in batch.columns:
            numbers.add_stats(f"critic/{name}", batch[name][mask])
    out |= numbers.reduce()
    if "returns" in batch.columns:
        moments = explained_variance_moments(batch["values"], batch["returns"], mask)
        out["critic/vf_explained_var"] = explained_variance_from(total(run.actor, moments))
    return out
