"""Memory of every rank in every phase of an iteration, against the card (bytes)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from megappo.planning.activations import Work, forward_bytes, training_bytes
from megappo.planning.cost import micro_batches
from megappo.planning.hardware import Assumptions
from megappo.planning.parameters import StateBytes, total_parameters
from megappo.planning.roles import Job, Role, role_state
from megappo.planning.shape import ModelShape

PREFILL_TOKENS = 16384  # of one forward of the embedded engine, megappo.rollout.decode


@dataclass(frozen=True)
class Phase:
    """One phase on one kind of rank: what takes memory, by name."""

    name: str
    parts: dict[str, int] = field(hash=False)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class RankPlan:
    """Ranks that hold the same: `stages` says which pipeline stage of which role; `state` what each role keeps."""

    ranks: tuple[int, ...]
    stages: dict[str, int] = field(hash=False)
    state: dict[str, StateBytes] = field(hash=False)
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def engine_weights(job: Job) -> int:
    """The embedded engine's copy of the policy, whole on every rank."""
    return job.engine * total_parameters(job.shape)


def cache_bytes(shape: ModelShape, tokens: int, element: int) -> int:
    """A key/value cache of so many tokens."""
    return 2 * shape.layers * shape.kv_width * element * tokens


def _generation(job: Job) -> dict[str, int]:
    """Cache, prefill and logits while the embedded engine generates."""
    if not job.engine:
        return {}
    shape, longest = job.shape, job.prompt + job.response
    rows = min(max(job.cache_tokens // longest, 1), -(-job.samples // job.world))
    prefill = min(PREFILL_TOKENS, rows * job.prompt)
    width = shape.top_k * shape.expert_ffn if shape.experts else shape.ffn
    layer = prefill * (4 * shape.hidden + 3 * width) * job.engine
    logits = rows * shape.vocabulary * (4 * 3 + job.engine)
    return {
        "KV cache": cache_bytes(shape, rows * longest, job.engine),
        "prefill": cache_bytes(shape, prefill, job.engine) + layer,
        "logits": logits,
    }


def _resident(role: Role, stage: int, awake: str) -> int:
    """What is on the card of a role that is asleep, whose weights are there, or which is all there (awake)."""
    state = role_state(role, stage)
    if awake == "all" or role.offload == "none":
        return state.total
    if awake == "weights" or role.offload == "optimizer":
        return state.weights
    return 0


#: phase -> role that works -> how much of it is there; the actor's weights stay from its log-probs to the sync
_ORDER = ("gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor", "sync_weights")


def _awake(phase: str, role: Role) -> str:
    if role.name == "actor":
        if phase in ("gen", "reward"):
            return "asleep"
        return "all" if phase in ("update_actor", "sync_weights") else "weights"
    if role.name == "critic":
        return {"values": "weights", "update_critic": "all"}.get(phase, "asleep")
    works = phase == ("ref" if role.name == "reference" else "reward")
    return "weights" if works else "asleep"


_WORKERS = {"old_log_prob": "actor", "ref": "reference", "values": "critic"}


def _worker(job: Job, phase: str) -> list[Role]:
    if phase == "reward":
        return [role for role in job.roles if role.name.startswith("reward ")]
    role = job.role(_WORKERS.get(phase, phase.removeprefix("update_")))
    return [] if role is None or (phase.startswith("update") and role.train is None) else [role]


def _phases(job: Job, stages: dict[str, int], given: Assumptions) -> Iterator[Phase]:
    copy = {"engine weights": engine_weights(job)} if job.engine else {}
    base = {"CUDA and NCCL": given.reserved} | copy
    for name in _ORDER:
        workers = _worker(job, name)
        if not workers and name not in ("gen", "sync_weights"):
            continue
        parts = dict(base)
        for role in job.roles:
            if role.name in stages and (size := _resident(role, stages[role.name], _awake(name, role))):
                parts[role.name] = size
        extra = _generation(job) if name == "gen" else _work(job, name, workers, stages)
        waste = int(given.fragmentation * sum(extra.values()))
        yield Phase(name, parts | extra | ({"fragmentation": waste} if waste else {}))


def _work(job: Job, name: str, workers: list[Role], stages: dict[str, int]) -> dict[str, int]:
    """Memory that a phase takes for itself."""
    if name == "sync_weights":
        # One whole tensor at a time is gathered; the largest is the embedding.
        return {"gathered weights": 2 * job.engine * job.shape.vocabulary * job.shape.hidden} if job.engine else {}
    sizes = [_activations(job, role, stages[role.name], name) for role in workers if role.name in stages]
    return {"activations": max(sizes)} if sizes else {}


@lru_cache(maxsize=4096)
def _training(role: Role, stage: int, work: Work, count: int) -> int:
    return training_bytes(role.shape, role.layout, stage, work, count, critic=role.critic)


def _activations(job: Job, role: Role, stage: int, phase: str) -> int:
    if not phase.startswith("update"):
        return forward_bytes(role.shape, role.layout, stage, role.forward, critic=role.critic)
    longest = job.samples // max(1, role.steps // max(1, role.epochs)) * (job.prompt + job.response)
    return _training(role, stage, role.train, micro_batches(role, longest, role.train))


def rank_plans(job: Job, given: Assumptions) -> list[RankPlan]:
    """Every kind of rank: those that hold the same stages of the same roles."""
    kinds: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(job.world):
        places = ((r.name, r.layout.coordinates(rank).pp) for r in job.roles if rank in r.layout.ranks)
        kinds.setdefault(tuple(places), []).append(rank)
    found = []
    for places, ranks in kinds.items():
        stages = dict(places)
        state = {role.name: role_state(role, stages[role.name]) for role in job.roles if role.name in stages}
        found.append(RankPlan(tuple(ranks), stages, state, tuple(_phases(job, stages, given))))
    return found
