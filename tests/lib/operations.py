"""Count the operations that a program runs on this thread, and the memory that they allocate."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fshard as fs
from fshard._core.torch import FakeTensor, TorchDispatchMode, storage_id


class Allocation(NamedTuple):
    """A storage that an operation allocated: elements of the tensor it was allocated for, and bytes."""

    numel: int
    nbytes: int


class Operations(TorchDispatchMode):
    """Operations run within, and the storages allocated by them, on one device or on all.

    counts:    number of runs of each operation
    shapes:    shapes of all results
    allocated: one Allocation for each storage allocated
    peak:      most bytes in such storages at one time
    """

    def __init__(self, device: torch.device | None = None, *, fake: bool = False) -> None:
        """Count the tensors on a device, or on any; with `fake` also those without values."""
        super().__init__()
        self.device, self.fake = device, fake
        self.counts: Counter[Any] = Counter()
        self.shapes: set[torch.Size] = set()
        self.allocated: list[Allocation] = []
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def live(self) -> int:
        """Bytes of the storages allocated within that are still alive."""
        return sum(n for ref, n in self._live.values() if not ref.expired())

    @property
    def largest(self) -> int:
        """Bytes of the largest storage allocated."""
        return max((a.nbytes for a in self.allocated), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_id(x) for x in fs.tree.leaves([args, kwargs]) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.counts[func] += 1
        for x in fs.tree.leaves(out):
            counts = isinstance(x, torch.Tensor) and self.device in (None, x.device)
            if counts and (self.fake or not isinstance(x, FakeTensor)):
                self.shapes.add(x.shape)
                if storage_id(x) not in before:
                    storage = x.untyped_storage()
                    self.allocated.append(Allocation(x.numel(), storage.nbytes()))
                    self._live[storage_id(x)] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, n) for key, (ref, n) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(n for _, n in self._live.values()))
        return out
