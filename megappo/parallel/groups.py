"""Several parallel layouts in one process: each role's view of megatron-core's global `parallel_state`.

megatron-core keeps its process groups in module globals. A `ParallelContext` owns one complete set of them;
`with context:` makes it current and restores the previous one afterwards. (Passing process groups explicitly
still leaves places in 0.16.1 that read the globals: vocabulary cross entropy, attention with more TP ranks than
query groups, MoE and MLA.)
"""

from __future__ import annotations

import torch.distributed as dist

from megappo.parallel import backend
from megappo.parallel.layout import ParallelLayout

_cache: dict[tuple, ParallelContext] = {}


def _state_names(module) -> list[str]:
    return [name for name in vars(module) if name.startswith("_") and name[1:2].isupper()]


class ParallelContext:
    """One layout's process groups. Creating one is collective: every rank creates the same ones in order."""

    def __init__(self, layout: ParallelLayout, seed: int = 1234):
        backend.install()
        from megatron.core import parallel_state as ps
        from megatron.core import tensor_parallel

        if layout.world != dist.get_world_size():
            raise ValueError(f"layout has {layout.world} ranks, the process group {dist.get_world_size()}")
        self.layout = layout
        self.rank = dist.get_rank()
        self.coords = layout.coordinates(self.rank)
        self._ps = ps
        self._outer: list[dict] = []
        outer = self._grab()
        self._clear()
        try:
            ps.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            self._state = self._grab()
        finally:
            self._put(outer)
        self.tp_group = self._state["_TENSOR_MODEL_PARALLEL_GROUP"]
        self.pp_group = self._state["_PIPELINE_MODEL_PARALLEL_GROUP"]
        self.cp_group = self._state["_CONTEXT_PARALLEL_GROUP"]
        self.dp_group = self._state["_DATA_PARALLEL_GROUP"]
        self.dp_cp_group = self._state["_DATA_PARALLEL_GROUP_WITH_CP"]

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.layout.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage in this rank's pipeline."""
        c = self.coords
        return self.layout.rank(tp=c.tp, cp=c.cp, dp=c.dp, pp=self.layout.pp - 1)

    def _grab(self) -> dict:
        return {name: getattr(self._ps, name) for name in _state_names(self._ps)}

    def _put(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self._ps, name, value)

    def _clear(self) -> None:
        for name in _state_names(self._ps):
            setattr(self._ps, name, [] if isinstance(getattr(self._ps, name), list) else None)

    def __enter__(self) -> ParallelContext:
        self._outer.append(self._grab())
        self._put(self._state)
        return self

    def __exit__(self, *exc) -> None:
        self._state = self._grab()
        self._put(self._outer.pop())


def parallel_context(layout: ParallelLayout) -> ParallelContext:
    """The process-wide context of a layout: roles with the same layout share their process groups."""
    key = (layout, id(dist.group.WORLD))
    if key not in _cache:
        _cache[key] = ParallelContext(layout)
    return _cache[key]
