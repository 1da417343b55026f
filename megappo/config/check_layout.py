"""Does a model fit a parallel layout, and the layout the number of ranks?"""

from collections.abc import Iterator

from megappo.config.model_folder import ModelFacts
from megappo.config.problems import Problem
from megappo.config.schema.parallel import ParallelConfig


def check_layout(
    prefix: str, parallel: ParallelConfig, facts: ModelFacts | None, world_size: int | None
) -> Iterator[Problem]:
    """Problems of one role's layout; `facts` None: no model to check against; world_size in ranks or None.

    PP 2 with VPP 2 needs overlapped point-to-point messages to be right; the engine sets that itself, so
    it is accepted here. A vocabulary that TP does not divide is accepted too (it is padded).
    """
    size = parallel.model_parallel_size
    if world_size is not None:
        end, total = parallel.first_rank + parallel.ranks_of(world_size), world_size
        world_size = parallel.ranks_of(world_size)
        if world_size < 1 or end > total:
            key = f"{prefix}.first_rank" if parallel.num_ranks is None else f"{prefix}.num_ranks"
            text = f"the role needs ranks {parallel.first_rank} to {end - 1} but the run has {total}; lower it"
            yield Problem(key, text, parallel.num_ranks or parallel.first_rank)
            return
    if world_size is not None and world_size % size:
        tp, pp, cp = (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
        )
        text = f"tensor x pipeline x context = {tp} x {pp} x {cp} = {size} ranks do not divide the {world_size}"
        yield Problem(f"{prefix}.tensor_model_parallel_size", f"{text} of this run; change one of them", tp)
    elif world_size is not None and facts is not None and facts.experts:
        yield from _check_stage(prefix, parallel, world_size)
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        text = "has no effect at tensor_model_parallel_size 1: ignored"
        yield Problem(f"{prefix}.sequence_parallel", text, True, note=True)
    if facts is not None:
        yield from _check_widths(prefix, parallel.tensor_model_parallel_size, facts)
        yield from _check_experts(prefix, parallel, facts)
    yield from _check_depth(prefix, parallel, facts.layers if facts else None)


def _check_experts(prefix: str, parallel: ParallelConfig, facts: ModelFacts) -> Iterator[Problem]:
    """Do the experts fit expert and expert-tensor parallelism, and does megatron-core run them so?"""
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    if facts.experts is None:
        if ep > 1:
            text = "the model has no experts to share out; set it to 1"
            yield Problem(f"{prefix}.expert_model_parallel_size", text, ep)
        return
    if facts.experts % ep:
        text = f"must divide the model's {facts.experts} experts"
        yield Problem(f"{prefix}.expert_model_parallel_size", text, ep)
    if facts.expert_ffn is not None and facts.expert_ffn % etp:
        text = f"must divide the experts' {facts.expert_ffn} feed-forward columns"
        yield Problem(f"{prefix}.expert_tensor_parallel_size", text, etp)
    if tp > 1 and not parallel.sequence_parallel:
        text = "megatron-core trains experts at tensor_model_parallel_size > 1 only with it; set it to true"
        yield Problem(f"{prefix}.sequence_parallel", text, False)


def _check_stage(prefix: str, parallel: ParallelConfig, world_size: int) -> Iterator[Problem]:
    """The ranks of one pipeline stage are dealt out a second time for the experts."""
    stage = world_size // parallel.pipeline_model_parallel_size
    ep = parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if stage % (ep * etp):
        text = f"expert x expert-tensor = {ep} x {etp} ranks do not divide the {stage} of a pipeline stage; change one"
        yield Problem(f"{prefix}.expert_model_parallel_size", text, ep)


def _check_widths(prefix: str, tp: int, facts: ModelFacts) -> Iterator[Problem]:
    key = f"{prefix}.tensor_model_parallel_size"
    for count, what in (
        (facts.heads, "attention heads"),
        (facts.ffn, "feed-forward columns (intermediate_size)"),
    ):
        if count is not None and count % tp:
            yield Problem(key, f"must divide the model's {count} {what}", tp)
    kv = facts.kv_heads
    if kv is not None and kv % tp and tp % kv:
        yield Problem(key, f"must divide the model's {kv} key/value heads or be a multiple of them", tp)


def _check_depth(prefix: str, parallel: ParallelConfig, layers: int | None) -> Iterator[Problem]:
    """Can the layers be dealt out to pp * vpp model chunks?"""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.vpp
    if vpp > 1 and pp == 1:
        text = "model chunks need a pipeline; set pipeline_model_parallel_size >= 2 or remove it"
        yield Problem(f"{prefix}.virtual_pipeline_model_parallel_size", text, vpp)
        return
    ends = {
        name: count
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if (count := getattr(parallel, name)) is not None
    }
    key = f"{prefix}.pipeline_model_parallel_size"
    if ends and pp == 1:
        name, count = next(iter(ends.items()))
        yield Problem(f"{prefix}.{name}", "an uneven split needs a pipeline; remove it", count)
        return
    for name, count in ends.items():
        if count % vpp:
            text = f"must be a multiple of virtual_pipeline_model_parallel_size ({vpp})"
            yield Problem(f"{prefix}.{name}", text, count)
    if layers is None:
        return
    rest, stages = layers - sum(ends.values()), pp - len(ends)
    chunks = stages * vpp
    if not ends and layers % chunks:
        what = f"pipeline x virtual = {pp} x {vpp}" if vpp > 1 else f"{pp} pipeline stages"
        text = f"{what} do not divide the model's {layers} layers; change it, or set the first stage's"
        yield Problem(key, text, pp)
    elif ends and (rest < 0 or (rest > 0 if stages == 0 else rest % chunks or rest == 0)):
        text = f"{rest} layers are left for the {stages} other stages ({vpp} chunks each); change the split"
        yield Problem(key, text, pp)
