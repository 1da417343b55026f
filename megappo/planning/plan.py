"""A plan: does a configuration fit a cluster, what does not fit first, and the smallest change that helps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megappo.config.check_layout import check_layout
from megappo.config.model_folder import ModelFacts
from megappo.config.problems import Problem
from megappo.config.schema import ExperimentConfig, ParallelConfig
from megappo.planning.cost import Machine, PhaseTime, iteration_seconds, phase_times
from megappo.planning.memory import Phase, RankPlan, engine_weights, rank_plans
from megappo.planning.roles import Job, job_of
from megappo.planning.shape import ModelShape, read_shape

Shapes = Callable[[str], ModelShape]
Changes = dict[str, object]  # dotted key -> value


@dataclass(frozen=True)
class Misfit:
    """A phase that needs more than the card has, on these ranks."""

    rank: RankPlan
    phase: Phase


@dataclass(frozen=True)
class Plan:
    """What a configuration costs on a machine."""

    job: Job
    machine: Machine
    ranks: list[RankPlan]
    times: list[PhaseTime]

    @property
    def seconds(self) -> float:
        """Estimated time of an iteration."""
        return iteration_seconds(self.job, self.times)

    @property
    def peak(self) -> RankPlan:
        """The kind of rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.peak.total)

    @property
    def fits(self) -> bool:
        """Does every phase fit on every rank?"""
        return self.peak.peak.total <= self.machine.card.memory

    @property
    def misfit(self) -> Misfit | None:
        """The first phase of the iteration that does not fit, on the rank where it needs most."""
        limit = self.machine.card.memory
        order = [phase.name for phase in max(self.ranks, key=lambda rank: len(rank.phases)).phases]
        found = [Misfit(r, p) for r in self.ranks for p in r.phases if p.total > limit]
        first = min((order.index(m.phase.name) for m in found if m.phase.name in order), default=None)
        here = [m for m in found if first is not None and m.phase.name == order[first]]
        return max(here or found, key=lambda m: m.phase.total, default=None)


def make_plan(config: ExperimentConfig, machine: Machine, shapes: Shapes = read_shape) -> Plan:
    """Plan a resolved configuration whose layouts are valid, see `layout_problems`."""
    job = job_of(config, machine.world, shapes)
    return Plan(job, machine, rank_plans(job, machine.given), phase_times(job, machine))


# ------------------------------------------------------------------ layouts
def sections(config: ExperimentConfig) -> dict[str, ParallelConfig]:
    """The layout of every role of the run, by the key of its section."""
    found = {"actor": config.actor.parallel}
    if config.needs_critic:
        found["critic"] = config.critic.parallel
    if config.needs_reference:
        found["reference"] = config.reference.parallel
    found |= {f"rewards.{i}": r.parallel for i, r in enumerate(config.rewards) if r.type == "model"}
    return found


def _path(config: ExperimentConfig, section: str) -> str:
    if section.startswith("rewards."):
        return config.rewards[int(section.removeprefix("rewards."))].path
    return {"actor": config.model.path, "critic": config.critic.path, "reference": config.reference.path}[section]


def layout_problems(config: ExperimentConfig, world: int, shapes: Shapes = read_shape) -> Iterator[Problem]:
    """What makes a layout impossible; notes are left out."""
    for section, parallel in sections(config).items():
        shape = shapes(_path(config, section))
        facts = ModelFacts(
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            ffn=shape.ffn,
            max_positions=None,
            experts=shape.experts or None,
            expert_ffn=shape.expert_ffn or None,
        )
        for problem in check_layout(f"{section}.parallel", parallel, facts, world):
            if not problem.note:
                yield problem


def _possible(config: ExperimentConfig, world: int, shapes: Shapes) -> bool:
    if next(layout_problems(config, world, shapes), None) is not None:
        return False
    samples = config.actor.ppo_mini_batch_size * config.rollout.n
    return world // config.actor.parallel.model_parallel_size <= samples


