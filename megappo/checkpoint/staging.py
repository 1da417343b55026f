"""Host memory in which a checkpoint waits for its way to the disk while training changes the originals."""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Buffers that one save after another fills: memory that is touched for the first time costs more than the copy.

    A save asks for the same sizes in the same order as the one before it and gets the same buffers. Keeping it keeps a
    host copy of everything that is saved.

    Args:
        pinned: where there is a GPU: copies from it are faster, but getting such memory is slow.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned and torch.cuda.is_available()
        self._buffers: list[Tensor] = []
        self._given = 0
        self.busy = False  # what it holds has yet to be written

    def rewind(self) -> None:
        """Give the buffers out anew; what they hold may be overwritten from now on."""
        self._given = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat host tensor that is nobody else's until `rewind`."""
        if self._given < len(self._buffers):
            buffer = self._buffers[self._given]
            if buffer.numel() != numel or buffer.dtype != dtype:
                del self._buffers[self._given :]
        if self._given == len(self._buffers):
            self._buffers.append(torch.empty(numel, dtype=dtype, pin_memory=self._pinned))
        self._given += 1
        return self._buffers[self._given - 1]

    def hold(self, tensor: Tensor) -> Tensor:
        """`tensor` here, with a storage of its own size: itself if it lies here already, else a copy.

        A copy from a GPU may be under way still: synchronise before it is read.
        """
        tensor = tensor.detach()
        if not (self._has(tensor) and tensor.is_contiguous()):
            copy = self.empty(tensor.numel(), tensor.dtype).view(tensor.shape)
            tensor = copy.copy_(tensor, non_blocking=True)
        return _alone(tensor)

    def _has(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu":
            return False
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == buffer.data_ptr() for buffer in self._buffers[: self._given])


def _alone(tensor: Tensor) -> Tensor:
    """The same memory behind a storage that ends where the tensor ends: writers copy views of larger ones."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes or tensor.numel() == 0:
        return tensor
    raw = tensor.view(-1).view(torch.uint8).numpy()  # the array keeps the memory alive
    return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)
