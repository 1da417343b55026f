"""A plan as text and as plain data."""

from __future__ import annotations

from typing import Any

from megappo.planning.hardware import GIB
from megappo.planning.memory import RankPlan, engine_weights
from megappo.planning.parameters import total_parameters
from megappo.planning.plan import Candidate, Changes, Plan, Remedy


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


_TEXT = ("layout", "of which", "GB sent")  # columns of words


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = [i == 0 or rows[0][i] in _TEXT for i in range(len(widths))]
    cells = ([c.ljust(w) if at else c.rjust(w) for c, w, at in zip(row, widths, left, strict=True)] for row in rows)
    first, *rest = ("  ".join(row).rstrip() for row in cells)
    return [first, "  ".join("-" * width for width in widths), *rest]


def _where(rank: RankPlan) -> str:
    """Which ranks, in a few characters."""
    ranks = rank.ranks
    whole = len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1))
    text = f"{ranks[0]}-{ranks[-1]}" if whole else f"{ranks[0]}" + (", …" if len(ranks) > 1 else "")
    return text


def words(changes: Changes) -> str:
    """Changes as they are typed after the YAML file."""
    return " ".join(f"{key}={'null' if value is None else _word(value)}" for key, value in changes.items())


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plan_lines(plan: Plan) -> list[str]:
    """The report."""
    machine, job = plan.machine, plan.job
    lines = [
        f"{machine.world} ranks: {machine.nodes} nodes of {machine.per_node} {machine.card.name} "
        f"({_gib(machine.card.memory)} GiB); policy of {total_parameters(job.shape) / 1e9:.2f} B parameters",
        "",
        "State per rank (GiB): exact, as megatron-core allocates it; * fp32 masters and AdamW moments",
    ]
    rows = [["role", "ranks", "PP stage", "weights", "gradients", "optimizer*", "layout"]]
    for role in job.roles:
        seen = set()
        for rank in plan.ranks:
            stage = rank.stages.get(role.name)
            if stage is None or stage in seen:
                continue
            seen.add(stage)
            state, grid = rank.state[role.name], role.layout
            sizes = [_gib(state.weights), _gib(state.gradients), _gib(state.optimizer)]
            shape = f"TP {grid.tp} PP {grid.pp} VPP {grid.vpp} CP {grid.cp} DP {grid.dp}"
            shape += f" EP {grid.ep} ETP {grid.etp}" if role.shape.experts else ""
            rows.append([role.name, _where(rank), str(stage), *sizes, shape if len(seen) == 1 else ""])
    lines += _table(rows)
    lines += ["", "Memory of the fullest rank in each phase (GiB)", *_memory_table(plan)]
    lines += ["", "Time of an iteration (estimates: seconds, and GB that a rank sends)", *_time_table(plan)]
    return lines


def _memory_table(plan: Plan) -> list[str]:
    limit = plan.machine.card.memory
    rows = [["phase", "rank", "total", "free", "of which"]]
    names = dict.fromkeys(phase.name for rank in plan.ranks for phase in rank.phases)
    for name in names:
        at, phase = max(
            ((rank, phase) for rank in plan.ranks for phase in rank.phases if phase.name == name),
            key=lambda pair: pair[1].total,
        )
        parts = ", ".join(f"{part} {_gib(size)}" for part, size in phase.parts.items() if size >= GIB // 20)
        free = _gib(limit - phase.total) if phase.total <= limit else "DOES NOT FIT"
        rows.append([name, _where(at), _gib(phase.total), free, parts])
    return _table(rows)


def _time_table(plan: Plan) -> list[str]:
    rows = [["phase", "seconds", "bubble", "of which", "GB sent"]]
    for time in plan.times:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in time.parts.items() if seconds >= 0.05)
        sent = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in time.sent.items() if size >= 5e7)
        rows.append([time.name, f"{time.seconds:.1f}", f"{time.bubble:.0%}" if time.bubble else "", parts, sent])
    return [*_table(rows), f"iteration: about {plan.seconds:.0f} s"]