# ------------------------------------------------------------------ changes
def changed(config: ExperimentConfig, changes: Changes) -> ExperimentConfig:
    """A copy with other values. What equals the actor's is taken to be inherited from it, and follows."""
    out = config.model_copy(deep=True)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        if name == "max_batch_tokens":
            out.rollout.max_batch_tokens = value
        elif section.endswith(".parallel"):
            _set_layout(out, config, section.removesuffix(".parallel"), name, value)
        else:
            _set_batch(out, config, section, name, value)
    return out


def _set_layout(out: ExperimentConfig, before: ExperimentConfig, section: str, name: str, value: object) -> None:
    old = sections(before)
    for other, parallel in sections(out).items():
        if other == section or (section == "actor" and old[other] == old["actor"]):
            tp = parallel.tensor_model_parallel_size
            if name == "tensor_model_parallel_size" and parallel.expert_tensor_parallel_size == tp:
                parallel.expert_tensor_parallel_size = value
            setattr(parallel, name, value)


def _set_batch(out: ExperimentConfig, before: ExperimentConfig, section: str, name: str, value: object) -> None:
    setattr(getattr(out, section), name, value)
    if section != "actor":
        return
    old = getattr(before.actor, name)
    heirs = [(out.actor, name.replace("ppo_", "log_prob_")), (out.critic, name)]
    heirs.append((out.reference, name.replace("ppo_", "log_prob_")))
    for owner, key in heirs:
        if getattr(owner, key, None) == old:
            setattr(owner, key, value)


def _layout_keys(config: ExperimentConfig, name: str, value: Callable[[ParallelConfig], object]) -> Changes:
    """The same change for every layout of its own; one that equals the actor's follows the actor's key."""
    mine = sections(config)
    own = {key: parallel for key, parallel in mine.items() if key == "actor" or parallel != mine["actor"]}
    found = {f"{key}.parallel.{name}": (value(parallel), getattr(parallel, name)) for key, parallel in own.items()}
    return {key: new for key, (new, old) in found.items() if new is not None and new != old}


