"""The storages of a planned run, when each is alive, and what they are at the peak.

The storages of arguments are told apart by what the step does with them, under any names:
- parameters: those that are differentiated, if their gradient is a result or is read by an update. Also frozen ones:
  those that forward passes to an operation as its weight (`x @ w`, and `F.linear`, `F.conv2d`, ... by their schemas);
- optimizer: others that are read, element by element, where results are computed from gradients: moments, averages of
  parameters, master weights, counts, a loss scale;
- other: the batch, and states of forward that a step returns anew, as a cache of keys and values.
A leaf that is in none of these joins the parameters or the optimizer if all others do in the smallest subtree of an
argument that has any: scales of norms in a tree of frozen weights. In an evaluation all weights are frozen.

Storages that a rank allocates are
- gathered: results of a gather of parameters, and copies of parameters, as in another dtype;
- buffers: of transfers;
- gradients: of parameters; before casts and sums over the ranks; summed over microbatches, clipped, unscaled;
- activations: made in forward and in a recomputation;
- other: made in backward and in the update; results; data; memory that a kernel allocates and frees.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._core.callsite import Site
from fshard._core.torch import storage_id
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
        parts: the bytes of each kind of tensor at the peak; they sum to `peak`. Arguments are told apart by what the
            step does with them, under any names: parameters are differentiated, or weights that forward reads; the
            optimizer's are read together with gradients; the batch is other.
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
    read_at: tuple[int, Site | None] = (-1, None)  # number and line of the last operation of forward that did
    sources: Sequence[Storage] = ()  # of a sum over the ranks: the summands
    path: tuple[Any, ...] = ()  # of an argument
    has_gradient: bool = False  # it was computed from a gradient
    made_of: list[Sequence[Storage]] = field(default_factory=list)  # what its elements were computed from, one by one
    weight_at: dict[bool, int] = field(default_factory=dict)  # of an argument: the first event that takes it as a
    # weight, of one product and (True) of a batch of products, where it may be a cache of keys
    is_data: bool = False  # of an argument: it is multiplied by a weight
    is_state: bool = False  # of an argument: it is written or returned anew, without a gradient in it


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

    def add_workspace(self, nbytes: int, name: str, where: Site | None, phase: Phase) -> None:
        """Note memory that exists only in the next event."""
        self.all.append(Storage(nbytes, self.clock, f"workspace of {name}", (nbytes,), torch.uint8, where, phase=phase,
                                part="other", died=self.clock + 1))  # fmt: skip

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
            s.born, s.made_of, s.weight_at = 0, [], {}
            s.has_gradient = s.is_data = s.is_state = False


def arguments_of(storage: Storage) -> list[Storage]:
    """Return the arguments that a storage is made of, if it has no gradient in it."""
    if storage.argument:
        return [storage]
    return [] if storage.has_gradient else [s for sources in storage.made_of for s in sources]


def _origins(storages: Iterable[Storage], ends: Set[Storage] = frozenset(), writes: int | None = None) -> set[Storage]:
    """Return the storages that some are made of, themselves included, and not what `ends` are made of.

    `writes`: the number of operations that count of those that wrote to a storage: 1 for the one that allocated it.
    """
    found: set[Storage] = set()
    lists: set[int] = set()  # of many results one list is shared
    stack = list(storages)
    while stack:
        s = stack.pop()
        if s not in found:
            found.add(s)
            for sources in s.made_of[:writes] if s not in ends else ():
                if id(sources) not in lists:
                    lists.add(id(sources))
                    stack += sources
    return found


def assign_parts(
    storages: Sequence[Storage], gradients: Sequence[tuple[Storage, Storage]], results: Sequence[Storage],
    last_backward: int,
) -> None:  # fmt: skip
    """Set which of `PARTS` each storage is, by what was differentiated, and its gradients; and by the results.

    1. A gradient counts if a result is made of it, or of the argument: not a loss which has gradients in it.
    2. Arguments by the rules above, then those that no rule names by their neighbours.
    3. What was allocated, by its phase.
    """
    ends = {g for _, g in gradients}
    kept = _origins((s for s in results if s.has_gradient), ends)
    counted = [(set(arguments_of(x)), g) for x, g in gradients if g in kept or kept & set(arguments_of(x))]
    trained = {a for arguments, _ in counted for a in arguments}
    for a in (a for s in results if not s.argument for a in arguments_of(s)):
        a.is_state = True
    arguments = [s for s in storages if s.argument]
    for s in arguments:
        at = min((n for is_batch, n in s.weight_at.items() if not (is_batch and s.is_state)), default=last_backward)
        frozen = at < last_backward and not s.is_data
        s.part = ("parameters" if s in trained or frozen else "optimizer" if s in kept else
                  "other" if s.is_data else None)  # fmt: skip
    _ask_neighbours(arguments)
    found = _summed({g for _, g in counted})
    for s in storages:
        if s.part == "gathered" and all(a.part != "parameters" for a in _origins([s]) if a.argument):
            s.part = None
        if s.part is None and s.has_gradient and s in kept and s.phase != "backward":  # a new leaf, or a sum or share
            is_leaf = any(a.argument and a.shape == s.shape for a in _origins([s], ends, writes=1))
            s.part = "other" if is_leaf else "gradients"
        if s.part is None:
            s.part = "gradients" if s in found else "activations" if s.phase in ("forward", "recompute") else "other"


def _ask_neighbours(arguments: Sequence[Storage]) -> None:
    """Set the part of each argument that has none: the others' part in the smallest subtree that has any."""
    parts: dict[tuple[Any, ...], set[str]] = {}
    for s in arguments:
        for depth in range(1, len(s.path) + 1) if s.part is not None else ():
            parts.setdefault(s.path[:depth], set()).add(s.part or "")
    for s in arguments:
        if s.part is None:
            near = next((parts[s.path[:n]] for n in range(len(s.path), 0, -1) if s.path[:n] in parts), {"other"})
            is_one = near == {"optimizer"} or (len(near) == 1 and s.dtype.is_floating_point and not s.is_state)
            s.part = next(iter(near)) if is_one else "other"


def _summed(gradients: Iterable[Storage]) -> set[Storage]:
    """Return gradients, and what they were in backward before casts and sums over the ranks."""
    found: set[Storage] = set()
    stack = list(gradients)
    while stack:
        s = stack.pop()
        if s not in found:
            found.add(s)
            before = [*s.sources, *(x for sources in s.made_of for x in sources)]
            stack += [x for x in before if not x.argument and x.phase == "backward" and x.part is None]
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
    """Return the storages of the device that are alive after an event, once `part` is set."""
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