def verdict_lines(plan: Plan, remedy: Remedy | None) -> list[str]:
    """Does it fit, and if not, what to do."""
    misfit, card = plan.misfit, plan.machine.card
    if misfit is None:
        peak = plan.peak
        return [f"fits: at most {_gib(peak.peak.total)} of {_gib(card.memory)} GiB, in {peak.peak.name}"]
    largest = max(misfit.phase.parts, key=misfit.phase.parts.get)
    need = f"{misfit.phase.name} needs {_gib(misfit.phase.total)} of {_gib(card.memory)} GiB on rank"
    lines = [f"does not fit: {need} {misfit.rank.ranks[0]}; the largest part is {largest}"]
    if remedy is not None:
        more = f" on {remedy.nodes} nodes" if remedy.nodes != plan.machine.nodes else ""
        change = words(remedy.changes) or "no other change"
        lines.append(f"smallest change that fits{more}: {change}   (about {remedy.plan.seconds:.0f} s an iteration)")
    elif engine_weights(plan.job) + plan.machine.given.reserved > card.memory:
        size = _gib(engine_weights(plan.job))
        lines.append(
            f"no layout helps: the embedded rollout engine keeps the whole policy ({size} GiB) on every rank; use "
            "another rollout.engine or a larger card"
        )
    else:
        lines.append("no two small changes help, on up to four times the nodes: try --search")
    return lines


def assumption_lines(plan: Plan) -> list[str]:
    """What the estimates rest on."""
    given, card = plan.machine.given, plan.machine.card
    return [
        f"assumed: {given.compute:.0%} of peak FLOP/s, {given.links:.0%} of link and {given.memory:.0%} of memory "
        f"bandwidth; nothing overlaps; lengths {given.fill:.0%} of the longest; {_gib(given.reserved)} GiB for CUDA "
        f"and NCCL, {given.fragmentation:.0%} fragmentation; no rewards, no evaluation, no checkpoints",
        f"source: {card.source}",
    ]


def search_lines(candidates: list[Candidate]) -> list[str]:
    """The ranking."""
    if not candidates:
        return ["no layout fits"]
    rows = [["layout, all roles alike", "s/iteration", "peak GiB", "bubble", "recompute", "offload"]]
    for candidate in candidates:
        actor = candidate.plan.job.role("actor")
        grid, update = actor.layout, next(t for t in candidate.plan.times if t.name == "update_actor")
        text = f"TP {grid.tp} PP {grid.pp} VPP {grid.vpp} CP {grid.cp} DP {grid.dp}"
        text += f" EP {grid.ep}" if actor.shape.experts else ""
        peak = _gib(candidate.plan.peak.peak.total)
        recompute = str(candidate.changes["actor.parallel.recompute"] or "none")
        row = [text, f"{candidate.plan.seconds:.0f}", peak, f"{update.bubble:.0%}", recompute, actor.offload]
        rows.append(row)
    return [*_table(rows), "the first one: " + words(candidates[0].changes)]


def plan_data(plan: Plan, remedy: Remedy | None, candidates: list[Candidate] | None) -> dict[str, Any]:
    """Everything, for `--json`; bytes and seconds."""
    misfit = plan.misfit
    data: dict[str, Any] = {
        "gpu": plan.machine.card.name,
        "memory_bytes": plan.machine.card.memory,
        "nodes": plan.machine.nodes,
        "gpus_per_node": plan.machine.per_node,
        "parameters": total_parameters(plan.job.shape),
        "fits": plan.fits,
        "seconds_per_iteration": plan.seconds,
        "ranks": [
            {
                "ranks": list(rank.ranks),
                "pipeline_stages": rank.stages,
                "state": {name: vars(state) for name, state in rank.state.items()},
                "phases": {phase.name: phase.parts | {"total": phase.total} for phase in rank.phases},
            }
            for rank in plan.ranks
        ],
        "times": [
            {"phase": t.name, "seconds": t.seconds, "parts": t.parts, "sent_bytes": t.sent, "bubble": t.bubble}
            for t in plan.times
        ],
    }
    if misfit is not None:
        data["first_misfit"] = {"phase": misfit.phase.name, "rank": misfit.rank.ranks[0], "bytes": misfit.phase.total}
        data["smallest_change"] = remedy and {"changes": remedy.changes, "nodes": remedy.nodes}
    if candidates is not None:
        data["search"] = [
            {"changes": c.changes, "seconds": c.plan.seconds, "peak_bytes": c.plan.peak.peak.total} for c in candidates
        ]
    return data
