"""Shell. What a trainer's memory is on each device, and how the trainer does without it while the engine has it.

Invariant: what is kept comes back bit for bit, and every tensor that shares its memory, a view or a gradient, with it:
storages are emptied and filled, tensors stay. Addresses change. Direction: device -> host -> device.

    cpu    gradients of a micro-step are freed; the rest lies already where an offload would bring it
    cuda   they are freed, and weights, moments and sums go to pinned memory of the host
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class Offload(Protocol):
    """Of one device. Both calls can be repeated."""

    def leave(self, *, kept: Iterable[Tensor], void: Iterable[Tensor]) -> None:
        """Give the device's memory back. Nothing in `void` counts any more."""
        ...

    def come_back(self) -> None:
        """All that left: what was kept as it was, the rest zeros. Raises torch's OutOfMemoryError."""
        ...


def offload_of(device: torch.device) -> Offload:
    return CudaOffload(device) if device.type == "cuda" else CpuOffload()


class CpuOffload:
    def __init__(self) -> None:
        self._freed: list[tuple[torch.UntypedStorage, int]] = []

    def leave(self, *, kept: Iterable[Tensor], void: Iterable[Tensor]) -> None:
        for storage in _storages(void):
            self._freed.append((storage, storage.nbytes()))
            storage.resize_(0)

    def come_back(self) -> None:
        while self._freed:
            storage, num_bytes = self._freed.pop()
            storage.resize_(num_bytes)
            _bytes_in(storage).zero_()


class CudaOffload:
    """Never run on a GPU so far. With a device that is none it moves the same bytes, into memory that is not pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._freed = CpuOffload()
        self._moved: list[tuple[torch.UntypedStorage, Tensor]] = []

    def leave(self, *, kept: Iterable[Tensor], void: Iterable[Tensor]) -> None:
        self._freed.leave(kept=(), void=void)
        is_cuda = self._device.type == "cuda"
        leaving = [s for s in _storages(kept) if s.device.type == self._device.type]  # counts of updates are the host's
        for storage in leaving:
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_cuda)
            self._moved.append((storage, host.copy_(_bytes_in(storage), non_blocking=is_cuda)))
        if is_cuda:
            torch.cuda.synchronize(self._device)
        for storage in leaving:
            storage.resize_(0)
        if is_cuda:
            torch.cuda.empty_cache()  # else it stays with this process

    def come_back(self) -> None:
        self._freed.come_back()
        for storage, host in self._moved:
            storage.resize_(host.nbytes)
            _bytes_in(storage).copy_(host, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._moved.clear()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each once, and none that has left."""
    found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes_in(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
