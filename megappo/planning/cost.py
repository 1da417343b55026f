"""Floating-point work, bytes sent and seconds of each phase of an iteration.

Estimates: data-sheet figures times the shares in `Assumptions`. They rank layouts; they do not promise a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megappo.planning.activations import Work
from megappo.planning.hardware import Assumptions, Card
from megappo.planning.parameters import active_parameters, groups, total_parameters
from megappo.planning.roles import Job, Role, role_state
from megappo.planning.shape import ModelShape


@dataclass(frozen=True)
class Machine:
    """The cluster: `card`s, `per_node` of them in each node."""

    card: Card
    nodes: int
    per_node: int
    given: Assumptions = field(default_factory=Assumptions)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.nodes * self.per_node

    def link(self, span: int) -> float:
        """Bytes/s of a group whose ranks lie within `span` neighbouring ones."""
        inside = self.per_node % span == 0 if span <= self.per_node else False
        return (self.card.nvlink if inside else self.card.network) * self.given.links

    def flops(self, element: int) -> float:
        """FLOP/s that products reach."""
        return (self.card.flops if element == 2 else self.card.fp32_flops) * self.given.compute


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase and what they are made of; `sent`: bytes that a rank sends, by kind."""

    name: str
    parts: dict[str, float]
    sent: dict[str, float]
    bubble: float = 0.0  # share of the pipeline's time in which a rank waits

    @property
    def seconds(self) -> float:
        """In all."""
        return sum(self.parts.values())


def token_flops(shape: ModelShape, context: float, *, critic: bool = False) -> float:
    """FLOPs of the forward pass of one token that attends to `context` tokens on average (twice for each weight)."""
    weights = active_parameters(shape) - (shape.vocabulary * shape.hidden if critic else 0)
    return 2.0 * weights + 4.0 * shape.layers * shape.q_width * context


