"""Several parallel layouts in one process: each role's view of megatron-core's global `parallel_state`.

megatron-core keeps its process groups in module globals. A `ParallelContext` owns one complete set of them;
`with context:` makes it current and restores the previous one afterwards. (Passing process groups explicitly
still leaves places in 0.16.1 that read the globals: vocabulary cross entropy, attention with more TP ranks than
query groups, MoE and MLA.)
"""

from __future__ import annotations

import contextlib
import types

import torch.distributed as dist

from megappo.parallel import backend
from megappo.parallel.layout import ParallelLayout

_cache: dict[tuple, ParallelContext] = {}


def _state_names(module) -> list[str]:
    return [name for name in vars(module) if name.startswith("_") and name[1:2].isupper()]


class _View(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, base, **replaced):
        super().__init__(base.__name__)
        self.__dict__.update(replaced, _base=base)

    def __getattr__(self, name):
        return getattr(self._base, name)


def _as_seen_from(ranks: range, base):
    """`torch` as megatron's `parallel_state` shall see it, so that it divides `ranks` as if they were all there are.

    megatron-core lays its groups over the whole world only. Every rank of the world still creates every group, with
    the global ranks; a rank outside is rank -1 and becomes a member of none.
    """

    def get_world_size(group=None) -> int:
        return len(ranks) if group is None else dist.get_world_size(group)

    def get_rank(group=None) -> int:
        if group is not None:
            return dist.get_rank(group)
        return ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1

    def new_group(ranks_inside=None, **options):
        inside = options.pop("ranks", None) or ranks_inside
        return dist.new_group([ranks[r] for r in inside], **options)

    world = {"get_world_size": get_world_size, "get_rank": get_rank, "new_group": new_group}
    return _View(base, distributed=_View(dist, **world))


class ParallelContext:
    """One layout's process groups. Creating one is collective over all ranks, in or outside the layout.

    `coords` and the groups are None on a rank outside.
    """

    def __init__(self, layout: ParallelLayout, seed: int = 1234):
        backend.install()
        from megatron.core import parallel_state as ps
        from megatron.core import tensor_parallel

        if layout.ranks[-1] >= dist.get_world_size():
            raise ValueError(f"the layout needs ranks {layout.ranks}, the process group has {dist.get_world_size()}")
        self.layout = layout
        self.rank = dist.get_rank()
        self.member = self.rank in layout.ranks
        self.coords = layout.coordinates(self.rank) if self.member else None
        everyone = len(layout.ranks) == dist.get_world_size()
        self.all_group = dist.group.WORLD if everyone else dist.new_group(list(layout.ranks))
        self._ps = ps
        self._outer: list[dict] = []
        outer, real_torch = self._grab(), ps.torch
        self._clear()
        try:
            ps.torch = _as_seen_from(layout.ranks, real_torch)
            ps.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
            )
            ps.torch = real_torch
            self._globalise(layout.ranks)
            if self.member:
                tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            self._state = self._grab()
        finally:
            ps.torch = real_torch
            self._put(outer)
        self.tp_group = self._state["_TENSOR_MODEL_PARALLEL_GROUP"]
        self.pp_group = self._state["_PIPELINE_MODEL_PARALLEL_GROUP"]
        self.cp_group = self._state["_CONTEXT_PARALLEL_GROUP"]
        self.dp_group = self._state["_DATA_PARALLEL_GROUP"]
        self.dp_cp_group = self._state["_DATA_PARALLEL_GROUP_WITH_CP"]

    def _globalise(self, ranks: range) -> None:
        """megatron also keeps lists of ranks, which are compared with global ranks later on."""
        for name in _state_names(self._ps):
            if "RANKS" in name and isinstance(getattr(self._ps, name), list):
                setattr(self._ps, name, [ranks[r] for r in getattr(self._ps, name)])

    @property
    def is_last_stage(self) -> bool:
        return self.coords.pp == self.layout.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage in this rank's pipeline."""
        c = self.coords
        return self.layout.rank(tp=c.tp, cp=c.cp, dp=c.dp, pp=self.layout.pp - 1)

    @contextlib.contextmanager
    def as_world(self, module: types.ModuleType):
        """Let a megatron-core module that talks to "all ranks" talk to the layout's ranks only."""
        real, ranks = module.torch, self.layout.ranks

        def all_gather_object(out, value):
            dist.all_gather_object(out, value, group=self.all_group)

        everyone = {"get_world_size": lambda: len(ranks), "all_gather_object": all_gather_object}
        module.torch = _View(real, distributed=_View(dist, **everyone))
        try:
            yield
        finally:
            module.torch = real

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
