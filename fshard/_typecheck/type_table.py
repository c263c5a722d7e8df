"""What the checker knows of every tensor, and of the memory they share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from fshard._torch_compat import storage_id as storage_of
from fshard._torch_compat import unwrapped

from .types import FREE, Fact, Type, join


class _Written(NamedTuple):
    """Bytes of a storage that were written in place, and with what."""

    held: StorageWeakRef
    low: int
    high: int
    type: Type


class Ledger:
    """The fact of each tensor, by the tensor; of others, by their storage; and what was written in place, by bytes."""

    def __init__(self) -> None:
        self._facts: Any = WeakTensorKeyDictionary()
        self._storages: dict[int, tuple[StorageWeakRef, Fact]] = {}  # of what was first in them
        self._written: dict[int, list[_Written]] = {}  # what in-place writes brought to storages

    def fact(self, x: Tensor) -> Fact:
        """What is known of a tensor; of one that no operation made (an nn.Parameter of it), what is of its storage."""
        x = unwrapped(x)
        found: Fact | None = self._facts.get(x)
        if _odd(x):
            return found or FREE
        at = storage_of(x)
        if found is None:
            held, known = self._storages.get(at, (None, FREE))
            found = known if held is not None and _alive(held) else FREE
        if at in self._written:
            low, high = _span(x)
            kinds = [w.type for w in self._written[at] if _alive(w.held) and w.low < high and low < w.high]
            if kinds:
                found = found._replace(type=join([found.type, *kinds], x))
        return found

    def set(self, x: Tensor, fact: Fact, *, alias: bool = False) -> None:
        """Write down what is known of a tensor; as an `alias` it shares memory with one that is something else."""
        x = unwrapped(x)
        self._facts[x] = fact
        if not alias and not _odd(x):
            at = storage_of(x)
            held, known = self._storages.get(at, (None, fact))
            if held is None or not _alive(held):
                self._storages[at] = _reference(x), fact
            elif known.type != fact.type:  # one storage, several types: of a transfer, say
                self._storages[at] = held, FREE

    def write(self, x: Tensor, old: Type, new: Type, *, over: bool) -> None:
        """An in-place operation, `over` what was there: the tensor, and all that share its bytes, are what it wrote."""
        low, high = _span(x)
        dense = high - low == x.numel() * x.element_size()
        kind = new if over and dense else join([old, new], x)
        at = storage_of(x)
        kept = [w for w in self._written.get(at, ())
                if _alive(w.held) and not (over and dense and low <= w.low and w.high <= high)]  # fmt: skip
        self._facts[x] = (self._facts.get(x) or self.fact(x))._replace(type=kind)
        self._written[at] = [*kept, _Written(_reference(x), low, high, kind)]


def _reference(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def _alive(held: StorageWeakRef) -> bool:
    return not held.expired()  # type: ignore[no-untyped-call]


def _odd(x: Tensor) -> bool:
    """Whether a tensor has no one storage."""
    return x.layout is not torch.strided or x.is_nested or x.is_mkldnn


def _span(x: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    low = int(x.storage_offset())
    n = 1 + sum((k - 1) * step for k, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return low * x.element_size(), (low + n) * x.element_size()


__all__ = ["Ledger"]
