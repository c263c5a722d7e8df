"""Bytes that tensors hold while a program runs, on the thread that looks."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs


class LiveBytes(TorchDispatchMode):
    """The most bytes that were held at once by tensors made within; on one device, if that is named."""

    def __init__(self, device=None):
        super().__init__()
        self.device = device
        self.peak = 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        old = {x.untyped_storage()._cdata for x in fs.tree.leaves([args, kwargs]) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in fs.tree.leaves(out):
            if isinstance(x, torch.Tensor) and self.device in (None, x.device):
                s = x.untyped_storage()
                if s._cdata not in old:
                    self._live[s._cdata] = (StorageWeakRef(s), s.nbytes())
        self._live = {at: (ref, n) for at, (ref, n) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(n for _, n in self._live.values()))
        return out