def single_changes(config: ExperimentConfig) -> Iterator[Changes]:
    """Small changes that save memory."""
    yield _layout_keys(config, "recompute", lambda p: "full")
    yield _layout_keys(config, "offload", lambda p: "optimizer" if p.offload == "none" else None)
    yield _layout_keys(config, "offload", lambda p: "all")
    longest = config.data.max_prompt_length + config.data.max_response_length
    for part in (2, 4):
        if config.rollout.engine == "embedded" and config.rollout.max_batch_tokens // part >= longest:
            yield {"rollout.max_batch_tokens": config.rollout.max_batch_tokens // part}
        yield _smaller_batch(config, part, longest)
    for times in (2, 4, 8):
        wider = _layout_keys(config, "tensor_model_parallel_size", lambda p, t=times: p.tensor_model_parallel_size * t)
        yield wider | _layout_keys(config, "sequence_parallel", lambda p: True)
        yield _layout_keys(
            config, "pipeline_model_parallel_size", lambda p, t=times: p.pipeline_model_parallel_size * t
        )


def _smaller_batch(config: ExperimentConfig, part: int, longest: int) -> Changes:
    found: Changes = {}
    for name, role in (("actor", config.actor), ("critic", config.critic if config.needs_critic else None)):
        if role is None:
            continue
        key, least = "ppo_micro_batch_size_per_gpu", 1
        if role.use_dynamic_bsz:
            key, least = "ppo_max_token_len_per_gpu", longest
        old = getattr(role, key)
        follows = name == "critic" and old == getattr(config.actor, key)
        if old // part >= least and not follows:
            found[f"{name}.{key}"] = old // part
    return found


@dataclass(frozen=True)
class Remedy:
    """Changes that make a configuration fit, on so many nodes."""

    changes: Changes
    nodes: int
    plan: Plan


def smallest_change(config: ExperimentConfig, machine: Machine, shapes: Shapes = read_shape) -> Remedy | None:
    """Fewest changes that make it fit, of those the fastest; more nodes only where no two changes help. None: nothing.

    A rollout engine whose copy of the model exceeds the card is beyond help.
    """
    job = job_of(config, machine.world, shapes)
    if engine_weights(job) + machine.given.reserved > machine.card.memory:
        return None
    singles = [change for change in single_changes(config) if change]
    for nodes in (machine.nodes, 2 * machine.nodes, 4 * machine.nodes):
        larger = Machine(machine.card, nodes, machine.per_node, machine.given)
        for count in (0, 1, 2) if nodes > machine.nodes else (1, 2):
            found = []
            for several in itertools.combinations(singles, count):
                merged = {key: value for change in several for key, value in change.items()}
                if len(merged) < sum(map(len, several)):
                    continue  # two values for one key
                candidate = changed(config, merged)
                if _possible(candidate, larger.world, shapes):
                    plan = make_plan(candidate, larger, shapes)
                    if plan.fits:
                        found.append(Remedy(merged, nodes, plan))
            if found:
                return min(found, key=lambda remedy: remedy.plan.seconds)
    return None


# ------------------------------------------------------------------ search
@dataclass(frozen=True)
class Candidate:
    """A layout that fits, for all roles alike."""

    changes: Changes
    plan: Plan


def search(
    config: ExperimentConfig, machine: Machine, shapes: Shapes = read_shape, *, most: int = 10
) -> list[Candidate]:
    """Layouts for all roles together, fastest first; of each layout the fastest memory settings that fit."""
    found = []
    for layout in _grid(config, machine, shapes):
        base = _on_all_ranks(config, layout)
        if not _possible(base, machine.world, shapes):
            continue
        fitting = []
        for recompute, offload in itertools.product((None, "full"), ("none", "optimizer", "all")):
            memory: Changes = {"actor.parallel.recompute": recompute, "actor.parallel.offload": offload}
            plan = make_plan(changed(base, memory), machine, shapes)
            if plan.fits:
                fitting.append(Candidate(layout | memory, plan))
        if fitting:
            found.append(min(fitting, key=lambda candidate: candidate.plan.seconds))
    return sorted(found, key=lambda candidate: candidate.plan.seconds)[:most]


def _on_all_ranks(config: ExperimentConfig, layout: Changes) -> ExperimentConfig:
    """A copy in which every role has this layout."""
    out = config.model_copy(deep=True)
    plain = {key.rpartition(".")[2]: value for key, value in layout.items()}
    distributed = config.actor.parallel.use_distributed_optimizer
    etp = 1 if plain["expert_model_parallel_size"] > 1 else plain["tensor_model_parallel_size"]
    parallel = ParallelConfig(use_distributed_optimizer=distributed, expert_tensor_parallel_size=etp, **plain)
    for owner in (out.actor, out.critic, out.reference, *(r for r in out.rewards if r.type == "model")):
        owner.parallel = parallel.model_copy()
    return out


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def _grid(config: ExperimentConfig, machine: Machine, shapes: Shapes) -> Iterator[Changes]:
    shape = shapes(config.model.path)
    stages = [pp for pp in range(1, min(machine.world, shape.layers) + 1) if machine.world % pp == 0]
    longest = config.data.max_prompt_length + config.data.max_response_length
    contexts = (1, 2, 4) if longest > 16384 else (1,)
    experts = _powers(min(shape.experts, machine.world)) if shape.experts else [1]
    for tp, pp, cp, ep in itertools.product(_powers(machine.per_node), stages, contexts, experts):
        for vpp in (1, 2, 4) if pp > 1 else (1,):
            yield {
                "actor.parallel.tensor_model_parallel_size": tp,
                "actor.parallel.pipeline_model_parallel_size": pp,
                "actor.parallel.virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
                "actor.parallel.context_parallel_size": cp,
                "actor.parallel.expert_model_parallel_size": ep,
                "actor.parallel.sequence_parallel": tp > 1,
            }
