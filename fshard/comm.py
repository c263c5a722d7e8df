"""What carries the bytes: one small protocol, and the thread-bound region in which it may be used.

`ProcessComm` is one rank of `torch.distributed`; `SimulatedComm` is one thread of this process, which meets the
others and lets the last to arrive do the exchange, in rank order. Nothing above this file knows which it is.
All parts have equal shapes here: uneven sizes, dims and dtypes of a tree are the business of `collectives`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from .errors import ShardingError, fail

T = TypeVar("T")
Axes = tuple[str, ...]


class Comm(Protocol):
    """One rank's view of the mesh. `axes` are names of axes whose sizes multiply to more than one, major first."""

    sizes: Mapping[str, int]
    coords: Mapping[str, int]

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        """`op` ("sum", "max", "min") over the ranks: [*S] -> [*S]."""

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        """Everyone's tensor, in axis order: [*S] -> [n, *S]."""

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        """The sum of everyone's part for me: [n, *S] -> [*S]."""

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        """Row j goes to rank j; row i came from rank i: [n, *S] -> [n, *S]."""

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        """What the rank whose pair is (it, me) sent; zeros if none did: [*S] -> [*S]."""


# --- the region -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """The inside of one `shard_map` call, on one rank: axis names are bound here and nowhere else."""

    comm: Comm
    rank: int
    device: torch.device
    uneven: bool = False  # some argument does not divide: gathers of unknown size ask first
    donated: frozenset[int] = frozenset()  # storages the call may overwrite

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.comm.sizes

    @property
    def coords(self) -> Mapping[str, int]:
        return self.comm.coords


_bound = threading.local()


def region(verb: str = "this") -> Region:
    """The region this thread is in. Raises ShardingError, naming `verb`, outside `shard_map`."""
    found: Region | None = getattr(_bound, "region", None)
    if found is None:
        raise fail(f"{verb}: called outside shard_map, where no mesh axis is bound",
                   fix="call it inside a function wrapped by fs.shard_map(f, mesh=..., ...)")  # fmt: skip
    return found


def in_region() -> bool:
    return getattr(_bound, "region", None) is not None


@contextlib.contextmanager
def bind(new: Region) -> Iterator[None]:
    """Enter a region on this thread."""
    if in_region():
        raise fail("shard_map inside shard_map: the axes are bound already", fix="call the inner function directly")
    _bound.region = new
    try:
        yield
    finally:
        _bound.region = None


# --- a record of what moved -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """One collective of one rank. `bytes` is the size of its argument there."""

    op: str
    axes: Axes
    dtype: torch.dtype
    bytes: int


_record: list[Transfer] | None = None


@contextlib.contextmanager
def recording() -> Iterator[list[Transfer]]:
    """Collect every transfer of every rank this process runs.

    >>> with recording() as log: step(params, batch)
    >>> len(log)
    """
    global _record
    before, _record = _record, []
    try:
        yield _record
    finally:
        _record = before


def _note(op: str, x: Tensor, axes: Axes) -> None:
    if _record is not None:
        _record.append(Transfer(op, axes, x.dtype, x.numel() * x.element_size()))


# --- processes ------------------------------------------------------------------------------------------------


class ProcessComm:
    """A rank of torch.distributed: functional collectives, so that `torch.compile(fullgraph=True)` sees them."""

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> None:
        self.sizes, self.coords = dict(sizes), dict(coords)
        self._axes = tuple(a for a, n in sizes.items() if n > 1)
        self._groups: dict[Axes, str] = {}
        # Every subset, in one order on every rank: a group made later, by some ranks only, would be a hang.
        for k in range(1, len(self._axes) + 1):
            for axes in itertools.combinations(self._axes, k):
                whole = len(axes) == len(self._axes)
                group = dist.group.WORLD if whole else dist.new_group(self._members(axes), use_local_synchronization=True)
                assert group is not None
                self._groups[axes] = group.group_name

    def _members(self, axes: Axes) -> list[int]:
        """The ranks that share my coordinates on every other axis, in order."""
        ranges = [range(n) if a in axes else [self.coords[a]] for a, n in self.sizes.items()]
        steps = [math.prod(list(self.sizes.values())[i + 1 :]) for i in range(len(self.sizes))]
        return [sum(c * s for c, s in zip(coords, steps, strict=True)) for coords in itertools.product(*ranges)]

    def _group(self, axes: Axes) -> tuple[str, int, list[int] | None]:
        """(group, size, order): `order` takes mesh order to the order of `axes`, where they differ."""
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        sorted_axes = tuple(a for a in self._axes if a in axes)
        n = size_of(axes, self.sizes)
        order = None
        if axes != sorted_axes:
            grid = torch.arange(n).view([self.sizes[a] for a in sorted_axes])
            order = grid.permute([sorted_axes.index(a) for a in axes]).flatten().tolist()
        return self._groups[sorted_axes], n, order

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        _note("all_reduce", x, axes)
        return _wait(torch.ops._c10d_functional.all_reduce, x.contiguous(), op, self._group(axes)[0])

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        _note("all_gather", x, axes)
        group, n, order = self._group(axes)
        flat = x.contiguous().view(-1)
        out = _wait(torch.ops._c10d_functional.all_gather_into_tensor, flat, n, group).view(n, *x.shape)
        return out if order is None else out[order]

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        if x.device.type == "cpu":
            # Measured on gloo: exchange and sum takes 0.6 of its reduce_scatter's time, and sums in rank order.
            return self.all_to_all(x, axes).sum(0, dtype=x.dtype)
        _note("reduce_scatter", x, axes)
        group, n, order = self._group(axes)
        x = x if order is None else x[_inverse(order)]
        out = _wait(torch.ops._c10d_functional.reduce_scatter_tensor, x.reshape(-1), "sum", n, group)
        return out.view(x.shape[1:])

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        _note("all_to_all", x, axes)
        if x.is_complex():
            return torch.view_as_complex(self.all_to_all(torch.view_as_real(x), axes))
        group, n, order = self._group(axes)
        x = x if order is None else x[_inverse(order)]
        each = [x[0].numel()] * n
        out = _wait(torch.ops._c10d_functional.all_to_all_single, x.reshape(-1), each, each, group).view(x.shape)
        return out if order is None else out[order]

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        _note("permute", x, axes)
        if x.is_complex():
            return torch.view_as_complex(self.permute(torch.view_as_real(x), pairs, axes))
        group, n, order = self._group(axes)
        me = index_of(axes, self.sizes, self.coords)
        place = list(range(n)) if order is None else order
        send, receive = [0] * n, [0] * n
        for source, target in pairs:
            if source == me:
                send[place[target]] = x.numel()
            if target == me:
                receive[place[source]] = x.numel()
        flat = x.reshape(-1)[: sum(send)]
        out = _wait(torch.ops._c10d_functional.all_to_all_single, flat, receive, send, group)
        return out.view(x.shape) if sum(receive) == x.numel() else torch.zeros_like(x)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda i: order[i])


