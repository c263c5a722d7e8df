"""Bytes of the tensors that are alive while a program runs on this thread."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fshard as fs
from fshard._torch_compat import TorchDispatchMode, storage_id


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes in tensors made within, on one device or on all."""

    def __init__(self, device=None):
        super().__init__()
        self.device = device
        self.peak = 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {storage_id(x) for x in fs.tree.leaves([args, kwargs]) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in fs.tree.leaves(out):
            if isinstance(x, torch.Tensor) and self.device in (None, x.device):
                storage = x.untyped_storage()
                if storage_id(x) not in before:
                    self._live[storage_id(x)] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, n) for key, (ref, n) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(n for _, n in self._live.values()))
        return out
