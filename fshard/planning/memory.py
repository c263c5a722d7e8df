"""The storages of a planned run, when each is alive, and what they are at the peak.

A storage of an argument is a parameter if forward reads it and the update reads or writes it too, or if its name says
`params`, `frozen` or `weights`; it is of the optimizer if forward does not read it, or if its name says `opt`. Storages
that a rank allocates are
- gathered: results of a gather of parameters, and copies of parameters, as in another dtype;
- buffers: those of transfers;
- gradients: those of backward that the update reads, that are alive after backward, or that a transfer sums to such;
- activations: those of forward and of a recomputation;
- other: those of backward and of the update, results, data.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._callsite import Site
from fshard._torch_compat import storage_id
from fshard.spec import short_dtype

from .events import Phase

_MOST_LARGEST = 8
PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "buffers", "other")


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors of one rank in a step.

    Attributes:
        peak: most bytes at one time, in the memory of the device.
        at: index of the event after which that is.
        where: the user's line of that event.
        parts: the bytes of each kind of tensor at the peak; they sum to `peak`.
        largest: the largest tensors at the peak: bytes, description, the user's line that made it.
        arguments: bytes of the arguments of the step.
        host: most bytes in host memory at one time, where that is not the device's.
        storages: all of the step, with the events between which they are alive.

    >>> plan.memory.peak, {part: n for part, n in plan.memory.parts.items() if n}
    (44, {'activations': 20, 'other': 24})
    """

    peak: int
    at: int
    where: Site | None
    parts: dict[str, int]
    arguments: int
    host: int = 0
    largest: tuple[tuple[int, str, Site | None], ...] = ()
    storages: tuple[Storage, ...] = field(default=(), repr=False, compare=False)


@dataclass(eq=False)
class Storage:
    """A storage: its bytes, the numbers of the events between which it is alive, and facts that say what it is."""

    nbytes: int
    born: int  # alive after the event of this number
    name: str  # path of an argument, or the operation that allocated it
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: Site | None
    argument: bool = False
    phase: Phase = "forward"
    host: bool = False
    part: str | None = None
    died: int | None = None  # no longer alive at the event of this number
    readers: set[str] = field(default_factory=set)  # phases of the operations that read it
    read_at: tuple[int, Site | None] = (-1, None)  # number and line of the last operation of forward that did
    written: bool = False  # by an operation, after it was allocated
    sources: Sequence[Storage] = ()  # of a sum over the ranks: the summands


class Storages:
    """The storages that a rank allocates, followed until they are freed."""

    def __init__(self) -> None:
        self.all: list[Storage] = []
        self.live = 0  # bytes on the device
        self.host = self.host_peak = 0  # bytes in host memory, now and at most
        self.clock = 0  # number of events so far
        self._alive: dict[int, Storage] = {}
        self._refs: dict[int, Any] = {}

    def get(self, x: Tensor) -> Storage | None:
        """Return the storage of a tensor; None for one that exists outside of the run."""
        return self._alive.get(storage_id(x))

    def is_newest(self, x: Tensor) -> bool:
        """Return whether a tensor is in the storage that was allocated last."""
        return bool(self.all) and self.get(x) is self.all[-1]

    def add(self, x: Tensor, name: str, where: Site | None, **facts: Any) -> Storage:
        """Begin to follow the storage of a tensor."""
        key, storage = storage_id(x), x.untyped_storage()
        new = Storage(storage.nbytes(), self.clock, name, tuple(x.shape), x.dtype, where, host=x.is_meta, **facts)
        self.all.append(new)
        self._alive[key] = new
        self._count(new, new.nbytes)
        self._refs[key] = weakref.ref(storage, lambda _: self._free(key))
        return new

    def _free(self, key: int) -> None:
        storage = self._alive.pop(key)
        del self._refs[key]
        storage.died = self.clock
        self._count(storage, -storage.nbytes)

    def _count(self, storage: Storage, nbytes: int) -> None:
        if storage.host:
            self.host += nbytes
            self.host_peak = max(self.host_peak, self.host)
        else:
            self.live += nbytes

    def alive(self) -> list[Storage]:
        """Return the storages that exist now."""
        return list(self._alive.values())

    def begin_again(self) -> None:
        """Begin the next call, which has the storages that the last one left."""
        self.all = self.alive()
        self.clock, self.host_peak = 0, self.host
        for s in self.all:
            s.born = 0


_PARAMETERS = re.compile(r"params|frozen|weights")
_OPTIMIZER = re.compile(r"\bopt|\[['\"]opt")


def part_of(storage: Storage, gradients: set[int]) -> str:
    """Return which of `PARTS` a storage is."""
    if not storage.argument:
        if storage.part is not None:
            return storage.part
        if id(storage) in gradients:
            return "gradients"
        return "activations" if storage.phase in ("forward", "recompute") else "other"
    if _OPTIMIZER.search(storage.name):
        return "optimizer"
    in_forward = "forward" in storage.readers
    if storage.dtype.is_floating_point:
        if _PARAMETERS.search(storage.name) or (in_forward and (storage.written or "update" in storage.readers)):
            return "parameters"
        if not in_forward and storage.readers:
            return "optimizer"
    return "other"


def gradients_among(storages: Sequence[Storage], last_backward: int) -> set[int]:
    """Return the `id` of each storage that is a gradient, of a rank's part or before the sum over the ranks."""
    found: set[int] = set()
    stack = [s for s in storages if not s.argument and s.phase == "backward" and s.part is None
             and ("update" in s.readers or s.died is None or s.died > last_backward)]  # fmt: skip
    while stack:
        s = stack.pop()
        if id(s) not in found and not s.argument and s.phase == "backward":
            found.add(id(s))
            stack += s.sources
    return found


class Alike(NamedTuple):
    """Facts of a storage: a plan counts those that have the same ones together."""

    nbytes: int
    part: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    where: Site | None
    argument: bool


Tensors = Counter[Alike]  # how many there are of each


def tensors_at(storages: Sequence[Storage], at: int) -> Tensors:
    """Return the storages of the device that are alive after an event, of which `part` is set."""
    return Counter(Alike(s.nbytes, s.part or "other", s.dtype, s.shape, s.where, s.argument)
                   for s in storages if not s.host and s.born <= at and (s.died is None or s.died > at))  # fmt: skip


def parts_and_largest(tensors: Tensors) -> tuple[dict[str, int], tuple[tuple[int, str, Site | None], ...]]:
    """Return `Memory.parts` and `Memory.largest`."""
    parts = dict.fromkeys(PARTS, 0)
    for x, n in tensors.items():
        parts[x.part] += n * x.nbytes
    rows = [(x.nbytes, f"{x.part} {short_dtype(x.dtype)}{list(x.shape)}", x.where)
            for x, n in tensors.items() if not x.argument for _ in range(min(n, _MOST_LARGEST))]  # fmt: skip

    def order(row: tuple[int, str, Site | None]) -> tuple[Any, ...]:
        nbytes, text, where = row
        return -nbytes, text, *(("", 0) if where is None else (where.code.co_qualname, where.lasti))

    return parts, tuple(sorted(rows, key=order)[:_MOST_LARGEST])