def _wait(op: Callable[..., Tensor], x: Tensor, *args: object) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops._c10d_functional.wait_tensor(op(x, *args))
    try:
        return torch.ops._c10d_functional.wait_tensor(op(x, *args))
    except RuntimeError as e:
        raise fail(f"rank {dist.get_rank()}: a collective broke off: another rank has failed, or left the program",
                   str(e).splitlines()[0], fix="see the first traceback of the other ranks") from e  # fmt: skip


def size_of(axes: Axes, sizes: Mapping[str, int]) -> int:
    """The number of ranks over the flattened `axes`."""
    n = 1
    for a in axes:
        n *= sizes[a]
    return n


def index_of(axes: Axes, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """Position over the flattened `axes`, the first the most major."""
    at = 0
    for a in axes:
        at = at * sizes[a] + coords[a]
    return at


# --- threads --------------------------------------------------------------------------------------------------


class _Abandoned(BaseException):
    """Ends a rank whose job another rank has ended: a BaseException, so that no user code catches it."""


@dataclass
class _Slot:
    tag: tuple[Any, ...]
    first: int
    payloads: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None


class _Meeting:
    """Where the threads of one run meet. It ends the run at the first failure and at the first deadlock."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.changed = threading.Condition()
        self.slots: dict[tuple[int, ...], _Slot] = {}
        self.waiting: dict[int, str] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None

    def exchange(self, rank: int, group: tuple[int, ...], x: Tensor, tag: tuple[Any, ...], combine: Any) -> Tensor:
        with self.changed:
            self._stop_if_failed()
            slot = self.slots.setdefault(group, _Slot(tag, rank))
            if slot.tag != tag:
                raise fail("the ranks disagree on a collective", f"rank {slot.first}  {_tell(slot.tag)}",
                           f"rank {rank}  {_tell(tag)}",
                           fix="every rank must call the same collectives in the same order, on equal shapes; for a "
                               "dim that the axis does not divide, pass its global size=")  # fmt: skip
            slot.payloads[rank] = x
            if len(slot.payloads) < len(group):
                self.waiting[rank] = _tell(tag)
                self._stop_if_deadlocked()
                self.changed.wait_for(lambda: slot.results is not None or self.failure is not None)
                self._stop_if_failed()
                assert slot.results is not None
                return slot.results[rank]
            del self.slots[group]
        results = combine([slot.payloads[r] for r in group])  # the others wait; other groups may go on
        with self.changed:
            slot.results = dict(zip(group, results, strict=True))
            for r in group:
                self.waiting.pop(r, None)
            self.changed.notify_all()
        return slot.results[rank]

    def finish(self, rank: int) -> None:
        with self.changed:
            self.finished.add(rank)
            self._stop_if_deadlocked()

    def end(self, failure: BaseException) -> None:
        """Record the first failure and wake everyone."""
        with self.changed:
            if self.failure is None:
                self.failure = failure
            self.changed.notify_all()

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise _Abandoned

    def _stop_if_deadlocked(self) -> None:
        if not self.waiting or len(self.waiting) + len(self.finished) < self.n or self.failure is not None:
            return
        lines = [f"rank {r}  waits in {where}" for r, where in sorted(self.waiting.items())]
        lines += [f"rank {r}  has returned" for r in sorted(self.finished)]
        self.failure = fail("deadlock: every rank waits for one that will not come", *lines,
                            fix="every rank must call the same collectives in the same order")  # fmt: skip
        self.changed.notify_all()


def _tell(tag: tuple[Any, ...]) -> str:
    op, axes, shape, dtype, *_ = tag
    return f"{op} over {', '.join(map(repr, axes))} of {str(dtype).removeprefix('torch.')}{list(shape)}"


class SimulatedComm:
    """One thread as a rank."""

    def __init__(self, sizes: Mapping[str, int], coords: Mapping[str, int], meeting: _Meeting) -> None:
        self.sizes, self.coords, self._meeting = sizes, coords, meeting
        self._rank = index_of(tuple(sizes), sizes, coords)

    def _meet(self, op: str, x: Tensor, axes: Axes, combine: Callable[[list[Tensor]], Any], *more: object) -> Tensor:
        _note(op, x, axes)
        group = []
        for at in itertools.product(*(range(self.sizes[a]) for a in axes)):
            group.append(index_of(tuple(self.sizes), self.sizes, {**self.coords, **dict(zip(axes, at, strict=True))}))
        tag = (op, axes, tuple(x.shape), x.dtype, *more)
        return self._meeting.exchange(self._rank, tuple(group), x, tag, combine)

    def all_reduce(self, x: Tensor, op: str, axes: Axes) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            total = _reduce(xs, op)
            return [total, *(total.clone() for _ in xs[1:])]

        return self._meet(f"all_reduce {op}", x, axes, combine)

    def all_gather(self, x: Tensor, axes: Axes) -> Tensor:
        return self._meet("all_gather", x, axes, lambda xs: [torch.stack(xs) for _ in xs])

    def reduce_scatter(self, x: Tensor, axes: Axes) -> Tensor:
        return self._meet("reduce_scatter", x, axes, lambda xs: [_reduce(list(r), "sum") for r in zip(*xs, strict=True)])

    def all_to_all(self, x: Tensor, axes: Axes) -> Tensor:
        return self._meet("all_to_all", x, axes, lambda xs: [torch.stack(r) for r in zip(*xs, strict=True)])

    def permute(self, x: Tensor, pairs: Sequence[tuple[int, int]], axes: Axes) -> Tensor:
        def combine(xs: list[Tensor]) -> list[Tensor]:
            source = {target: xs[source] for source, target in pairs}
            return [source[i].clone() if i in source else torch.zeros_like(x) for i, x in enumerate(xs)]

        return self._meet("permute", x, axes, combine, tuple(pairs))


def _reduce(xs: Sequence[Tensor], op: str) -> Tensor:
    """Reduce in rank order; sums of half precision are kept in float32 and rounded once."""
    step = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    dtype = xs[0].dtype
    wide = torch.float32 if op == "sum" and dtype in (torch.float16, torch.bfloat16) else dtype
    total = xs[0].to(wide, copy=True)
    for x in xs[1:]:
        total = step(total, x.to(wide))
    return total.to(dtype)


def simulate(
    sizes: Mapping[str, int], pool: ThreadPoolExecutor, f: Callable[[Comm, int], T]
) -> list[T]:
    """Run `f(comm, rank)` on one thread per rank and give the results in rank order.

    The first rank that raises ends the others, and its exception, with its own traceback, is the one raised here.
    """
    n = math.prod(sizes.values())
    meeting = _Meeting(n)
    grad = torch.is_grad_enabled()

    def rank_main(rank: int, coords: Mapping[str, int]) -> T | None:
        try:
            # Ranks differentiate on their own thread: the engine's device threads would be shared by all of them.
            with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(grad):
                out = f(SimulatedComm(sizes, coords, meeting), rank)
            meeting.finish(rank)
            return out
        except _Abandoned:
            return None
        except BaseException as e:
            meeting.end(e)
            return None

    grid = itertools.product(*(range(k) for k in sizes.values()))
    with _shared_dual_level():
        futures = [pool.submit(rank_main, r, dict(zip(sizes, at, strict=True))) for r, at in enumerate(grid)]
        try:
            results = [future.result() for future in futures]
        except BaseException as e:  # an interrupt of the caller
            meeting.end(e)
            raise
    if meeting.failure is not None:
        raise meeting.failure
    return results  # type: ignore[return-value]


@contextlib.contextmanager
def _shared_dual_level() -> Iterator[None]:
    """Let every rank use `torch.func.jvp` at once.

    Forward-mode levels belong to the process, not to the thread: the first rank to leave its jvp would erase the
    tangents of the others. So one level is opened here around them all, and the depth that functorch counts
    starts high enough that no rank opens or closes another.
    """
    depth = eager_transforms.JVP_NESTING
    level = None if depth else forward_ad.enter_dual_level()
    eager_transforms.JVP_NESTING = 1 << 20
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING = depth
        if level is not None:
            forward_ad.exit_dual_level(level=level)


__all__ = ["Comm", "ProcessComm", "Region", "ShardingError", "SimulatedComm", "Transfer", "bind", "in_region",
           "index_of", "recording", "region", "simulate", "size_of"]  # fmt: skip
