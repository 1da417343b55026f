"""Model and optimizer of one role as a Megatron distributed checkpoint: saved in one layout, loaded in any."""

from __future__ import annotations

import gc
import pickle
import queue
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.checkpoint.optimizer_state import optimizer_states, regrouped
from megappo.checkpoint.staging import Staging
from megappo.engine.engine import ModelEngine
from megappo.errors import UserError
from megappo.parallel.reduce import gather_objects

_METADATA = {
    # Optimizer state is stored by model parameter, not by the buffers of one layout: loads in any other layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def _sharded_state(engine: ModelEngine, staging: Staging, *, loading: bool) -> dict:
    """What this rank holds of the role; nothing outside the role's layout. Gathered optimizer states in `staging`."""
    if not engine.member:
        return {}
    engine.wake()
    metadata = {**_METADATA, "dp_cp_group": engine.context.dp_cp_group}
    chunks = engine.chunks
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
    if engine.optimizer is not None:
        model_state = dict(state) if len(chunks) > 1 else state["model"]
        with optimizer_states(staging):
            state["optimizer"] = engine.optimizer.inner.sharded_state_dict(
                model_state, is_loading=loading, metadata=metadata
            )
    return state


@contextmanager
def _cheap_collections() -> Iterator[None]:
    """megatron's optimizer runs a full garbage collection for every save, a third of a second for the objects of the
    imported libraries alone: let it look at younger ones only."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _in_process_writes(staging: Staging) -> Iterator[None]:
    """Megatron's file writer without its helper processes, writing what has been copied into `staging`.

    It writes each file in a forked process and collects the results through a manager process. A save that waits
    for the files needs neither: they cost seconds, fork a process that has threads, and outlive a rank that is killed.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategy

    class Planned:
        """A save planner whose tensors are in `staging`: megatron copies views and leaves live tensors as they are."""

        def __init__(self, planner) -> None:
            self._planner = planner

        def resolve_data(self, item):
            data = self._planner.resolve_data(item)
            return staging.hold(data) if isinstance(data, Tensor) else data

    class Writer(filesystem_async.FileSystemWriterAsync):
        def prepare_write_data(self, plan, planner) -> None:
            super().prepare_write_data(plan, Planned(planner))
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        def get_save_function_and_args(self):
            save, preload, args = super().get_save_function_and_args()
            return save and self._write, preload, args

        def _write(self, rank: int, buckets: list, results: queue.Queue) -> None:
            transforms = [self.transforms] if hasattr(self, "transforms") else []
            done: queue.Queue = queue.Queue()
            pending: queue.Queue = queue.Queue()
            for number, bucket in enumerate(buckets):
                pending.put(number)
                self.write_preloaded_data(transforms, number, bucket, done, pending, True)
            outcomes = dict(done.get() for _ in buckets)
            for number, outcome in outcomes.items():
                if isinstance(outcome, Exception):  # torch reports a full disk as a RuntimeError
                    why = (str(outcome).splitlines() or [type(outcome).__name__])[0]
                    raise UserError(f"cannot write {buckets[number][0]} ({why}): is the disk full?") from outcome
            results.put(outcomes)

    real = torch_strategy.FileSystemWriterAsync, filesystem_async._get_write_results_queue
    torch_strategy.FileSystemWriterAsync, filesystem_async._get_write_results_queue = Writer, queue.Queue
    try:
        yield
    finally:
        torch_strategy.FileSystemWriterAsync, filesystem_async._get_write_results_queue = real


class PendingSave:
    """A role's shards on their way to the disk: a copy of them is written by a thread while training goes on."""

    def __init__(self, request, staging: Staging):
        self._finalize = request.finalize_fns
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if request.async_fn is None:  # nothing to write on this rank
            return
        staging.busy = True

        def write() -> None:
            try:
                request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
            except BaseException as err:
                self._error = err
            finally:
                staging.busy = False

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def written(self) -> bool:
        """This rank's part is on disk."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for this rank's part, then write what describes all parts. Collective."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        dist.barrier()
        for finalize in self._finalize:
            finalize()


_kept: WeakKeyDictionary[ModelEngine, Staging] = WeakKeyDictionary()


def _staging_for(engine: ModelEngine, background: bool) -> Staging:
    staging = _kept.setdefault(engine, Staging(pinned=True)) if background else Staging()
    if staging.busy:  # the save before has not been finished: its copy must stay as it is
        return Staging()
    staging.rewind()
    return staging


def save_engine(engine: ModelEngine, folder: Path, *, background: bool = False) -> PendingSave:
    """Begin to write the role into `folder`, every rank its part; whole only after `finish`. Collective.

    Args:
        background: training goes on meanwhile, so the time until this returns counts: keep the host memory of the copy
            for the next save.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    folder.mkdir(parents=True, exist_ok=True)
    staging = _staging_for(engine, background)
    with engine.context, _in_process_writes(staging):
        with _cheap_collections():
            state = _sharded_state(engine, staging, loading=False)
        strategy = _shared_save(engine, get_default_save_sharded_strategy("torch_dist"))
        state |= _common_state_for_rank_0(engine, state)
        request = dist_checkpointing.save(
            state, str(folder), strategy, async_sharded_save=True, content_metadata=_METADATA
        )
        return PendingSave(request, staging)


def _shared_save(engine: ModelEngine, strategy):
    """`strategy` with the shards that several members hold dealt out among them."""
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.validation import determine_global_metadata

    class Bystander(FullyParallelSaveStrategyWrapper):
        """A rank outside the role has nothing to deal out, but megatron's check of the result is over all ranks."""

        def apply_saving_parallelization(self, sharded_state_dict) -> None:
            determine_global_metadata(sharded_state_dict)

    if engine.member:
        return FullyParallelSaveStrategyWrapper(strategy, engine.context.dp_cp_group)
    return Bystander(strategy)


def _common_state_for_rank_0(engine: ModelEngine, state: dict) -> dict:
    """megatron writes what is not a shard on global rank 0, which may not belong to the role. Collective."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    first = engine.layout.ranks[0]
    if first == 0:
        return {}
    common = {}
    if dist.get_rank() == first:
        _, common = extract_matching_values(state, lambda value: isinstance(value, ShardedBase))
    common = gather_objects(common)[first]
    return common if dist.get_rank() == 0 else {}


def load_moments(engine: ModelEngine, folder: Path) -> None:
    """Read the optimizer's moments (and its step count) from `folder`; the weights stay as they are. Collective."""
    engine.wake()
    # megatron's optimizer state holds the fp32 masters beside the moments: all is loaded, and the weights put back.
    tensors = [p.data for chunk in engine.chunks for p in chunk.parameters()] if engine.member else []
    if engine.optimizer is not None:
        tensors += engine.optimizer.masters()
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    load_engine(engine, folder)
    for tensor, value in kept:
        tensor.copy_(value)


def _cause(err: BaseException) -> str:
    """The last line that says something: torch ends some messages with where to read more."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip() and "torch.load" not in line]
    return lines[-1] if lines else type(err).__name__


def load_engine(engine: ModelEngine, folder: Path) -> None:
    """Read the role from `folder`, whatever layout wrote it. Collective.

    Raises:
        UserError: the checkpoint is damaged, or of another model.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
    from torch.distributed.checkpoint import CheckpointException

    with engine.context:
        state = _sharded_state(engine, Staging(), loading=True)
        strategy = get_default_load_sharded_strategy(str(folder))
        if engine.member:
            strategy = FullyParallelLoadStrategyWrapper(strategy, engine.context.dp_cp_group)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # about what megatron itself calls
                loaded = dist_checkpointing.load(state, str(folder), strategy)
        except (CheckpointingException, CheckpointException, pickle.UnpicklingError, EOFError) as err:
            cause = _cause(err)
            if "mismatch" in cause:
                raise UserError(f"{folder} does not fit the model ({cause}): use another trainer.output_dir") from None
            raise UserError(
                f"{folder} cannot be read ({cause}): it is damaged, or of another model; delete {folder.parent} to "
                "continue from the one before, or use another trainer.output_dir"
            ) from None
        if not engine.member:
            return
        chunks = engine.chunks
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{i}"], strict=True)
        if engine.optimizer is not None:
            parts = len(engine.optimizer.inner.chained_optimizers)
            engine.optimizer.inner.load_state_dict(regrouped(loaded["optimizer"], parts))
