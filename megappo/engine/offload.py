"""Move a role's memory to the host and back while it is idle.

Works on storages, so that parameters which are views into one buffer (megatron's DDP) move once and stay views.
On a GPU the host copy is pinned; on a CPU the same calls free and restore the tensors, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class Offloadable:
    """A set of tensors that are on the device or on the host, all together. `keep` False: the values may be lost."""

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool = True):
        self._tensors = list(tensors)
        self._keep = keep
        self._host: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        self.on_device = True

    def offload(self) -> int:
        """Free the device memory; returns bytes freed. Idempotent."""
        if not self.on_device:
            return 0
        freed = 0
        for storage in _storages(self._tensors):
            size = storage.nbytes()
            self._host.append((storage, size, _to_host(storage) if self._keep else None))
            storage.resize_(0)
            freed += size
        self.on_device = False
        return freed

    def reload(self) -> None:
        """Take the device memory back, with the values (zeros if they were not kept). Idempotent."""
        for storage, size, host in self._host:
            storage.resize_(size)
            view = _bytes(storage)
            view.zero_() if host is None else view.copy_(host, non_blocking=True)
        if self._host and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._host = []
        self.on_device = True


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return host.copy_(_bytes(storage))