def micro_batches(role: Role, tokens: float, work: Work) -> int:
    """Micro-batches of a replica for so many tokens over all replicas; a multiple of PP when interleaved."""
    count = max(1, -(-int(tokens) // (role.layout.dp * work.tokens)))
    multiple = role.layout.pp if role.layout.vpp > 1 else 1
    return -(-count // multiple) * multiple


def bubble_share(role: Role, count: int) -> float:
    """Share of a pipeline's time that is spent waiting: (PP − 1) / (VPP · micro-batches + PP − 1)."""
    waiting = role.layout.pp - 1
    return waiting / (role.layout.vpp * count + waiting)


def _mean_length(job: Job, given: Assumptions) -> float:
    return given.fill * (job.prompt + job.response)


def _layer_messages(role: Role, tokens: float, *, train: bool, recomputed: bool) -> dict[str, float]:
    """Bytes that a rank sends for its layers over all tokens of a replica, by the dimension they cross."""
    shape, layout, element = role.shape, role.layout, role.element
    local, layers = tokens / layout.cp, shape.layers / layout.pp
    passes = (2 + recomputed) if train else 1
    hidden = local * shape.hidden * element
    sent = {"TP": 0.0, "EP": 0.0, "CP": 0.0, "PP": 0.0}
    if layout.tp > 1:  # two all-reduces (or gather and scatter) a layer and pass
        sent["TP"] = layers * passes * 2 * 2 * (layout.tp - 1) / layout.tp * hidden
    if layout.ep > 1:  # tokens to their experts and back
        share = (layout.ep - 1) / layout.ep / (layout.tp if layout.sequence_parallel else 1)
        sent["EP"] = layers * passes * 2 * shape.top_k * hidden * share
    if layout.cp > 1:
        keys = local * 2 * shape.kv_width / layout.tp * element
        sent["CP"] = layers * passes * keys * (layout.cp - 1)
    if layout.pp > 1:
        sent["PP"] = (2 if train else 1) * layout.vpp * hidden / (layout.tp if layout.sequence_parallel else 1)
    return {name: size for name, size in sent.items() if size}


def _spans(role: Role) -> dict[str, int]:
    layout = role.layout
    stage = layout.world // layout.pp
    spans = {"TP": layout.tp, "CP": layout.tp * layout.cp, "EP": layout.etp * layout.ep}
    return spans | {"DP": stage, "PP": stage + 1}


def _pass(role: Role, machine: Machine, job: Job, tokens: float, work: Work, *, train: bool, count: int) -> PhaseTime:
    """All micro-batches of one pass of a role over `tokens` (over all replicas), `count` of them on each."""
    layout = role.layout
    recomputed = train and work.recompute == "full"
    context = _mean_length(job, machine.given) / 2
    passes = (3 + recomputed) if train else 1
    per_rank = token_flops(role.shape, context, critic=role.critic) * passes * tokens
    compute = per_rank / layout.world / machine.flops(role.element)
    sent = _layer_messages(role, tokens / layout.dp, train=train, recomputed=recomputed)
    spans = _spans(role)
    parts = {"compute": compute} | {f"{k} messages": v / machine.link(spans[k]) for k, v in sent.items()}
    share = bubble_share(role, count)
    if share:
        parts["bubble"] = sum(parts.values()) * share / (1 - share)
    return PhaseTime("", parts, sent, share)


def _forward(name: str, role: Role, machine: Machine, job: Job) -> PhaseTime:
    tokens = job.samples * _mean_length(job, machine.given)
    one = _pass(role, machine, job, tokens, role.forward, train=False, count=micro_batches(role, tokens, role.forward))
    return PhaseTime(name, one.parts, one.sent, one.bubble)


def _update(role: Role, machine: Machine, job: Job) -> PhaseTime:
    """All optimizer steps of a role, gradients reduced and weights gathered in each, nothing overlapped."""
    tokens = job.samples * _mean_length(job, machine.given)
    count = micro_batches(role, tokens * role.epochs / role.steps, role.train)
    one = _pass(role, machine, job, tokens * role.epochs, role.train, train=True, count=count)
    worst = max(range(role.layout.pp), key=lambda stage: role_state(role, stage).total)
    state, group = role_state(role, worst), groups(role.layout)[0]
    share = (group - 1) / group
    sent = dict(one.sent)
    if group > 1:
        each = state.gradients + state.weights if role.distributed else 2 * state.gradients
        sent["DP"] = role.steps * share * each
    parts = dict(one.parts)
    if "DP" in sent:
        parts["DP messages"] = sent["DP"] / machine.link(_spans(role)["DP"])
    # The optimizer reads and writes its state once, reads gradients and writes weights.
    touched = 2 * state.optimizer + 2 * state.gradients + state.weights
    parts["optimizer"] = role.steps * touched / (machine.card.hbm * machine.given.memory)
    if role.offload != "none":
        moved = state.optimizer + (state.weights if role.offload == "all" else 0)
        parts["offload"] = 2 * moved / (machine.card.host * machine.given.links)
    return PhaseTime(f"update_{role.name}", parts, sent, one.bubble)


def _generate(machine: Machine, job: Job) -> PhaseTime:
    """The embedded engine: every rank decodes its share in batches that fill the cache, to the longest response."""
    shape, given = job.shape, machine.given
    longest = job.prompt + job.response
    mine = -(-job.samples // job.world)
    rows = min(max(job.cache_tokens // longest, 1), mine)
    batches = -(-mine // rows)
    weights = job.engine * total_parameters(shape)
    cached = 2 * shape.layers * shape.kv_width * job.engine * rows * (job.prompt * given.fill + job.response / 2)
    read = (weights + cached) / (machine.card.hbm * given.memory)
    compute = rows * token_flops(shape, longest / 2) / machine.flops(job.engine)
    steps = batches * job.response
    prefill = mine * job.prompt * given.fill * token_flops(shape, job.prompt / 4) / machine.flops(job.engine)
    parts = {
        "decode": steps * max(read, compute),
        "launching": steps * shape.layers * given.layer_overhead,
        "prefill": prefill,
    }
    return PhaseTime("gen", parts, {})


def _sync(machine: Machine, job: Job) -> PhaseTime:
    """Every rank receives the whole policy, tensor by tensor."""
    size = float(job.engine * total_parameters(job.shape))
    return PhaseTime("sync_weights", {"gather": size / machine.link(job.world)}, {"weights": size})


def phase_times(job: Job, machine: Machine) -> list[PhaseTime]:
    """The phases of an iteration in order; what takes no time worth mentioning is left out."""
    found = [_generate(machine, job)] if job.engine else []
    for role in job.roles:
        if role.name.startswith("reward "):
            found.append(_forward("reward", role, machine, job))
    for name, phase in (("actor", "old_log_prob"), ("reference", "ref"), ("critic", "values")):
        if (role := job.role(name)) is not None:
            found.append(_forward(phase, role, machine, job))
    found += [_update(role, machine, job) for role in job.roles if role.train is not None]
    return [*found, _sync(machine, job)] if job.engine else found


def iteration_seconds(job: Job, times: list[PhaseTime]) -> float:
    """The iteration; updates of roles on disjoint ranks run at the same time."""
    updates = {time.name: time.seconds for time in times if time.name.startswith("update_")}
    rest = sum(time.seconds for time in times if time.name not in updates)
    actor, critic = job.role("actor"), job.role("critic")
    apart = critic is not None and not set(actor.layout.ranks) & set(critic.layout.ranks)
    return rest + (max(updates.values()) if apart else sum(updates.values()))
