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
    yield from _not_supported_yet(prefix, parallel)
    size = parallel.model_parallel_size
    if world_size is not None and world_size % size:
        tp, pp, cp = (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
        )
        text = f"tensor x pipeline x context = {tp} x {pp} x {cp} = {size} ranks do not divide the {world_size}"
        yield Problem(f"{prefix}.tensor_model_parallel_size", f"{text} of this run; change one of them", tp)
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        text = "has no effect at tensor_model_parallel_size 1: ignored"
        yield Problem(f"{prefix}.sequence_parallel", text, True, note=True)
    if facts is not None:
        yield from _check_widths(prefix, parallel.tensor_model_parallel_size, facts)
    yield from _check_depth(prefix, parallel, facts.layers if facts else None)


def _not_supported_yet(prefix: str, parallel: ParallelConfig) -> Iterator[Problem]:
    """The one place that refuses what the engine cannot do yet; delete lines as it learns."""
    for name in ("context_parallel_size", "expert_model_parallel_size"):
        value = getattr(parallel, name)
        if value > 1:
            yield Problem(f"{prefix}.{name}", "more than 1 is not supported yet; set it to 1", value)


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
