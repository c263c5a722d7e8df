"""Table of what is known of every tensor in a region, and of in-place writes to the memory that tensors share.

The table forgets tensors and storages that are freed. torch's weak reference to a storage would keep a block of the
heap from being freed, next to the block of the values: a step would leave such blocks between all the memory that it
frees, and the allocator could not join it, use it for larger tensors or return it.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .types import FREE, TensorInfo, history_like, join


class _Write(NamedTuple):
    """A range of bytes of a storage that an in-place operation wrote, and the facts about the written values."""

    low: int
    high: int
    info: TensorInfo


V = TypeVar("V")
_FEWEST = 256  # entries of a table from which freed ones are removed


class WeakTable(Generic[V]):
    """Values by tensor or storage, found by identity, until it is freed.

    `torch.utils.weak` makes a reference for each look-up, and compares references in Python. Here a look-up is one of
    a dict: the checker makes several for each operation. Entries of freed objects go when the table has doubled, or
    when a new object has the id: a callback for each would cost more than all look-ups.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}
        self._limit = _FEWEST

    def get(self, x: Any) -> V | None:
        """Return the value of `x`; None if it has none."""
        entry = self._entries.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def __setitem__(self, x: Any, value: V) -> None:
        self._entries[id(x)] = weakref.ref(x), value
        if len(self._entries) > self._limit:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
            self._limit = max(_FEWEST, 2 * len(self._entries))


class TypeTable:
    """Facts by tensor; where a tensor has none, facts of its storage; corrected by in-place writes to its bytes."""

    def __init__(self) -> None:
        self._by_tensor: WeakTable[TensorInfo] = WeakTable()
        self._by_storage: WeakTable[TensorInfo] = WeakTable()  # of its first tensor
        self._writes: WeakTable[list[_Write]] | None = None  # before the first one

    def get(self, x: Tensor) -> TensorInfo | None:
        """Return the facts of a tensor; if no operation made it (an nn.Parameter), the facts of its storage.

        `None` of a tensor that the table does not know.
        """
        info = self._by_tensor.get(x)
        if info is not None and self._writes is None:
            return info
        if _has_no_single_storage(x):
            return info or FREE
        storage = x.untyped_storage()
        info = info or self._by_storage.get(storage)
        if info is None or self._writes is None:
            return info
        if writes := self._writes.get(storage):
            low, high = _byte_range(x)
            overlapping = [w for w in writes if w.low < high and low < w.high]
            if overlapping:
                last = overlapping[-1].info
                type = join([info.type, *(w.info.type for w in overlapping)], x)
                info = info._replace(type=type, op=last.op, site=last.site, history=last.history)
        return info

    def set(self, x: Tensor, info: TensorInfo, *, alias: bool = False) -> None:
        """Set the facts of a plain tensor; an `alias` shares memory with a tensor of another type."""
        self._by_tensor[x] = info
        if alias or _has_no_single_storage(x):
            return
        storage = x.untyped_storage()
        first = self._by_storage.get(storage)
        if first is None:
            self._by_storage[storage] = info
        elif first.type != info.type:  # parts of one buffer have several types: for example the leaves of one transfer
            self._by_storage[storage] = FREE

    def set_storage(self, x: Tensor, info: TensorInfo) -> None:
        """Set the facts of all tensors that share memory with one that no operation of the region made."""
        self._by_storage[x.untyped_storage()] = info

    def write(self, x: Tensor, new: TensorInfo, *, overwrites: bool) -> None:
        """Record that an in-place operation wrote values like `new` to `x`, and so to all tensors that share bytes.

        `overwrites`: the operation does not read the old values.
        """
        storage = x.untyped_storage()
        low, high = _byte_range(x)
        replaces_all = overwrites and high - low == x.numel() * x.element_size()
        old = self.get(x) or FREE
        type = new.type if replaces_all else join([old.type, new.type], x)
        if not (type.varying or type.invariant):  # zeros in the place of values that varied
            new = new._replace(history=history_like(new.history.like | old.history.like | old.type.varying))
        self._writes = WeakTable() if self._writes is None else self._writes
        others = [w for w in self._writes.get(storage) or () if not (replaces_all and low <= w.low and w.high <= high)]
        info = old._replace(type=type, op=new.op, site=new.site, history=new.history)
        self._by_tensor[x] = info
        self._writes[storage] = [*others, _Write(low, high, info)]


def _has_no_single_storage(x: Tensor) -> bool:
    return x.layout is not torch.strided or x.is_nested or x.is_mkldnn


def _byte_range(x: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the byte after its last."""
    start = int(x.storage_offset())
    n = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return start * x.element_size(), (start + n) * x.element_size()
